"""Patched models compute what the stock ones do: logits, decoding, generation, compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import FUSED_FAMILIES, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models import fused

FOLDS = pytest.mark.parametrize("fold", [True, False])


def _error(logits: Tensor, exact: Tensor) -> float:
    return float((logits.double() - exact).norm() / exact.norm())


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, **options).logits


@FOLDS
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_logits_in_float32(family: str, fold: bool, device: torch.device) -> None:
    model, ids = tiny_model(family).to(device), token_ids(4, 33).to(device)
    exact = _logits(copy.deepcopy(model).double(), ids)
    stock = _error(_logits(model, ids), exact)
    with fn.patched(model, fold=fold) as handle:
        assert len(handle.report.fused) == 4
        assert _error(_logits(model, ids), exact) < max(1.25 * stock, 1e-6)


@FOLDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_error_ratio_in_half_precision(
    family: str, dtype: torch.dtype, fold: bool, device: torch.device
) -> None:
    stock, patched = 0.0, 0.0
    for seed in range(3):
        model, ids = tiny_model(family, dtype, seed).to(device), token_ids(4, 33, seed).to(device)
        exact = _logits(copy.deepcopy(model).double(), ids)
        stock += _error(_logits(model, ids), exact)
        with fn.patched(model, fold=fold):
            patched += _error(_logits(model, ids), exact)
    assert patched / stock < 1.25, (patched / 3, stock / 3)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_generate_gives_the_same_tokens(family: str, device: torch.device) -> None:
    model = tiny_model(family, eos_token_id=None).to(device)
    ids = token_ids(2, 7).to(device)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3], mask[1, :3] = 0, 0
    runs: list[dict[str, Any]] = [
        {"inputs": ids, "attention_mask": torch.ones_like(ids)},
        {"inputs": padded, "attention_mask": mask},
        {"inputs": padded, "attention_mask": mask, "cache_implementation": "static"},
    ]
    common = {"max_new_tokens": 16, "do_sample": False, "disable_compile": True}
    expected = [model.generate(**run, **common) for run in runs]
    with fn.patched(model):
        for run, tokens in zip(runs, expected, strict=True):
            assert torch.equal(model.generate(**run, **common), tokens), run.keys()


@FOLDS
def test_every_decode_step_reads_its_own_step(fold: bool, device: torch.device) -> None:
    """At step t the patched model must agree with teacher forcing at t, and not with t - 1."""
    model, ids = tiny_model("llama").to(device), token_ids(2, 100).to(device)
    forced = _logits(model, ids)
    fn.patch(model, fold=fold)
    result = model(ids[:, :4], use_cache=True)
    for t in range(4, ids.shape[1]):
        name = "cache" if "cache" in result else "past_key_values"
        with torch.no_grad():
            result = model(ids[:, t : t + 1], use_cache=True, **{name: result[name]})
        step = result.logits[:, 0]
        torch.testing.assert_close(step, forced[:, t], rtol=1e-3, atol=1e-3)
        assert (step - forced[:, t - 1]).abs().max() > 0.1


@FOLDS
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma"])
def test_compiles_without_a_break(family: str, fold: bool, device: torch.device) -> None:
    model, ids = tiny_model(family).to(device), token_ids().to(device)
    expected = _logits(model, ids, use_cache=False)
    fn.patch(model, fold=fold)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        _logits(compiled, ids, use_cache=False), expected, rtol=1e-4, atol=1e-4
    )


def test_compiled_weights_are_static_inputs() -> None:
    """CUDA graphs copy every input that is not static: the packed weights must be."""
    model, kinds = fn.patch(tiny_model("llama")).model, {}

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
            kinds[node.name] = static
        return graph.forward

    torch._dynamo.reset()
    _logits(torch.compile(model, fullgraph=True, backend=backend), token_ids(), use_cache=False)
    packed = {name: kind for name, kind in kinds.items() if "packed_weight" in name}
    assert len(packed) == 4 and all(packed.values())


def test_one_launch_for_all_linears_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    operation = fused.norm_linear

    def counted(*args: Any) -> Tensor:
        calls.append(args[1].shape)
        return operation(*args)

    monkeypatch.setattr(fused, "norm_linear", counted)
    for family, widths in (("llama", [128, 224]), ("phi3", [128, 224])):
        calls.clear()
        model = fn.patch(tiny_model(family), level="norm").model
        _logits(model, token_ids())
        assert [shape[0] for shape in calls] == widths * 2


def test_layers_can_be_run_by_hand() -> None:
    """Serving code that walks the modules itself finds what it expects at every one of them."""
    model, x = tiny_model("llama"), torch.randn(2, 5, 64)
    layer = model.model.layers[0]

    def walk() -> list[Tensor]:
        normed = layer.input_layernorm(x)
        attention = layer.self_attn
        return [attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed),
                layer.mlp(layer.post_attention_layernorm(x))]  # fmt: skip

    expected = walk()
    fn.patch(model)
    for ours, stock in zip(walk(), expected, strict=True):
        assert ours.shape == stock.shape
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_a_slice_given_something_else_says_so() -> None:
    model = fn.patch(tiny_model("llama")).model
    with pytest.raises(ValueError, match=r"shape \(2, 64\).*fused with its norm.*128 columns"):
        model.model.layers[0].self_attn.q_proj(torch.randn(2, 64))


def test_autocast_and_inference_mode(device: torch.device) -> None:
    model, ids = tiny_model("qwen2").to(device), token_ids(4, 33).to(device)
    exact = _logits(copy.deepcopy(model).double(), ids)
    layer, x = model.model.layers[0], torch.randn(3, 64, device=device)

    def projected() -> Tensor:
        return layer.self_attn.q_proj(layer.input_layernorm(x))

    with torch.autocast(device.type, torch.bfloat16):
        stock = _logits(model, ids)
        assert projected().dtype == torch.bfloat16
    with torch.inference_mode():
        handle = fn.patch(model)
        plain = model(ids).logits
    assert _error(plain, exact) < 1e-6
    with torch.autocast(device.type, torch.bfloat16):
        ours = _logits(model, ids)
        assert projected().dtype == torch.bfloat16
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert _error(ours, exact) < 1.25 * _error(stock, exact)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    handle.revert()
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_narrower_inputs_widen_as_in_stock_modules() -> None:
    model = tiny_model("llama")
    embeddings = model.model.embed_tokens(token_ids()).detach().bfloat16()
    expected = model(inputs_embeds=embeddings).logits
    fn.patch(model)
    actual = model(inputs_embeds=embeddings).logits
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_non_finite_values_propagate() -> None:
    model, x = tiny_model("llama"), torch.randn(4, 64)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    layer = model.model.layers[0]
    expected = layer.self_attn.v_proj(layer.input_layernorm(x)).isnan()
    assert expected[1].all() and expected[2].any() and not expected[0].any()
    fn.patch(model)
    assert torch.equal(layer.self_attn.v_proj(layer.input_layernorm(x)).isnan(), expected)


def test_float16_fold_out_of_range_falls_back_to_the_kernel() -> None:
    """A channel that is tiny in x, large in the gain and in the weight: only the fold overflows."""
    model, ids = tiny_model("llama", torch.float16), token_ids(4, 33)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 1e-3
        layer.input_layernorm.weight[5] = 300.0
        layer.self_attn.v_proj.weight[0, 5] = 300.0
    exact, stock = _logits(copy.deepcopy(model).double(), ids), _logits(model, ids)
    handle = fn.patch(model)
    assert "folding it would leave float16's range" in handle.report.fused[0].reason
    assert "float16" not in handle.report.fused[1].reason
    assert not layer.input_layernorm.folded and layer.post_attention_layernorm.folded
    assert _error(_logits(model, ids), exact) < 1.25 * _error(stock, exact)
