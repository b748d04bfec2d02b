"""Dropped pre-norms: which, why not the others, and that the model computes the same."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from cancel_models import DEVICE, cancel_model, error, logits
from numerics import assert_as_near
from tiny_models import token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.cancel import CancelReport, Layout, Piece
from flashnorm_triton.models.cancel_sites import CancelledNorm

EXACT = ("gemma4_text", "qwen3", "gemma3_text", "olmoe", "deepseek_v3", "deepseek_v4", "qwen3_next")
FEW, MANY = (1, 20), (4, 33)  # rows for the fused single pass, and for the product on raw x


def _patched(model: nn.Module, cancel: str, **options: Any) -> Any:
    handle = fn.patch(model, cancel=cancel, **options)
    assert any(isinstance(site, CancelReport) for site in handle.report.sites)
    return handle


def _decisions(model: nn.Module, cancel: str = "exact") -> dict[str, Any]:
    return {site.norm: site for site in fn.audit(model, cancel=cancel).sites}


# -- which ---------------------------------------------------------------------------------------


def test_every_attention_of_gemma4_is_dropped() -> None:
    sites = _decisions(cancel_model("gemma4_text"))
    for layer in range(4):
        site = sites[f"model.layers.{layer}.input_layernorm"]
        assert site.decision == "cancel" and "approximate" not in site.reason
        later = [norm.norm.rpartition(".")[2] for norm in site.later]
        assert later == ["q_norm", "k_norm", "v_norm"][: 3 if layer < 2 else 1]
    alike = sites["model.layers.1.input_layernorm"]
    assert [name.rpartition(".")[2] for name in alike.consumers] == ["q_proj", "k_proj"]
    both = ("model.layers.1.self_attn.k_norm", "model.layers.1.self_attn.v_norm")
    layout = alike.layouts[1]
    assert layout == Layout(2, (Piece(32, both),)) and layout.columns_out == 128
    done = sites["model.layers.0.self_attn.v_norm"]
    assert done.decision == "keep" and "done in the same launches as model.layers.0" in done.reason
    record = sites["model.layers.3.input_layernorm"].to_dict()
    assert record["decision"] == "cancel" and record["how"] == "exact"
    assert record["later"] == ["model.layers.3.self_attn.q_norm"]


@pytest.mark.parametrize(
    ("family", "norm", "pieces"),
    [
        ("qwen3", "layers.0.input_layernorm", [(4, [16], [1]), (2, [16], [1]), (1, [32], [0])]),
        ("olmoe", "layers.1.input_layernorm", [(1, [64], [1]), (1, [32], [1]), (1, [32], [0])]),
        ("deepseek_v3", "layers.1.input_layernorm", [(1, [24], [1]), (1, [20, 8], [1, 0])]),
        ("deepseek_v4", "layers.0.self_attn.q_a_norm", [(4, [16], [1])]),
        (
            "qwen3_next",
            "layers.1.input_layernorm",
            [(4, [16, 16], [1, 0]), (2, [16], [1]), (1, [32], [0])],
        ),
    ],
)
def test_columns_are_told_apart(family: str, norm: str, pieces: list[Any]) -> None:
    site = _decisions(cancel_model(family))[f"model.{norm}"]
    assert site.decision == ("cancel" if family == "deepseek_v4" else "partial")
    found = [
        (layout.heads, [p.width for p in layout.pieces], [len(p.norms) for p in layout.pieces])
        for layout in site.layouts
    ]
    assert found == pieces


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {}, "not cancelled: q_proj is read by mul in model.layers.0.self_attn"),
        ("qwen2", {}, "not cancelled: q_proj has a bias"),
        ("qwen3", {"attention_bias": True}, "not cancelled: q_proj has a bias; k_proj has a bias"),
    ],
)
def test_others_are_fused_as_before_and_say_why(
    family: str, options: dict[str, Any], reason: str
) -> None:
    model = cancel_model(family, **options)
    before = [(site.norm, site.decision) for site in fn.audit(model).sites]
    sites = _decisions(model)
    assert [(site.norm, site.decision) for site in sites.values()] == before
    assert reason in sites["model.layers.0.input_layernorm"].reason


def test_off_unless_asked_for_and_other_words_are_refused() -> None:
    model = cancel_model("qwen3")
    with fn.patched(model) as handle:
        assert not any(isinstance(module, CancelledNorm) for module in model.modules())
        assert {site.decision for site in handle.report.sites} == {"fuse", "norm_only", "keep"}
    for wrong in (True, "approx", 1):
        with pytest.raises(ValueError, match=f"cancel={wrong!r}: use one of"):
            fn.patch(model, cancel=wrong)
    assert type(model.model.layers[0].self_attn.q_norm).__name__ == "Qwen3RMSNorm"


def _touch(name: str) -> Any:
    def change(model: nn.Module) -> None:
        attention = model.model.layers[0].self_attn
        if name == "a hook":
            attention.q_norm.register_forward_hook(lambda *_: None)
        elif name == "shares its gain":
            attention.q_norm.weight = attention.k_norm.weight
        elif name == "reads other columns":
            attention.q_norm = attention.k_norm

    return change


@pytest.mark.parametrize("obstacle", ["a hook", "shares its gain", "reads other columns"])
def test_later_norms_that_cannot_be_taken_over(obstacle: str) -> None:
    model, ids = cancel_model("qwen3"), token_ids(*MANY)
    _touch(obstacle)(model)
    expected = logits(model, ids)
    with fn.patched(model, cancel="exact") as handle:
        site = next(s for s in handle.report.sites if s.norm == "model.layers.0.input_layernorm")
        assert obstacle in site.reason
        assert site.decision == ("partial" if obstacle == "a hook" else "fuse")
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)


# -- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fold"),
    [*((family, True) for family in EXACT), ("gemma4_text", False), ("deepseek_v3", False)],
)
def test_exact_is_as_near_as_stock(family: str, fold: bool) -> None:
    """With small embeddings the first rows are so small that both norms' eps count."""
    model = cancel_model(family, embedding=0.003)
    inputs = [[token_ids(*shape, seed) for seed in range(4)] for shape in (FEW, MANY)]
    double = copy.deepcopy(model).double()
    exact, stock = ([[logits(m, ids) for ids in part] for part in inputs] for m in (double, model))
    _patched(model, "exact", fold=fold)
    for part, right, theirs in zip(inputs, exact, stock, strict=True):
        assert_as_near([logits(model, ids) for ids in part], theirs, right, floor=1e-7)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma4_text", torch.bfloat16),
        ("gemma4_text", torch.float16),
        ("qwen3", torch.bfloat16),
        ("deepseek_v3", torch.bfloat16),
    ],
)
def test_exact_in_half_precision(family: str, dtype: torch.dtype) -> None:
    model = cancel_model(family, dtype, embedding=0.05)
    double = copy.deepcopy(model).double()
    inputs = [token_ids(*MANY, seed) for seed in range(3)]
    stock = sum(error(logits(model, ids), logits(double, ids)) for ids in inputs)
    _patched(model, "exact")
    ours = sum(error(logits(model, ids), logits(double, ids)) for ids in inputs)
    assert ours < 1.25 * stock, (ours / 3, stock / 3)


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3", "deepseek_v3"])
def test_generate_gives_the_same_tokens(family: str) -> None:
    model, ids = cancel_model(family, embedding=0.05), token_ids(2, 40).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    common = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    runs: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}]
    expected = [model.generate(ids, attention_mask=mask, **run, **common) for run in runs]
    _patched(model, "exact")
    for run, tokens in zip(runs, expected, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=mask, **run, **common), tokens), run


