"""Every family of models computes patched what it computes stock, and is the same after revert."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from family_table import FAMILIES, WITHOUT_SITES, Family, build, inputs_of
from numerics import assert_as_near
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models import patcher, source, weights

BY_NAME = {family.name: family for family in FAMILIES}
# Rounding of a few hundred fp32 values: where stock's own error happens to be below it.
FLOOR = 3e-8


def _ids(families: list[Family]) -> Any:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


def _model(family: Family, device: torch.device, *args: Any) -> nn.Module:
    try:
        return build(family, *args).to(device)
    except LookupError:
        pytest.skip(f"this release of transformers has no {family.name}")


def _inputs(family: Family, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    like = next(model.parameters())
    return {
        name: value.to(like) if value.is_floating_point() else value.to(like.device)
        for name, value in inputs_of(family, seed).items()
    }


@torch.no_grad()
def _output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    result = model(**inputs)
    return result.logits if "logits" in result else result.last_hidden_state


def _exact(model: nn.Module, family: Family, seed: int = 0) -> Tensor:
    double = copy.deepcopy(model).double()
    return _output(double, _inputs(family, double, seed))


def _error(output: Tensor, exact: Tensor) -> float:
    return float((output.double() - exact).norm() / exact.norm())


def _patch(model: nn.Module, family: Family, **options: Any) -> fn.models.PatchHandle:
    example = None if family.inputs is None else _inputs(family, model)
    return fn.patch(model, example_inputs=example, **options)


def _tokens(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    ids = inputs["input_ids"]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=7,
        do_sample=False,
        disable_compile=True,
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _same(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> bool:
    """On the CPU: the stock weights of folded linears wait in host memory."""
    return list(ours) == list(stock) and all(
        ours[name].dtype == stock[name].dtype and torch.equal(ours[name].cpu(), stock[name].cpu())
        for name in stock
    )


def _draws(model: nn.Module, family: Family) -> list[Tensor]:
    """What it gives for three draws of the inputs."""
    return [_output(model, _inputs(family, model, seed)) for seed in range(3)]


@_ids(FAMILIES)
def test_family(family: Family, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[fn.models.AuditReport] = []

    def audit(*args: Any, **kwargs: Any) -> fn.models.AuditReport:
        audits.append(fn.audit(*args, **kwargs))
        return audits[-1]

    monkeypatch.setattr(patcher, "audit", audit)
    model = _model(family, device)
    inputs = _inputs(family, model)
    modules, state = dict(model.named_modules()), _state(model)
    stock, exact = _draws(model, family), _draws(copy.deepcopy(model).double(), family)
    tokens = _tokens(model, inputs) if family.task else None
    handle = _patch(model, family)
    found = Counter(
        site.form if site.decision == "fuse" else site.decision for site in handle.report.sites
    )
    assert (found["packed"], found["experts"], found["norm_only"]) == (
        family.packed,
        family.experts,
        family.alone,
    ), handle.report.to_json()
    assert handle.report == audits[0], "what the audit promises is what patch does"
    ours = _draws(model, family)
    assert not family.packed or not torch.equal(ours[0], stock[0])
    assert_as_near(ours, stock, exact, FLOOR)
    if tokens is not None:
        assert torch.equal(_tokens(model, inputs), tokens)
    assert _same(_state(model), state)
    with pytest.warns(UserWarning, match="already patched"):
        assert not _patch(model, family).changed
    handle.revert()
    assert {name: id(m) for name, m in model.named_modules()} == {
        name: id(m) for name, m in modules.items()
    }
    assert _same(_state(model), state)
    assert torch.equal(_output(model, inputs), stock[0])


@_ids(WITHOUT_SITES)
def test_family_without_sites_says_so(family: Family, device: torch.device) -> None:
    model = _model(family, device)
    with pytest.warns(UserWarning, match="nothing to patch in .*its output"):
        handle = _patch(model, family)
    assert not handle.changed and len(handle.report.kept) == len(handle.report.sites) > 0
    assert all(site.reason for site in handle.report.kept) and fn.audit(model) == handle.report


HALF = ("llama", "gemma", "gpt2", "opt", "cohere", "nemotron", "bloom", "falcon_h1", "t5", "vit")


@pytest.mark.parametrize("name", HALF)
def test_error_ratio_in_bfloat16(name: str, device: torch.device) -> None:
    family, ours, stock = BY_NAME[name], 0.0, 0.0
    for seed in range(3):
        model = _model(family, device, torch.bfloat16, seed)
        inputs, exact = _inputs(family, model, seed), _exact(model, family, seed)
        stock += _error(_output(model, inputs), exact)
        _patch(model, family)
        ours += _error(_output(model, inputs), exact)
    assert ours / stock <= 1.25


@pytest.mark.parametrize("name", ["llama", "gemma", "opt", "cohere", "phi3", "qwen2_moe", "t5"])
def test_family_with_gains_in_the_kernel(name: str, device: torch.device) -> None:
    family = BY_NAME[name]
    model = _model(family, device)
    stock, exact = _draws(model, family), _draws(copy.deepcopy(model).double(), family)
    state = _state(model)
    _patch(model, family, fold=False)
    assert_as_near(_draws(model, family), stock, exact, FLOOR)
    assert _same(_state(model), state)


def _as_plain_w(weight: Tensor | None, convention: str) -> Tensor | None:
    return None if weight is None or convention == "none" else weight.float()


def _left_behind(weight: Tensor, shift: Tensor, bias: Tensor | None = None) -> Tensor:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias.float()


FAULTS = {
    "1+w folded as w": ("gemma", source, "effective_gain", _as_plain_w),
    "1+w LayerNorm folded as w": ("nemotron", source, "effective_gain", _as_plain_w),
    "no gain": ("llama", source, "effective_gain", lambda weight, convention: None),
    "bias not moved": ("opt", weights, "move_bias", _left_behind),
    "bias not moved, Conv1D": ("gpt2", weights, "move_bias", _left_behind),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_fold_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: what the comparison above would let through, it could not tell."""
    name, module, attribute, wrong = FAULTS[fault]
    family = BY_NAME[name]
    model = build(family)
    inputs, exact = _inputs(family, model), _exact(model, family)
    stock = _error(_output(model, inputs), exact)
    monkeypatch.setattr(module, attribute, wrong)
    _patch(model, family)
    assert _error(_output(model, inputs), exact) > 100 * (1.25 * stock + FLOOR)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_router_logits_and_choices_are_stock(name: str, device: torch.device) -> None:
    """From the same residual row the router computes the same logits and picks the same."""
    family = BY_NAME[name]
    model = _model(family, device)
    layer = model.model.layers[-1]
    router = getattr(layer.mlp, "gate", None) or layer.mlp.router
    x = torch.randn(64, 64, device=device) * torch.logspace(-2, 2, 64, device=device)[:, None]

    @torch.no_grad()
    def route() -> list[Tensor]:
        answer = router(layer.post_attention_layernorm(x))
        return list(answer) if isinstance(answer, tuple) else [answer]

    stock = route()
    _patch(model, family)
    ours = route()
    for mine, theirs in zip(ours, stock, strict=True):
        if theirs.is_floating_point() and device.type != "cpu":
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(mine, theirs)
