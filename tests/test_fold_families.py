"""Every family that the audit supports: folded, loaded by stock transformers, the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fold_families import FAMILIES, build, logits64
from folders import layout, logits, relative, saved, tensors
from safetensors.torch import load_file, save_file
from tiny_models import token_ids
from transformers.utils import logging

import flashnorm_triton as fn

# A weight that is rounded to float32 once is off by 3e-8; the layers between amplify that.
ROUNDED = 2e-6


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_family(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    build(name).save_pretrained(tmp_path / "src", max_shard_size="90KB")
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).record
    assert layout(tmp_path / "dst") == layout(tmp_path / "src")
    folds = record["folds"]
    assert len(folds) == family.folds, [fold["norm"] for fold in folds]
    assert sum(len(fold["into"]) for fold in folds) == family.weights
    assert " ".join(fold["bias"] for fold in folds).strip() == family.bias.strip()
    new = tensors(tmp_path / "dst")
    for fold in folds:
        identity = 0.0 if fold["convention"] == "1+w" else 1.0
        assert new[fold["gain"]].eq(identity).all()
    ids = token_ids(4, 24)
    assert relative(logits64(tmp_path / "dst", ids), logits64(tmp_path / "src", ids)) < ROUNDED


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_experts_that_are_stored_merged(tmp_path: Path, name: str) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "src", max_shard_size="90KB", save_original_format=False)
    stored = tensors(tmp_path / "src")
    assert any(name.endswith("experts.gate_up_proj") for name in stored)
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).record
    into = [target["tensor"] for fold in record["folds"] for target in fold["into"]]
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in into)
    assert len(record["folds"]) == FAMILIES[name].folds
    ids = token_ids(4, 24)
    assert relative(logits64(tmp_path / "dst", ids), logits64(tmp_path / "src", ids)) < ROUNDED


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2].contiguous()


SPOILT = {
    "one is missing": (lambda tensor: None, "made of 7 stored tensors"),
    "turned": (lambda tensor: tensor.T.contiguous(), "has shape"),
    "half of one": (halve, "which hold 53760 numbers, not 57344"),
}


@pytest.mark.parametrize("how", list(SPOILT))
def test_experts_that_do_not_make_up_the_parameter_are_refused(tmp_path: Path, how: str) -> None:
    """A shape that is wrong, or a tensor that is missing, also where several make one parameter."""
    change, message = SPOILT[how]
    build("mixtral").save_pretrained(tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    held = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    spoilt = change(held.pop(name))
    save_file({**held, **({} if spoilt is None else {name: spoilt})}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"experts.*{message}"):
        fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert [one.name for one in tmp_path.iterdir()] == ["src"]


CONVENTIONS = {"gemma": "1+w", "gemma2": "1+w", "gemma3_text": "1+w", "gemma4_text": "w"}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_gemma_gains(tmp_path: Path, name: str) -> None:
    """1 + w in Gemma 1 to 3, w in 4, in bf16 too: as near to float64 as stock."""
    from transformers import AutoModelForCausalLM

    build(name).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).record
    old, new = tensors(tmp_path / "src"), tensors(tmp_path / "dst")
    for fold in record["folds"]:
        assert fold["convention"] == CONVENTIONS[name]
        gain = old[fold["gain"]].float() + (CONVENTIONS[name] == "1+w")
        assert new[fold["gain"]].eq(float(CONVENTIONS[name] == "w")).all()
        for target in fold["into"]:
            wanted = (old[target["tensor"]].float() * gain).bfloat16()
            assert torch.equal(new[target["tensor"]], wanted)
    ids = token_ids(8, 32)
    exact = logits64(tmp_path / "src", ids)
    stock, folded = (
        relative(logits(AutoModelForCausalLM.from_pretrained(tmp_path / place), ids), exact)
        for place in ("src", "dst")
    )
    assert folded <= 1.25 * stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_bias_is_the_exact_sum_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """gpt2 (Conv1D, weight (K, N)) and phi (weight (N, K)), bias and weight in different shards."""
    for name in ("gpt2", "phi"):
        source, target = tmp_path / f"{name}-src", tmp_path / f"{name}-dst"
        build(name).to(dtype).save_pretrained(source, max_shard_size="9KB")
        record = fn.fold_checkpoint(source, target, progress=False).record
        old, new = tensors(source), tensors(target)
        moved = [fold for fold in record["folds"] if fold["bias"] == "moved"]
        assert moved
        for fold in moved:
            beta = old[fold["norm_bias"]].double()
            assert beta.any() and not new[fold["norm_bias"]].any()
            for into in fold["into"]:
                weight, bias = old[into["tensor"]].double(), old[into["bias"]].double()
                sums = beta @ weight if into["axis"] == 0 else weight @ beta
                step = torch.finfo(dtype).eps
                torch.testing.assert_close(
                    new[into["bias"]].double(), bias + sums, rtol=step, atol=step / 4
                )


def test_a_bias_that_cannot_go_anywhere_keeps_its_norm(tmp_path: Path) -> None:
    build("stablelm").save_pretrained(tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    held = load_file(file)
    held["model.layers.1.input_layernorm.weight"][5] = 0.0
    save_file(held, file, metadata={"format": "pt"})
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).record
    kept = {one["norm"]: one["reason"] for one in record["kept"]}
    assert "neither move" in kept["model.layers.1.input_layernorm"]
    assert len(record["folds"]) == FAMILIES["stablelm"].folds - 1
    ids = token_ids(2, 20)
    assert relative(logits64(tmp_path / "dst", ids), logits64(tmp_path / "src", ids)) < ROUNDED


def test_untie_writes_the_head(tmp_path: Path) -> None:
    saved(tmp_path / "src", "gemma")
    fn.fold_checkpoint(tmp_path / "src", tmp_path / "tied", progress=False)
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", untie=True, progress=False)
    old, new = tensors(tmp_path / "src"), tensors(tmp_path / "dst")
    assert new.keys() - old.keys() == {"lm_head.weight"} == {record.record["untied"]}
    gain = 1 + old["model.norm.weight"]
    embedding = old["model.embed_tokens.weight"]
    assert torch.equal(new["lm_head.weight"], embedding * gain)
    assert torch.equal(new["model.embed_tokens.weight"], embedding)
    assert not new["model.norm.weight"].any()
    assert torch.equal(tensors(tmp_path / "tied")["model.norm.weight"], old["model.norm.weight"])
    ids = token_ids(4, 24)
    wanted = logits64(tmp_path / "src", ids)
    assert relative(logits64(tmp_path / "dst", ids), wanted) < ROUNDED
    assert relative(logits64(tmp_path / "tied", ids), wanted) < ROUNDED


def test_the_final_norm_stays_where_that_is_wanted_or_others_may_read_it(tmp_path: Path) -> None:
    source = saved(tmp_path / "src")
    record = fn.fold_checkpoint(source, tmp_path / "off", head=False, progress=False).record
    assert record["head"] is None and len(record["folds"]) == FAMILIES["llama"].folds - 1
    file = sorted(source.glob("*.safetensors"))[0]
    held = load_file(file)
    held["model.layers.2.eh_proj.weight"] = torch.rand(4, 4)  # a layer that predicts ahead
    save_file(held, file, metadata={"format": "pt"})
    index = source / "model.safetensors.index.json"
    import json

    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.2.eh_proj.weight"] = file.name
    index.write_text(json.dumps(content))
    record = fn.fold_checkpoint(source, tmp_path / "extra", progress=False).record
    kept = {one["norm"]: one["reason"] for one in record["kept"]}
    assert "model.layers.2.eh_proj.weight" in kept["model.norm"]
    assert len(record["folds"]) == FAMILIES["llama"].folds - 1


def test_a_stored_tensor_shared_by_norm_readers_and_others_is_left(tmp_path: Path) -> None:
    from flashnorm_triton.checkpoints.plan import Fold, Target, _drop_shared

    class Names:
        def made_from(self, tensor: str) -> tuple[str, ...]:
            return {"packed": ("q", "other"), "plain": ("k",)}[tensor]

    folds = {
        "one": Fold("one", "rms", "w", "g", None, "", (Target("packed", 1),)),
        "two": Fold("two", "rms", "w", "h", None, "", (Target("plain", 1),)),
    }
    kept: dict[str, str] = {}
    _drop_shared(folds, kept, {"one": {"q"}, "two": {"k"}}, Names())  # type: ignore[arg-type]
    assert list(folds) == ["two"] and "packed is stored together" in kept["one"]
