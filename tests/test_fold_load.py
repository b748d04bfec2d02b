"""Strict checkpoints, AutoFlashNormForCausalLM, verify and its exit codes, the upload."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from folders import load, logits, record, relative, saved, tensors
from safetensors.torch import load_file, save_file
from tiny_models import token_ids
from transformers.utils import logging
from typer.testing import CliRunner

import flashnorm_triton as fn
from flashnorm_triton.checkpoints import hashing
from flashnorm_triton.checkpoints.source import open_source
from flashnorm_triton.checkpoints.verifying import _source_checks, verify_checkpoint
from flashnorm_triton.cli import app


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its compat fold, bf16."""
    folder = tmp_path_factory.mktemp("pair")
    source = saved(folder / "src", dtype=torch.bfloat16)
    (source / "tokenizer.json").unlink()
    fn.fold_checkpoint(source, folder / "dst", progress=False)
    return source, folder / "dst"


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_strict_leaves_the_norms_out_and_still_loads(
    tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    source = saved(tmp_path / "src", family)
    made = fn.fold_checkpoint(source, tmp_path / "dst", strict=True, progress=False).record
    old, new = tensors(source), tensors(tmp_path / "dst")
    gains = {fold["gain"] for fold in made["folds"]}
    biases = {fold["norm_bias"] for fold in made["folds"]} - {None}
    assert made["mode"] == "strict" and old.keys() - new.keys() == gains | biases
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == new.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in new.values())
    ids = token_ids(4, 24)
    wanted = logits(load(source), ids)
    capfd.readouterr()
    logging.set_verbosity_warning()
    model, info = fn.AutoFlashNormForCausalLM.from_pretrained(
        tmp_path / "dst", output_loading_info=True
    )
    assert not info["missing_keys"] and "MISSING" not in "".join(capfd.readouterr())
    assert any("Flash" in type(m).__name__ or "Fused" in type(m).__name__ for m in model.modules())
    assert relative(logits(model.eval(), ids), wanted) < 2e-6
    # What the README says of stock transformers: it warns, and starts the missing norms at their
    # identity, which is what they have to be.
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert len(info["missing_keys"]) == len(gains | biases)
    assert relative(logits(stock.eval(), ids), wanted) < 2e-6


def test_identities_do_not_depend_on_how_a_class_starts_its_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    fn.fold_checkpoint(saved(tmp_path / "src"), tmp_path / "dst", strict=True, progress=False)
    real = AutoModelForCausalLM.from_pretrained.__func__

    def spoiled(cls: type, *args: object, **kwargs: object) -> object:
        model, info = real(cls, *args, **kwargs)
        with torch.no_grad():
            for name in info["missing_keys"]:
                model.get_parameter(name).normal_()
        return model, info

    wanted = logits(load(tmp_path / "src"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(spoiled))
    model = fn.AutoFlashNormForCausalLM.from_pretrained(tmp_path / "dst")
    assert relative(logits(model.eval()), wanted) < 2e-6


def test_a_strict_checkpoint_that_lacks_more_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "src", shard="1GB")
    fn.fold_checkpoint(source, tmp_path / "dst", strict=True, progress=False)
    file = tmp_path / "dst" / "model.safetensors"
    held = load_file(file)
    held.pop("model.layers.1.mlp.up_proj.weight")
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors .* first model.layers.1.mlp.up_proj"):
        fn.AutoFlashNormForCausalLM.from_pretrained(tmp_path / "dst")


def test_auto_loads_what_was_never_folded_and_compat_folds(pair: tuple[Path, Path]) -> None:
    source, folded = pair
    wanted = logits(load(source))
    for folder in (source, folded):
        model = fn.AutoFlashNormForCausalLM.from_pretrained(
            folder, dtype=torch.float32, patch_options={"fold": False}
        )
        with pytest.warns(UserWarning, match="already patched"):
            handle = fn.patch(model)
        assert relative(logits(model.eval()), wanted) < 2e-2
        handle.revert()
        assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    with pytest.raises(OSError, match="call from_pretrained"):
        fn.AutoFlashNormForCausalLM()