def test_rows_of_any_size_and_not_finite_ones() -> None:
    model = cancel_model("gemma4_text")
    layer = model.model.layers[1]
    x = (torch.randn(80, 64) * torch.logspace(-8, 4, 80)[:, None]).to(DEVICE)
    x[3], x[5, 7], x[6, 8] = 0.0, float("nan"), float("inf")

    def walk(model_layer: nn.Module, rows: Tensor) -> list[Tensor]:
        normed, attention = model_layer.input_layernorm(rows), model_layer.self_attn
        q = attention.q_proj(normed).unflatten(-1, (-1, 32))
        k = attention.k_proj(normed).unflatten(-1, (-1, 32))
        return [attention.q_norm(q), attention.k_norm(k), attention.v_norm(k)]

    expected = walk(copy.deepcopy(layer).double(), x.double())
    _patched(model, "exact")
    kept = x.clone()
    for rows in (slice(None), slice(0, 40)):
        for ours, exact in zip(walk(layer, x[rows]), expected, strict=True):
            wanted = exact[rows].float()
            assert ours.shape == wanted.shape and torch.equal(ours.isnan(), wanted.isnan())
            torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(x.nan_to_num(), kept.nan_to_num())


# -- fast ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [FEW, MANY])
def test_fast_is_off_by_what_eps_does_and_no_more(shape: tuple[int, int]) -> None:
    ids = token_ids(*shape)
    for eps, least, most in ((1e-6, 3e-4, 3e-2), (1e-14, 0.0, 2e-6)):
        model = cancel_model("gemma4_text", embedding=0.01, rms_norm_eps=eps)
        exact = logits(copy.deepcopy(model).double(), ids)
        handle = _patched(model, "fast")
        assert least <= error(logits(model, ids), exact) < most, eps
        site = next(s for s in handle.report.sites if s.decision == "cancel")
        assert site.how == "fast" and f"the later eps ({eps:g}) stays" in site.reason


def test_fast_stays_within_the_bound_of_its_report() -> None:
    model = cancel_model("gemma4_text")
    layer, eps = model.model.layers[2], 1e-6
    x = (torch.randn(80, 64) * torch.logspace(-6, 2, 80)[:, None]).to(DEVICE)
    gain = layer.input_layernorm.weight.double()
    product = (x.double() * gain) @ layer.self_attn.q_proj.weight.double().T
    mean = product.unflatten(-1, (4, 16)).square().mean(-1)

    def heads() -> Tensor:
        q = layer.self_attn.q_proj(layer.input_layernorm(x))
        return layer.self_attn.q_norm(q.unflatten(-1, (4, 16))).double().norm(dim=-1)

    expected = heads()
    _patched(model, "fast")
    off = (heads() / expected - 1).abs()
    t = x.double().square().mean(-1, keepdim=True) + eps
    bound = eps * (1 - t).abs() / (mean + eps)
    assert (off <= bound + 1e-5).all() and off.max() > 0.9


