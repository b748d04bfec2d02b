"""Adapters on linears that are fused with their norms: refused before anything is wrapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn

peft = pytest.importorskip("peft", reason="peft is not installed")


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(token_ids()).logits


def _wrapped(model: nn.Module, kind: str, targets: list[str]) -> nn.Module:
    config = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True),
        "loha": lambda: peft.LoHaConfig(r=4, target_modules=targets),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=[]),
    }[kind]()
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("kind", "family", "target"),
    [
        ("lora", "llama", "v_proj"),
        ("lora", "gpt2", "c_fc"),
        ("dora", "qwen2", "up_proj"),
        ("loha", "gemma", "q_proj"),
        ("ia3", "llama", "k_proj"),
    ],
)
def test_refused(kind: str, family: str, target: str, fold: bool) -> None:
    model = tiny_model(family)
    if family == "gpt2" and not fold:
        pytest.skip("without a fold a Conv1D is not fused")
    stock = _logits(model)
    handle = fn.patch(model, fold=fold)
    ours, modules = _logits(model), dict(model.named_modules())
    with pytest.raises(RuntimeError, match=r"fused with its norm.*revert\(\).*adapter.*patch"):
        _wrapped(model, kind, [target])
    assert all(module is modules[path] for path, module in model.named_modules())
    assert torch.equal(_logits(model), ours)
    handle.revert()
    assert torch.equal(_logits(model), stock)
    adapted = _wrapped(model, kind, [target])
    expected = _logits(adapted)
    fn.patch(adapted, fold=fold)
    torch.testing.assert_close(_logits(adapted), expected, rtol=1e-3, atol=1e-3)


def test_linears_that_normalise_for_themselves() -> None:
    """The passthrough form would give an adapter the row before the norm, of the right size."""
    for fold in (True, False):
        model: Any = tiny_model("llama")
        fn.patch(model, fold=fold, head=True)
        assert type(model.lm_head) is not nn.Linear
        with pytest.raises(RuntimeError, match="an adapter cannot be put on.*model.norm"):
            _wrapped(model, "lora", ["lm_head"])


def test_the_other_linears_take_adapters() -> None:
    model: Any = tiny_model("llama")
    stock, ours = _logits(model), _logits(fn.patch(copy.deepcopy(model)).model)
    handle = fn.patch(model)
    adapted = _wrapped(model, "lora", ["o_proj", "down_proj"])
    assert not torch.allclose(_logits(adapted), ours, atol=1e-2)
    assert torch.equal(_logits(adapted.unload()), ours)
    handle.revert()
    assert torch.equal(_logits(model), stock)


def test_sizes_are_still_told_to_everyone_else() -> None:
    model: Any = tiny_model("llama")
    fn.patch(model)
    linear = model.model.layers[0].self_attn.q_proj
    assert (linear.in_features, linear.out_features) == (64, 64)
    copied = copy.deepcopy(linear)
    assert copied.in_features == 64
    assert "in_features=64" in repr(linear)
