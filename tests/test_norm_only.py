"""The norm alone as one launch: each convention and casting order, and life around it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics import LIMIT, errors, hard_rows, norm64
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models import norm_only, patcher
from flashnorm_triton.models.installers import Options, sites_of
from flashnorm_triton.models.norm_only import NormOnly, NormOnlySite
from flashnorm_triton.models.norms import NormReader, is_candidate
from flashnorm_triton.models.report import AuditReport, SiteReport

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Unweighted(nn.Module):
    """Type D: no gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x)


def _norm(name: str, size: int, eps: float) -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    made = {"A": LlamaRMSNorm, "A-T5": T5LayerNorm, "B": Olmo2RMSNorm, "C": GemmaRMSNorm,
            "D": Unweighted}[name](size, eps=eps)  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.1 if name == "C" else 1.0, 0.4)
    return made


def norms_alone(model: nn.Module) -> AuditReport:
    """Every RMS norm of ``model`` as a norm_only site."""
    reader, sites = NormReader(), []
    for name, module in model.named_modules():
        traits = reader.read(module) if is_candidate(module) else None
        if traits is not None and traits.kind == "rms":
            sites.append(
                SiteReport(
                    name,
                    type(module).__name__,
                    "rms",
                    traits.convention,
                    traits.eps,
                    (),
                    "norm_only",
                    "a test's site",
                )  # fmt: skip
            )
    assert sites
    return AuditReport(type(model).__name__, tuple(sites))


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fn.patch`` for models whose linears are all foreign."""

    def patched(model: nn.Module, **options: Any) -> patcher.PatchHandle:
        report = norms_alone(model)
        monkeypatch.setattr(patcher, "audit", lambda *_, **__: report)
        return fn.patch(model, **options)

    return patched


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(token_ids().to(next(model.parameters()).device)).logits


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["A", "A-T5", "B", "C", "D"])
def test_numerics_contract(
    name: str, dtype: torch.dtype, fold: bool, patch: Any, device: torch.device
) -> None:
    model = nn.ModuleDict({"norm": _norm(name, 72, 1e-5)}).to(device, dtype)
    x = hard_rows(45, 72, dtype, device).view(9, 5, 72)
    stock = model["norm"](x).detach()
    gain = getattr(model["norm"], "weight", None)
    if gain is not None:
        gain = gain.detach().double() + (name == "C")
    exact = norm64(x, 1e-5, gain)
    patch(model, fold=fold)
    assert isinstance(model["norm"], NormOnly)
    ours = model["norm"](x).detach()
    assert ours.dtype == stock.dtype and ours.shape == stock.shape
    # fp32 sums of squares in any order are as right as stock's, one of them being luckier.
    floor = (2.0**-23, 2.0**-23 * float(exact.abs().max())) if dtype == torch.float32 else (0, 0)
    for mine, theirs, least in zip(errors(ours, exact), errors(stock, exact), floor, strict=True):
        assert mine <= LIMIT * max(theirs, least)


def test_one_operation_a_call(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    operation = norm_only.rms_norm

    def counted(x: Tensor, eps: float, gain: Tensor | None) -> Tensor:
        calls.append((eps, None if gain is None else gain.data_ptr()))
        return operation(x, eps, gain)

    monkeypatch.setattr(norm_only, "rms_norm", counted)
    for family, norms in (("gemma", 5), ("olmo2", 9), ("qwen3", 9)):
        model = tiny_model(family)
        expected = _logits(model)
        handle = patch(model)
        calls.clear()
        torch.testing.assert_close(_logits(model), expected, rtol=1e-4, atol=1e-4)
        assert len(calls) == norms and {eps for eps, _ in calls} == {handle.report.sites[0].eps}
        again = list(calls)
        calls.clear()
        _logits(model)
        assert calls == again, "1 + w was made anew"


@pytest.mark.parametrize("fold", [True, False])
def test_gain_written_to_after_patching_is_seen(fold: bool, patch: Any) -> None:
    model, x = nn.ModuleDict({"norm": _norm("C", 24, 1e-6)}), torch.randn(4, 24)
    norm, stock = model["norm"], copy.deepcopy(model["norm"])
    patch(model, fold=fold)

    def agree() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model["norm"](x), stock(x))

    agree()
    with torch.no_grad():
        model["norm"].weight.mul_(3), stock.weight.mul_(3)
    agree()
    values = {"weight": torch.randn(24)}
    model["norm"].load_state_dict(values), stock.load_state_dict(values)
    agree()
    new = torch.randn(24)
    model["norm"].weight, stock.weight = nn.Parameter(new), nn.Parameter(new)
    agree()
    assert norm.weight is model["norm"].weight
    model.double(), stock.double()
    x = x.double()
    agree()


def test_attributes_names_and_hooks_are_the_stock_norms(patch: Any) -> None:
    model = tiny_model("llama")
    norm, seen = model.model.norm, []
    values = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    hook = norm.register_forward_hook(lambda *args: seen.append(1))
    handle = patch(model)
    assert model.model.norm.variance_epsilon == norm.variance_epsilon
    assert model.model.norm.weight is norm.weight
    assert [name for name, _ in model.named_parameters()] == names
    state = model.state_dict()
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert list(state) == list(values)
    _logits(model)
    assert seen == [1]
    hook.remove()
    late = model.model.norm.register_forward_hook(lambda *args: seen.append(2))
    handle.revert()
    assert model.model.norm is norm
    _logits(model)
    assert seen == [1, 2]
    late.remove()


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2"])
def test_revert_is_bit_exact_and_copies_are_whole(
    family: str, fold: bool, patch: Any, device: torch.device
) -> None:
    model = tiny_model(family, torch.bfloat16).to(device)
    stock, modules = _logits(model), {n: id(m) for n, m in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    handle = patch(model, fold=fold)
    ours = _logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(sites_of(twin)) == len(handle.report.sites)
        assert torch.equal(_logits(twin), ours)
        with torch.no_grad():
            twin.model.norm.weight.zero_()
        assert twin.model.norm.stock.weight is twin.model.norm.weight
        assert not _logits(twin).equal(ours) and torch.equal(_logits(model), ours)
        patcher.PatchHandle(twin, handle.report, True).revert()
        assert not sites_of(twin)
    model.float().to(torch.bfloat16)
    handle.revert()
    assert {n: id(m) for n, m in model.named_modules()} == modules
    state = model.state_dict()
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert torch.equal(_logits(model), stock)


@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2"])
def test_trains_as_stock(family: str, patch: Any, device: torch.device) -> None:
    ids = token_ids(3, 9).to(device)

    def train(model: nn.Module) -> tuple[list[float], nn.Module]:
        losses, steps = [], torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            steps.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
        return losses, model

    expected, stock = train(tiny_model(family).to(device).train())
    model = tiny_model(family).to(device).train()
    patch(model)
    losses, _ = train(model)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert expected[-1] < expected[0]
    theirs = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-2, atol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_compiles_without_a_break(family: str, patch: Any, device: torch.device) -> None:
    model = tiny_model(family).to(device)
    expected = _logits(model)
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual = compiled(token_ids().to(device), use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_other_dtypes_go_through_the_stock_norm(patch: Any) -> None:
    """A float32 gain with narrower rows: the class decides which dtype comes out."""
    for name, dtype in (("A", torch.float32), ("B", torch.bfloat16), ("C", torch.bfloat16)):
        model = nn.ModuleDict({"norm": _norm(name, 24, 1e-6)})
        x = torch.randn(5, 24, dtype=torch.bfloat16)
        expected = model["norm"](x)
        patch(model)
        assert expected.dtype == dtype and torch.equal(model["norm"](x), expected), name


def test_norms_it_cannot_stand_in_for_are_refused() -> None:
    model = nn.ModuleDict({"norm": _norm("A", 24, 1e-6), "layer": nn.LayerNorm(24)})
    site = replace(norms_alone(nn.ModuleDict({"norm": model["norm"]})).sites[0], norm="norm")
    for wrong, says in (
        (replace(site, norm="layer", kind="layer"), "layer: a layer norm with eps 1e-06"),
        (replace(site, eps=None), "norm: a rms norm with eps None"),
        (replace(site, eps=0.0), "norm: a rms norm with eps 0.0"),
    ):
        with pytest.raises(ValueError, match=says):
            NormOnlySite(model, wrong, Options())
    model["norm"].forward = lambda x: x
    with pytest.raises(ValueError, match="norm: its forward was set on the instance"):
        NormOnlySite(model, site, Options())
