"""What fold_checkpoint refuses, and that whatever happens nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import saved
from safetensors.torch import load_file, save_file

import flashnorm_triton as fn
from flashnorm_triton.checkpoints import folding, guard, passing

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("guard") / "src")


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "src"))


def state(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def refused(source: Path, target: Path, message: str, **options: object) -> None:
    """The fold stops with ``message``; the source is as it was and nothing new lies about."""
    before, around = state(source), sorted(target.parent.iterdir())
    with pytest.raises((ValueError, OSError), match=message):
        fn.fold_checkpoint(source, target, progress=False, **options)
    assert state(source) == before and sorted(target.parent.iterdir()) == around


def first_shard(source: Path) -> Path:
    return sorted(source.glob("*.safetensors"))[0]


def set_config(source: Path, **values: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **values}))


def test_places_that_are_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused(source, tmp_path / "full", "is not empty: give a new folder")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    refused(source, source, "is the source itself")
    refused(source, tmp_path / "src" / ".." / "src", "is the source itself")
    refused(source, source / "inside", "lie inside each other")
    (tmp_path / "file").write_text("")
    refused(source, tmp_path / "file", "is a file: give a new folder")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    refused(source, tmp_path / "link", "is a link")
    (tmp_path / "empty").mkdir()
    fn.fold_checkpoint(source, tmp_path / "empty", progress=False)
    assert (tmp_path / "empty" / "flashnorm.json").is_file()


def test_sources_that_are_none(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        fn.fold_checkpoint(tmp_path / "none", tmp_path / "dst")
    with pytest.raises(FileNotFoundError, match="is a file: give the folder"):
        fn.fold_checkpoint(source / "config.json", tmp_path / "dst")
    (source / "config.json").rename(tmp_path / "config.json")
    refused(source, tmp_path / "dst", "has no config.json")


def test_too_little_disk_says_how_much(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(guard.shutil, "disk_usage", lambda path: usage._replace(free=5_000))
    refused(source, tmp_path / "dst", r"takes 1\.\d+ MB, 5 kB are free, 1\.\d+ MB are missing")
    with pytest.raises(OSError, match="too little disk"):
        fn.fold_checkpoint(source, tmp_path / "no" / "such" / "place", progress=False)
    assert not (tmp_path / "no").exists()


def test_a_hub_id_is_downloaded_without_other_formats(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        if name == "no/where":
            raise ConnectionError("the hub is unreachable")
        asked.update(options, name=name)
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    result = fn.fold_checkpoint("some/model", tmp_path / "dst", progress=False)
    assert asked["name"] == "some/model" and "*.bin" in asked["ignore_patterns"]
    assert result.record["source"]["name"] == "some/model"
    assert "base_model: some/model" in (tmp_path / "dst" / "README.md").read_text()
    with pytest.raises(FileNotFoundError, match="could not be fetched from the hub .*unreachable"):
        fn.fold_checkpoint("no/where", tmp_path / "other")


def drop_shard(source: Path) -> None:
    first_shard(source).unlink()


def add_shard(source: Path) -> None:
    save_file({"x": torch.ones(3)}, source / "model-00099-of-00099.safetensors")


def add_single(source: Path) -> None:
    save_file({"x": torch.ones(3)}, source / "model.safetensors")


def truncate(source: Path) -> None:
    with first_shard(source).open("r+b") as file:
        file.truncate(first_shard(source).stat().st_size - 1)


def truncate_in_the_header(source: Path) -> None:
    with first_shard(source).open("r+b") as file:
        file.truncate(20)


def lengthen(source: Path) -> None:
    with first_shard(source).open("ab") as file:
        file.write(b"\0")


def not_safetensors(source: Path) -> None:
    first_shard(source).write_bytes(b"hello, this is no checkpoint at all")


def unlist_a_tensor(source: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"].pop("model.norm.weight")
    (source / INDEX).write_text(json.dumps(index))


def drop_a_tensor(source: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    file = source / index["weight_map"].pop("model.norm.weight")
    kept = {name: t for name, t in load_file(file).items() if name != "model.norm.weight"}
    save_file(kept, file)
    (source / INDEX).write_text(json.dumps(index))


def reshape_a_tensor(source: Path) -> None:
    file = source / json.loads((source / INDEX).read_text())["weight_map"]["model.norm.weight"]
    held = load_file(file)
    held["model.norm.weight"] = torch.rand(65)
    save_file(held, file)


def pickled(source: Path) -> None:
    for file in [*source.glob("*.safetensors"), source / INDEX]:
        file.unlink()
    torch.save({}, source / "pytorch_model.bin")


def no_weights(source: Path) -> None:
    for file in [*source.glob("*.safetensors"), source / INDEX]:
        file.unlink()


def quantized(source: Path) -> None:
    set_config(source, quantization_config={"quant_method": "gptq", "bits": 4})


def quantized_unsaid(source: Path) -> None:
    file = first_shard(source)
    held = load_file(file)
    held["model.layers.0.mlp.up_proj.weight_scale"] = torch.rand(3)
    save_file(held, file)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight_scale"] = file.name
    (source / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_shard, r"1 of \d+ shards are missing .*first model-00001-of-"),
        (add_shard, "its index does not list, first model-00099-of-00099"),
        (add_single, "its index does not list, first model.safetensors"),
        (truncate, r"model-00001-of-\d+.safetensors is truncated: \d+ bytes, its header speaks of"),
        (truncate_in_the_header, "is truncated: 20 bytes, its header alone is"),
        (lengthen, "is too long"),
        (not_safetensors, "is not a safetensors file"),
        (unlist_a_tensor, "index and the shards|index.json and the shards disagree on model.norm"),
        (drop_a_tensor, "1 tensors of the model are not in the checkpoint, first model.norm"),
        (reshape_a_tensor, r"model.norm.weight has shape \[65\], but .* wants \[64\]"),
        (pickled, "the weights are pickled .*only safetensors are folded"),
        (no_weights, "holds no safetensors weights"),
        (quantized, r"already quantized \(gptq\).*The order is: fold first, then quantize"),
        (quantized_unsaid, r"already quantized \(model.layers.0.mlp.up_proj.weight_scale\)"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damaged_or_unfit_sources(
    source: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(source)
    refused(source, tmp_path / "dst", message)


def test_a_folded_checkpoint_is_not_folded_again(source: Path, tmp_path: Path) -> None:
    fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    refused(tmp_path / "dst", tmp_path / "again", "is already folded")
    fn.fold_checkpoint(source, tmp_path / "plain", flags=False, progress=False)
    refused(tmp_path / "plain", tmp_path / "again", "is already folded")
    set_config(source, flash_norm=True)
    refused(source, tmp_path / "again", "is already folded")


def test_models_and_options_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    refused(source, tmp_path / "dst", "dtype 'int8' is none .*use bfloat16", dtype="int8")
    refused(source, tmp_path / "dst", "not tied to the embedding: leave --untie out", untie=True)
    set_config(source, auto_map={"AutoConfig": "code.Config"}, model_type="theirs")
    refused(source, tmp_path / "dst", "cannot build this model")
    set_config(source, auto_map={}, model_type="nosuchmodel", architectures=["NoSuchModel"])
    refused(source, tmp_path / "dst", "cannot build this model")


def test_float16_that_cannot_hold_the_product(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    name = "model.layers.1.post_attention_layernorm.weight"
    held = load_file(source / index["weight_map"][name])
    held[name] = torch.full_like(held[name], 1e6)
    save_file(held, source / index["weight_map"][name])
    refused(source, tmp_path / "dst", "float16 cannot hold .*bfloat16", dtype="float16")
    fn.fold_checkpoint(source, tmp_path / "dst", dtype="bfloat16", progress=False)


def test_an_error_or_interrupt_at_any_point_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write and every step to the last rename is made to fail once."""
    real, counter = passing.write_all, itertools.count()

    def counting(*arguments: object) -> None:
        next(counter)
        real(*arguments)

    monkeypatch.setattr(passing, "write_all", counting)
    fn.fold_checkpoint(source, tmp_path / "counted", progress=False)
    count = next(counter)
    assert count > 20
    for place in (1, 2, count // 2, count):
        turns = itertools.count(1)

        def failing(*arguments: object, turns: Any = turns, place: int = place) -> None:
            if next(turns) == place:
                raise KeyboardInterrupt
            real(*arguments)

        monkeypatch.setattr(passing, "write_all", failing)
        before = state(source)
        with pytest.raises(KeyboardInterrupt):
            fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
        assert state(source) == before
        assert sorted(f.name for f in tmp_path.iterdir()) == ["counted", "src"]
    monkeypatch.setattr(passing, "write_all", real)
    for step in ("_copy_others", "_record", "_write_texts", "make_card"):

        def broken(*arguments: object) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(folding, step, broken)
            refused(source, tmp_path / "dst", "no space left")


def test_nobody_joins_a_file_that_has_failed() -> None:
    """Its files are closed, so that a thread that joined would fail of that, and be heard first."""
    one = passing.Pass(Path("a"), Path("b"), b"", 0, ())
    team = passing.Team("sha256", lambda count: None)
    for whole, expected in ((True, one), (False, None)):
        assert team._join([], [one]) is one
        one.close = lambda whole: None
        team._leave(one, whole)
        joined = team._join([], [one])
        assert joined is expected
        if joined:
            team._leave(one, True)


def test_a_file_that_cannot_be_begun_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(passing, "reserve", full)
    source = tmp_path / "a"
    source.write_bytes(b"abc")
    one = passing.Pass(source, tmp_path / "b", b"", 0, ())
    with pytest.raises(OSError, match="no space left"):
        one.open("sha256")
    assert one._in.closed and one._out.closed


SLOW = """
import os, sys, time
from flashnorm_triton.checkpoints import folding, passing
real = passing.write_all
def slow(*arguments):
    real(*arguments)
    os.write(1, f"{os.getpid()}\\n".encode())  # whole lines, from whichever thread
    time.sleep(0.5)
passing.write_all = slow
for name in sys.argv[2:]:  # forks: torch is imported once
    child = os.fork()
    if not child:
        try:
            folding.fold_checkpoint(sys.argv[1], name, progress=False)
        finally:
            os._exit(3)
    os.waitpid(child, 0)
    print("end", flush=True)
"""


def test_signals(source: Path, tmp_path: Path) -> None:
    before = state(source)
    numbers = {
        "terminated": signal.SIGTERM,
        "interrupted": signal.SIGINT,
        "hung up": signal.SIGHUP,
        "killed": signal.SIGKILL,
    }
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), *(str(tmp_path / name) for name in numbers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(fn.__file__).parents[1])},
    )
    assert child.stdout is not None
    for name, number in numbers.items():
        process = int(child.stdout.readline())
        assert [f for f in tmp_path.iterdir() if f.name.startswith(f".{name}")], "it has begun"
        os.kill(process, number)
        while child.stdout.readline() != b"end\n":
            pass
        assert state(source) == before and not (tmp_path / name).exists()
        left = [f.name for f in tmp_path.iterdir() if f != source]
        if number == signal.SIGKILL:  # which nothing can clear up after
            assert len(left) == 1 and left[0].startswith(".killed."), left
        else:
            assert not left
    assert child.wait(30) == 0
    cleared = fn.fold_checkpoint(source, tmp_path / "killed", progress=False).cleared
    assert [folder.name for folder in cleared] == left
    assert sorted(f.name for f in tmp_path.iterdir()) == ["killed", "src"]