def test_fast_without_what_it_needs_is_exact_and_says_so() -> None:
    ids = token_ids(*MANY)
    cases: list[tuple[torch.dtype, bool, str]] = [
        (torch.float16, True, "an unscaled product can leave float16's range"),
        (torch.float32, False, "gain is applied in the kernel and not folded"),
    ]
    for dtype, fold, reason in cases:
        model = cancel_model("gemma4_text", dtype, embedding=0.003)
        exact, stock = logits(copy.deepcopy(model).double(), ids), logits(model, ids)
        handle = _patched(model, "fast", fold=fold)
        site = next(s for s in handle.report.sites if s.decision == "cancel")
        assert site.how == "exact" and reason in site.reason
        assert error(logits(model, ids), exact) < 1.25 * error(stock, exact) + 1e-6


def test_float16_rows_too_large_for_an_unscaled_product() -> None:
    model = cancel_model("gemma4_text", torch.float16)
    layer = model.model.layers[0]
    x = (torch.randn(100, 64) * 5e3).to(DEVICE, torch.float16)
    with torch.no_grad():
        layer.self_attn.q_proj.weight.mul_(16)
    _patched(model, "fast")
    product = nn.functional.linear(x, layer.self_attn.q_proj.weight)
    assert product.isinf().any()
    heads = layer.self_attn.q_norm(layer.self_attn.q_proj(layer.input_layernorm(x)))
    assert heads.isfinite().all()


# -- negative controls ---------------------------------------------------------------------------


def _forced(report: Any, model: nn.Module) -> Any:
    """Every packed site with the scale dropped from all of its columns."""
    sites = []
    for site in report.sites:
        if site.decision == "fuse":
            widths = [model.get_submodule(name).out_features for name in site.consumers]
            layouts = tuple(Layout(1, (Piece(width),)) for width in widths)
            fields = {**vars(site), "decision": "cancel"}
            site = CancelReport(**fields, layouts=layouts, how="fast")
        sites.append(site)
    return replace(report, sites=tuple(sites))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_dropping_a_norm_that_is_needed_changes_the_outputs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashnorm_triton.models import patcher

    model, ids = cancel_model(family), token_ids(*MANY)
    expected = logits(model, ids)
    monkeypatch.setattr(patcher, "audit", lambda m, **_: _forced(fn.audit(m), m))
    monkeypatch.setattr(CancelledNorm, "_takes_raw_product", lambda *_: True)
    with fn.patched(model):
        assert error(logits(model, ids), expected.double()) > 0.05
    torch.testing.assert_close(logits(model, ids), expected)


def test_dropping_a_norm_before_a_bias_changes_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnorm_triton.models import patcher

    model, ids = cancel_model("qwen3", attention_bias=True), token_ids(*MANY)
    twin = cancel_model("qwen3")
    expected = logits(model, ids)
    report = fn.patch(twin, cancel="exact").report
    monkeypatch.setattr(patcher, "audit", lambda *_, **__: report)
    with fn.patched(model):
        # The fused operation applies s before the bias: right even so. The raw product cannot be.
        assert error(logits(model, ids), expected.double()) < 1e-5
        monkeypatch.setattr(CancelledNorm, "_takes_raw_product", lambda *_: True)
        assert error(logits(model, ids), expected.double()) > 0.05


# -- no state between calls ----------------------------------------------------------------------


@pytest.mark.parametrize("cancel", ["exact", "fast"])
def test_interleaved_calls_and_threads_see_only_their_own(cancel: str) -> None:
    model = cancel_model("gemma4_text", embedding=0.01)
    _patched(model, cancel)
    shapes = [(1, 5), (2, 41), (3, 23), (1, 70)] + [(4, 33)] * 3
    inputs = [token_ids(*shape, seed=n) for n, shape in enumerate(shapes)]
    alone = [logits(model, ids) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: logits(model, ids), inputs * 2))
    for ours, expected in zip(together, alone * 2, strict=True):
        assert torch.equal(ours, expected)
    # Two passes of the same layer, each module called for one input and then for the other.
    layer, rows = model.model.layers[1], [torch.randn(90, 64, device=DEVICE) / n for n in (1, 900)]

    def steps(x: Tensor) -> Any:
        normed = layer.input_layernorm(x)
        yield
        k = layer.self_attn.k_proj(normed).unflatten(-1, (-1, 32))
        yield
        yield torch.cat([layer.self_attn.k_norm(k), layer.self_attn.v_norm(k)])

    one_by_one = [list(steps(x))[-1] for x in rows]
    mixed = list(zip(*map(steps, rows), strict=True))[-1]
    assert all(map(torch.equal, one_by_one, mixed))
