"""Where a fold reads and writes: links, mounts, what killed folds left, odd files, full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import record, saved, tensors
from safetensors.torch import load_file, save_file
from test_fold_guard import INDEX, refused, state

import flashnorm_triton as fn
from flashnorm_triton.checkpoints import folding, stream, workplace
from flashnorm_triton.checkpoints.workplace import MARKER

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("places") / "src")


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "src"))


def leftover(beside: Path) -> Path:
    """What a killed fold to ``beside`` leaves."""
    folder = beside.parent / f".{beside.name}.x1y2.tmp"
    folder.mkdir()
    (folder / MARKER).touch()
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"half")
    return folder


def test_leftovers_of_killed_folds_are_cleared(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "dst"
    mine = leftover(target)
    theirs = [leftover(tmp_path / "dst2"), tmp_path / ".dst.else.tmp"]
    theirs[1].mkdir()
    (theirs[1] / "letter.txt").write_text("not a fold's")
    kept = [state(folder) for folder in theirs]
    refused(source, target, "crest factor is at least 1", max_crest=0.5)
    assert mine.exists()  # what is refused changes nothing
    result = fn.fold_checkpoint(source, target, progress=False)
    assert result.cleared == (mine,) and not mine.exists()
    assert [state(folder) for folder in theirs] == kept
    assert not list(target.rglob(MARKER))


def test_two_folds_to_one_place_do_not_meet(source: Path, tmp_path: Path) -> None:
    folder = leftover(tmp_path / "dst")
    with (folder / MARKER).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(source, tmp_path / "dst", "another fold is writing .*dst now")
    assert (folder / MARKER).exists()
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)


def test_a_fold_holds_its_folder_while_it_writes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, met = stream.Rewriter.finish, []

    def meeting(self: stream.Rewriter) -> None:
        monkeypatch.setattr(stream.Rewriter, "finish", real)
        with pytest.raises(FileExistsError, match="another fold is writing"):
            fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
        met.append(True)
        real(self)

    monkeypatch.setattr(stream.Rewriter, "finish", meeting)
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    assert met and record(tmp_path / "dst")["folds"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_the_folder_takes_its_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It is undone, and a second signal does not disturb what is cleared away then."""
    before, handlers = state(source), [signal.getsignal(n) for n in (number, signal.SIGINT)]
    replace, rmtree, came = os.replace, shutil.rmtree, []

    def signalled(*arguments: Any) -> None:
        os.kill(os.getpid(), number)
        came.append("replace")
        replace(*arguments)

    def again(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        came.append("clear")
        rmtree(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(workplace.os, "replace", signalled)
        patch.setattr(workplace.shutil, "rmtree", again)
        wanted = KeyboardInterrupt if number == signal.SIGINT else SystemExit
        with pytest.raises(wanted) as raised:
            fn.fold_checkpoint(source, tmp_path / "deep" / "dst", progress=False)
    assert came == ["replace", "replace", "clear"]
    assert number == signal.SIGINT or raised.value.code == 128 + number
    assert [one.name for one in tmp_path.iterdir()] == ["src"] and state(source) == before
    assert [signal.getsignal(n) for n in (number, signal.SIGINT)] == handlers


def test_folders_above_the_destination_go_when_the_fold_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("no space left on device")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(folding, "make_card", broken)
    with pytest.raises(OSError, match="no space left"):
        fn.fold_checkpoint(source, tmp_path / "there" / "a" / "b" / "dst", progress=False)
    assert [one for one in tmp_path.rglob("*") if not one.is_relative_to(source)] == [
        tmp_path / "there"
    ]


def test_a_mount_point_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dst").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "dst")
    refused(source, tmp_path / "dst", r"mount point.*dst/src")


def test_a_snapshot_in_the_hubs_cache(original: Path, tmp_path: Path) -> None:
    """All of its files are links to blobs; what is written are files, writable, and no links."""
    cache = tmp_path / "models--me--tiny.model"
    snapshot, blobs = cache / "snapshots" / "0a1b2c", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in original.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        blob.chmod(0o444)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    before = state(blobs)
    result = fn.fold_checkpoint(snapshot, tmp_path / "dst", progress=False)
    assert result.record["source"]["name"] == "me/tiny.model"
    assert result.record["source"]["revision"] == "0a1b2c"
    card = (tmp_path / "dst" / "README.md").read_text()
    assert "base_model: me/tiny.model" in card and "revision `0a1b2c`" in card
    assert state(blobs) == before
    for file in (tmp_path / "dst").rglob("*"):
        assert not file.is_symlink() and file.stat().st_mode & stat.S_IWUSR
    fn.fold_checkpoint(original, tmp_path / "plain", progress=False)
    for name, tensor in tensors(tmp_path / "plain").items():
        assert torch.equal(tensors(tmp_path / "dst")[name], tensor)
    (snapshot / "tokenizer.json").resolve().unlink()
    refused(snapshot, tmp_path / "again", "tokenizer.json is a link to .*not there: download")


def test_a_link_to_a_folder_is_not_passed_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (source / "assets").symlink_to(tmp_path / "elsewhere")
    refused(source, tmp_path / "dst", "assets is a link to a folder")


@pytest.mark.parametrize("metadata", [None, "absent", {}])
def test_an_index_without_its_total_size(source: Path, tmp_path: Path, metadata: object) -> None:
    index = json.loads((source / INDEX).read_text())
    index["metadata"] = metadata
    if metadata == "absent":
        del index["metadata"]
    (source / INDEX).write_text(json.dumps(index))
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    assert (tmp_path / "dst" / INDEX).read_bytes() == (source / INDEX).read_bytes()
    fn.fold_checkpoint(source, tmp_path / "strict", strict=True, progress=False)
    written = json.loads((tmp_path / "strict" / INDEX).read_text())
    held = tensors(tmp_path / "strict")
    assert written["weight_map"].keys() == held.keys()
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in held.values())


def test_other_files_go_along_whatever_their_size(source: Path, tmp_path: Path) -> None:
    large = source / "assets" / "table.parquet"
    large.parent.mkdir()
    large.write_bytes(os.urandom(1 << 20) * 24)
    (source / "assets" / "empty").touch()
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    tracemalloc.start()
    result = fn.fold_checkpoint(source, tmp_path / "dst", digest="sha256", progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < large.stat().st_size
    copied = tmp_path / "dst" / "assets" / "table.parquet"
    assert copied.read_bytes() == large.read_bytes()
    assert (tmp_path / "dst" / "assets" / "empty").is_file()
    digest = hashlib.sha256(large.read_bytes()).hexdigest()
    assert result.record["source"]["files"]["assets/table.parquet"] == digest
    assert result.record["left_out"] == ["pytorch_model.bin"]
    assert not (tmp_path / "dst" / "pytorch_model.bin").exists()


def test_a_gain_that_is_not_finite_stays(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    name = "model.layers.1.input_layernorm.weight"
    shard = source / index["weight_map"][name]
    held = load_file(shard)
    held[name][3] = float("inf")
    save_file(held, shard, metadata={"format": "pt"})
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    kept = {one["norm"]: one["reason"] for one in record(tmp_path / "dst")["kept"]}
    assert "not finite" in kept[name.removesuffix(".weight")]
    assert torch.equal(tensors(tmp_path / "dst")[name], held[name])


def test_weights_of_eight_bits_are_left_alone(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    names = {
        "model.layers.0.self_attn.k_proj.weight": torch.float8_e4m3fn,
        "model.layers.1.mlp.up_proj.weight": torch.int8,
    }
    for name, dtype in names.items():
        shard = source / index["weight_map"][name]
        held = load_file(shard)
        held[name] = held[name].mul(40).to(dtype)
        save_file(held, shard, metadata={"format": "pt"})
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    kept = {one["norm"]: one["reason"] for one in record(tmp_path / "dst")["kept"]}
    assert "F8_E4M3" in kept["model.layers.0.input_layernorm"]
    assert "I8" in kept["model.layers.1.post_attention_layernorm"]
    before, after = tensors(source), tensors(tmp_path / "dst")
    for name in (*names, "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    changed = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[changed], after[changed])


def test_a_model_of_parts_whose_names_are_stored_with_other_prefixes(tmp_path: Path) -> None:
    """Language model and vision tower of one checkpoint; both fold, and pictures are still seen."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=99)
    eyes = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=28, patch_size=14)
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=eyes, image_token_index=98)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    model.save_pretrained(tmp_path / "src")
    fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    folded = {fold["gain"] for fold in record(tmp_path / "dst")["folds"]}
    assert "language_model.model.layers.1.input_layernorm.weight" in folded
    assert any(name.startswith("vision_tower") for name in folded)
    ids = torch.cat([torch.full((2, 4), 98), torch.randint(0, 90, (2, 9))], 1)
    seen = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28).double()}
    logits = [
        LlavaForConditionalGeneration.from_pretrained(folder).double().eval()(**seen).logits
        for folder in (tmp_path / "src", tmp_path / "dst")
    ]
    assert torch.linalg.vector_norm(logits[1] - logits[0]) < 1e-6 * logits[0].norm()
    assert len(folded) == 9 and not torch.equal(*logits)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_room_is_set_aside_where_the_disk_can(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if number == errno.ENOSPC:
        refused(source, tmp_path / "dst", "No space left")
    else:
        fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
        assert tensors(tmp_path / "dst").keys() == tensors(source).keys()
