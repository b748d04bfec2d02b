"""fold_checkpoint: the same function in the same layout, whatever the shards."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import layout, load, logits, record, relative, saved, tensors
from transformers import AutoConfig

import flashnorm_triton as fn
from flashnorm_triton.checkpoints import hashing
from flashnorm_triton.checkpoints.flags import is_folded
from flashnorm_triton.demo_model import FOLDER


def gain_of(weight: torch.Tensor, convention: str) -> torch.Tensor:
    """The gain as the norm's class computes it: 1 + w is a float32 sum."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (wide + (convention == "1+w")).double()


def test_a_sharded_fold_keeps_the_layout_and_loads_in_stock_transformers(tmp_path: Path) -> None:
    source = saved(tmp_path / "src")
    before = {f.name: f.read_bytes() for f in source.iterdir()}
    result = fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    folded = tmp_path / "dst"
    assert layout(folded) == layout(source)
    assert {f.name: f.read_bytes() for f in source.iterdir()} == before
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors.index.json"):
        assert (folded / name).read_bytes() == before[name]
    extra = {f.name for f in folded.iterdir()} - before.keys()
    assert extra == {"flashnorm.json", "README.md"}
    assert relative(logits(load(folded)), logits(load(source))) < 2e-6
    assert result.record == record(folded) and result.path == folded
    files = layout(source)
    apart = [
        target
        for fold in result.record["folds"]
        for target in fold["into"]
        if files[fold["gain"]][0] != files[target["tensor"]][0]
    ]
    assert apart, "no norm and linear of this model lie in different shards"


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_weight_is_the_exact_product_rounded_once(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    source = saved(tmp_path / "src", family, shard="1GB", dtype=dtype)
    result = fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
    old, new = tensors(source), tensors(tmp_path / "dst")
    assert old.keys() == new.keys()
    changed = set()
    for fold in result.record["folds"]:
        gain = gain_of(old[fold["gain"]], fold["convention"])
        identity = 0.0 if fold["convention"] == "1+w" else 1.0
        assert new[fold["gain"]].eq(identity).all() and new[fold["gain"]].dtype == dtype
        changed.add(fold["gain"])
        for target in fold["into"]:
            exact = old[target["tensor"]].double() * gain
            # One rounding of a float32 product (two roundings are nearly always that one).
            once = (exact if dtype == torch.float64 else exact.float()).to(dtype)
            torch.testing.assert_close(new[target["tensor"]], once, rtol=0, atol=0)
            assert not torch.equal(once, old[target["tensor"]])
            changed.add(target["tensor"])
    assert len(changed) > 10
    for name in old.keys() - changed:
        assert torch.equal(old[name], new[name])


@pytest.mark.parametrize("digest", [None, "sha256"])
def test_the_record_names_version_hashes_and_every_norm(tmp_path: Path, digest: str | None) -> None:
    source = saved(tmp_path / "src")
    options: dict[str, Any] = {"digest": digest, "progress": False}
    made = fn.fold_checkpoint(source, tmp_path / "dst", **options).record
    assert made["flashnorm_triton"] == fn.__version__ and made["mode"] == "compat"
    hashed = hashlib.sha256 if digest else pytest.importorskip("blake3").blake3
    assert made["source"]["digest"] == (digest or "blake3")
    files = made["source"]["files"]
    assert files.keys() == {f.name for f in source.iterdir()} - {"model.safetensors.index.json"}
    for name, one in files.items():
        assert hashed((source / name).read_bytes()).hexdigest() == one
    listing = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    assert made["source"]["hash"] == hashed(listing.encode()).hexdigest()
    model = load(source)
    norms = {n for n, m in model.named_modules() if "Norm" in type(m).__name__}
    told = [one["norm"] for one in [*made["folds"], *made["kept"]]]
    assert sorted(told) == sorted(norms)
    assert all(one["reason"] for one in made["kept"])
    again = fn.fold_checkpoint(source, tmp_path / "again", **options).record
    assert again == made
    old = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(old + " ")
    other = fn.fold_checkpoint(source, tmp_path / "other", **options).record
    assert other["source"]["hash"] != made["source"]["hash"]


def test_without_blake3_the_record_says_sha256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "src", shard="1GB")
    monkeypatch.setattr(hashing, "blake3", None)
    made = fn.fold_checkpoint(source, tmp_path / "dst", progress=False).record["source"]
    data = (source / "model.safetensors").read_bytes()
    assert made["digest"] == "sha256"
    assert made["files"]["model.safetensors"] == hashlib.sha256(data).hexdigest()
    for wanted, message in (("blake3", "pip install blake3"), ("md5", "use blake3 or sha256")):
        with pytest.raises(ValueError, match=message):
            fn.fold_checkpoint(source, tmp_path / wanted, digest=wanted, progress=False)