def test_patch_says_which_gains_are_identities(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, folded = pair
    told = {}
    for folder in (source, folded):
        model = load(folder)
        wanted = logits(model)
        report = fn.patch(model).report
        told[folder] = {s.norm for s in report.sites if "its gain is an identity" in s.reason}
        assert relative(logits(model), wanted) < 2e-2
        if folder == folded:
            assert told[folder] == {s.norm for s in report.sites}
            assert len(told[folder]) == 5
    assert not told[source]
    # A mark alone is not believed: the values are.
    model = load(source)
    model.config.flashnorm_folded = True
    report = fn.patch(model).report
    assert not [s.norm for s in report.sites if "its gain is an identity" in s.reason]


def spoil(folder: Path, name: str, factor: float) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    held = load_file(file)
    held[name] = (held[name].float() * factor).to(held[name].dtype)
    save_file(held, file, metadata={"format": "pt"})


def test_verify_passes_a_fold_and_fails_a_wrong_one(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    source, folded = pair
    good = verify_checkpoint(source, folded, seed=1)
    assert good.passed, [check for check in good.checks if not check.passed]
    assert [name for name, _, _ in good.layers] == ["the embedding", "layer 0"]
    names = [check.name for check in good.checks]
    assert sum("logit error" in name for name in names) == 2  # fixed and random tokens
    assert sum("greedy choice" in name for name in names) == 2
    # A fold that was forgotten: the norm is an identity and the weight is as it was.
    bad = Path(shutil.copytree(folded, tmp_path / "bad"))
    old = tensors(source)["model.layers.1.mlp.gate_proj.weight"]
    file = (
        bad
        / json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"][
            "model.layers.1.mlp.gate_proj.weight"
        ]
    )
    held = load_file(file)
    held["model.layers.1.mlp.gate_proj.weight"] = old
    save_file(held, file, metadata={"format": "pt"})
    failed = [c.name for c in verify_checkpoint(source, bad, seed=1).checks if not c.passed]
    assert any("logit error" in name for name in failed)
    # One percent of one weight is far more than rounding is.
    off = Path(shutil.copytree(folded, tmp_path / "off"))
    spoil(off, "model.layers.0.self_attn.v_proj.weight", 1.03)
    failed = [c.name for c in verify_checkpoint(source, off, seed=1).checks if not c.passed]
    assert "worst layer, folded / stock" in failed


def test_verify_sees_another_layout(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, folded = pair
    moved = Path(shutil.copytree(folded, tmp_path / "moved"))
    index = json.loads((moved / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    held, other = load_file(moved / first), load_file(moved / second)
    name = next(iter(held))
    other[name] = held.pop(name)
    for file, content in ((first, held), (second, other)):
        save_file(content, moved / file, metadata={"format": "pt"})
    index["weight_map"][name] = second
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    failed = [c for c in verify_checkpoint(source, moved, seed=1).checks if not c.passed]
    assert [check.name for check in failed] == ["file, name, dtype, shape"]
    assert name in failed[0].value


def test_verify_compares_the_source_with_the_hashes_of_the_record(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this release's records, and of those that knew no other hash than sha256."""
    source, folded = pair
    other, old = (Path(shutil.copytree(one, tmp_path / one.name)) for one in pair)
    shard = sorted(other.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x11\x3c")  # one weight
    made = record(old)
    files = {
        name: hashlib.sha256((source / name).read_bytes()).hexdigest()
        for name in made["source"]["files"]
    }
    made |= {"schema": 1, "source": {"name": "src", "sha256": "0" * 64, "files": files}}
    (old / "flashnorm.json").write_text(json.dumps(made))
    for target in (folded, old):
        told = {}
        for place in (source, other):
            one, *_ = _source_checks(open_source(place, "src"), open_source(target, "dst"))
            told[place] = one
        assert told[source].passed and f"{len(files) - 1} files alike" in told[source].value
        assert not told[other].passed and shard.name in told[other].value
        assert told[source].name.endswith("sha256") == (target == old or hashing.blake3 is None)
    assert _source_checks(open_source(source, "src"), open_source(source, "src")) == []
    monkeypatch.setattr(hashing, "blake3", None)
    made["source"]["digest"] = "blake3"
    (old / "flashnorm.json").write_text(json.dumps(made))
    (check,) = _source_checks(open_source(source, "src"), open_source(old, "dst"))
    assert check.passed and check.value == "not compared" and "pip install blake3" in check.limit


@pytest.mark.parametrize("strict", [False, True])
def test_the_commands(tmp_path: Path, strict: bool) -> None:
    runner, target = CliRunner(), tmp_path / "dst"
    done = runner.invoke(app, ["fold", "demo", str(target), "--verify", *["--strict"] * strict])
    assert done.exit_code == 0, done.output
    assert "13 norms folded into 31 weights" in done.output and "worst layer" in done.output
    again = runner.invoke(app, ["fold", "demo", str(target)])
    assert again.exit_code == 2 and "is not empty" in again.output
    text = tmp_path / "text.txt"
    text.write_text((Path(fn.__file__).parent / "demo_model" / "heldout.txt").read_text()[:3000])
    verified = runner.invoke(app, ["verify", "demo", str(target), "--text", str(text)])
    assert verified.exit_code == 0 and "held-out perplexity" in verified.output, verified.output
    held = load_file(target / "model.safetensors")
    held["lm_head.weight"] *= 1.5
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    wrong = runner.invoke(app, ["verify", "demo", str(target)])
    assert wrong.exit_code == 1 and "FAILED" in wrong.output and "out of contract" in wrong.output
    for arguments in (["demo", str(tmp_path / "none")], ["demo", str(target), "--reference", "x"]):
        assert runner.invoke(app, ["verify", *arguments]).exit_code == 2


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as creating a repository and committing small files needs."""

    requests: list[tuple[str, str]]
    committed: list[dict]
    refuse = False

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, content: dict, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.requests.append(("GET", self.path))
        self.answer({"id": "me/folded", "sha": "0" * 40, "siblings": [], "name": "me"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append(("POST", self.path))
        address = f"http://127.0.0.1:{self.server.server_address[1]}/me/folded"
        if self.refuse:
            self.answer({"error": "you may not"}, 403)
        elif self.path.endswith("/repos/create"):
            self.answer({"url": address, "id": "me/folded"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for f in files
            ]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            self.committed += [json.loads(line) for line in body.splitlines() if line]
            self.answer({"commitUrl": f"{address}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer({})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Handler", (Hub,), {"requests": [], "committed": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants

    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)  # what HF_ENDPOINT sets, at import
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


def test_push_uploads_every_file(hub: type[Hub], pair: tuple[Path, Path], tmp_path: Path) -> None:
    import base64

    from flashnorm_triton.checkpoints.push import push

    folded = pair[1]
    assert push(folded, "me/folded").endswith("/commit/" + "0" * 40)
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in hub.committed
        if line["key"] == "file"
    }
    assert sent == {f.name: f.read_bytes() for f in folded.iterdir()}
    assert ("POST", "/api/repos/create") in hub.requests
    with pytest.raises(FileNotFoundError, match="holds no folded checkpoint"):
        push(pair[0], "me/folded")


def test_a_push_that_fails_says_where_the_result_is(
    hub: type[Hub], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hub.refuse = True
    done = CliRunner().invoke(
        app, ["fold", str(pair[0]), str(tmp_path / "dst"), "--push", "me/folded"]
    )
    assert done.exit_code == 2 and "could not be pushed to me/folded" in done.output, done.output
    assert record(tmp_path / "dst")["mode"] == "compat"