def test_a_failure_stops_the_other_shards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are written several at a time; none goes on for a result that nobody will see."""
    real, writes = passing.write_all, itertools.count()
    failed = threading.Event()

    def failing(sink: Any, data: Any, place: int) -> None:
        if "00001-of" in sink.name:
            failed.set()
            raise OSError("no space left on device")
        failed.wait(10)
        time.sleep(0.05)
        next(writes)
        real(sink, data, place)

    monkeypatch.setattr(passing, "write_all", failing)
    refused(source, tmp_path / "dst", "no space left on device")
    assert next(writes) < 20


def test_an_interrupt_while_a_thread_is_started(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool does not know that thread then; it is waited for all the same."""
    real, submit, writes = passing.write_all, passing.ThreadPoolExecutor.submit, []

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        writes.append(1)
        real(*arguments)

    def interrupted(pool: Any, *arguments: Any) -> None:
        submit(pool, *arguments)
        pool._threads.clear()
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(passing, "write_all", slow)
    monkeypatch.setattr(passing.ThreadPoolExecutor, "submit", interrupted)
    before = state(source)
    with pytest.raises(KeyboardInterrupt):
        fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    count = len(writes)
    time.sleep(0.2)
    assert len(writes) == count > 0
    assert state(source) == before and [one.name for one in tmp_path.iterdir()] == ["src"]


def test_a_source_that_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = passing.Pass._write

    def meddling(self: object, *arguments: object) -> None:
        os.utime(first_shard(source))
        real(self, *arguments)

    monkeypatch.setattr(passing.Pass, "_write", meddling)
    refused(source, tmp_path / "dst", "was changed while it was read")