def test_flags_and_card(tmp_path: Path) -> None:
    source = saved(tmp_path / "src", shard="1GB")
    card = "---\nlicense: mit\nlanguage: en\ntags:\n- old\n---\n\n# The source\n"
    (source / "README.md").write_text(card)
    fn.fold_checkpoint(source, tmp_path / "on", progress=False)
    fn.fold_checkpoint(source, tmp_path / "off", flags=False, progress=False)
    config = json.loads((source / "config.json").read_text())
    marked = json.loads((tmp_path / "on" / "config.json").read_text())
    assert marked == {**config, "flashnorm_folded": True, "flash_norm": True}
    assert (tmp_path / "off" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    from huggingface_hub import ModelCard

    data = ModelCard.load(tmp_path / "on" / "README.md").data.to_dict()
    assert data["license"] == "mit" and data["language"] == "en"
    assert "weightless-rmsnorm" in data["tags"] and "old" not in data["tags"]
    unmarked = ModelCard.load(tmp_path / "off" / "README.md").data.to_dict()
    assert "weightless-rmsnorm" not in unmarked["tags"]
    text = (tmp_path / "on" / "README.md").read_text()
    assert record(tmp_path / "on")["source"]["hash"] in text and fn.__version__ in text
    assert (tmp_path / "on" / "README.source.md").read_text() == card


@pytest.mark.parametrize(
    ("family", "options", "marks"),
    [
        ("llama", {}, ["flashnorm_folded", "flash_norm"]),
        ("llama", {"head": False}, ["flash_norm"]),  # the first would drop the final norm's gain
        ("llama", {"max_crest": 1.5}, []),
        ("qwen3", {}, ["flashnorm_folded", "flash_norm"]),  # its head norms are another matter
        ("gemma", {}, ["flash_norm"]),  # a tied head
        ("gemma", {"untie": True}, ["flashnorm_folded", "flash_norm"]),
        ("gemma2", {}, []),  # norms after attention and MLP
        ("olmo2", {}, []),
        ("gpt2", {}, []),  # no RMS norm
    ],
)
def test_marks_never_make_an_engine_drop_a_gain(
    tmp_path: Path, family: str, options: dict[str, Any], marks: list[str]
) -> None:
    source = saved(tmp_path / "src", family, shard="1GB")
    made = fn.fold_checkpoint(source, tmp_path / "dst", progress=False, **options).record
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert [key for key in config if key.startswith("flash")] == made["marks"] == marks
    assert is_folded(config) == is_folded(AutoConfig.from_pretrained(tmp_path / "dst"))
    assert is_folded(config) == bool(marks)
    assert ("weightless-rmsnorm" in (tmp_path / "dst" / "README.md").read_text()) == bool(marks)


def test_dtype_converts_what_the_model_is_made_of(tmp_path: Path) -> None:
    source = saved(tmp_path / "src", dtype=torch.bfloat16)
    fn.fold_checkpoint(source, tmp_path / "wide", dtype="float32", progress=False)
    old, new = tensors(source), tensors(tmp_path / "wide")
    assert {t.dtype for t in new.values()} == {torch.float32}
    for fold in record(tmp_path / "wide")["folds"]:
        for target in fold["into"]:
            exact = old[target["tensor"]].double() * old[fold["gain"]].double()
            assert relative(new[target["tensor"]].double(), exact) < 1e-7  # bf16 would be 1e-3
    assert torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"].float())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in new.values())
    reference = logits(load(source, torch.float64))
    assert relative(logits(load(tmp_path / "wide", torch.float64)), reference) < 1e-6


def test_the_trained_model_is_as_near_to_float64_as_before(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    fn.fold_checkpoint(FOLDER, tmp_path / "dst", progress=False)
    ids = torch.randint(3, 2048, (2, 96))
    exact = logits(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64), ids)
    stock = relative(logits(load(FOLDER, torch.bfloat16), ids), exact)
    folded = relative(logits(load(tmp_path / "dst"), ids), exact)
    assert folded <= 1.25 * stock


def test_the_file_is_found_by_name_and_weights_in_other_formats_stay_behind(tmp_path: Path) -> None:
    source = saved(tmp_path / "src", shard="1GB")
    (source / "sub").mkdir()
    (source / "sub" / "extra.txt").write_text("kept")
    (source / "model.gguf").write_bytes(b"unfolded")
    (source / "pytorch_model.bin").write_bytes(b"unfolded")
    result = fn.fold_checkpoint(str(source), str(tmp_path / "deep" / "dst"), progress=False)
    assert (tmp_path / "deep" / "dst" / "sub" / "extra.txt").read_text() == "kept"
    assert not list((tmp_path / "deep" / "dst").glob("*.[gb]*"))
    assert result.record["left_out"] == ["model.gguf", "pytorch_model.bin"]
    shutil.rmtree(tmp_path / "deep")
