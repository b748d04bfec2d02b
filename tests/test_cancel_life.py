"""What becomes of a model with dropped norms: reverted, saved, copied, moved, compiled, trained."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cancel_models import DEVICE, cancel_model, error, logits
from tiny_models import token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.cancel_sites import CancelledNorm, CancelledSlice, DoneNorm

IDS = token_ids(4, 33).to(DEVICE)  # many rows: the product on raw x
FOLDS = pytest.mark.parametrize("fold", [True, False])
FAMILIES = pytest.mark.parametrize("family", ["gemma4_text", "deepseek_v3"])


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """On the CPU: the stock weights of folded linears wait in host memory."""
    return list(left) == list(right) and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k].cpu(), right[k].cpu()) for k in left
    )


def _identity(model: nn.Module) -> dict[str, Any]:
    found = {f"module {name}": id(module) for name, module in model.named_modules()}
    found.update({f"value {name}": id(p) for name, p in model.named_parameters()})
    found.update({f"learns {name}": p.requires_grad for name, p in model.named_parameters()})
    return found


def _ours(model: nn.Module) -> int:
    return sum(isinstance(m, (CancelledNorm, CancelledSlice, DoneNorm)) for m in model.modules())


@FOLDS
@FAMILIES
def test_values_revert_and_identity(family: str, fold: bool) -> None:
    model = cancel_model(family, torch.bfloat16)
    values, identity, stock = _values(model), _identity(model), logits(model, IDS)
    names = [name for name, _ in model.named_parameters()]
    handle = fn.patch(model, cancel="exact", fold=fold)
    assert _ours(model) > 8 and _same(_values(model), values)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(logits(model, IDS), stock, rtol=0.1, atol=0.3)
    handle.revert()
    assert _ours(model) == 0 and _identity(model) == identity
    assert _same(_values(model), values) and torch.equal(logits(model, IDS), stock)


def test_a_saved_model_is_the_stock_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = cancel_model("gemma4_text")
    values, stock = _values(model), logits(model, IDS)
    fn.patch(model, cancel="exact")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(DEVICE)
    assert _ours(loaded) == 0 and _same(_values(loaded), values)
    assert torch.equal(logits(loaded, IDS), stock)


@FOLDS
def test_loading_reaches_the_gains_of_later_norms(fold: bool) -> None:
    model, other = cancel_model("gemma4_text"), cancel_model("gemma4_text", seed=5)
    expected, values = logits(other, IDS), _values(other)
    handle = fn.patch(model, cancel="exact", fold=fold)
    for assign in (False, True):
        model.load_state_dict(_values(model) if assign else values, assign=assign)
        assert _same(_values(model), values)
        torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for m in (model, other):
            m.model.layers[0].self_attn.k_norm.weight.mul_(2)
    torch.testing.assert_close(logits(model, IDS), logits(other, IDS), rtol=1e-4, atol=1e-4)
    handle.revert()
    assert torch.equal(logits(model, IDS), logits(other, IDS))


@pytest.mark.parametrize(
    ("how", "fold"),
    [
        (copy.deepcopy, True),
        (lambda m: pickle.loads(pickle.dumps(m)), True),
        (copy.deepcopy, False),
    ],
)
def test_copies_are_whole_and_independent(how: Any, fold: bool) -> None:
    model = cancel_model("gemma4_text", torch.bfloat16)
    stock, values = logits(model, IDS), _values(model)
    handle = fn.patch(model, cancel="fast", fold=fold)
    ours = logits(model, IDS)
    twin = how(model)
    assert torch.equal(logits(twin, IDS), ours) and _same(_values(twin), values)
    assert fn.audit(twin) == handle.report
    handle.revert()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin, IDS), ours)
    with pytest.warns(UserWarning, match="already patched"):
        fn.patch(twin).revert()
    assert _ours(twin) == 0
    assert torch.equal(logits(twin, IDS), stock) and _same(_values(twin), values)


@FOLDS
def test_other_dtypes(fold: bool) -> None:
    model = cancel_model("gemma4_text", embedding=0.05)
    reference = copy.deepcopy(model)
    handle = fn.patch(model, cancel="fast" if not fold else "exact", fold=fold)
    for convert in (nn.Module.double, nn.Module.half, nn.Module.bfloat16):
        convert(model), convert(reference)
        assert _same(_values(model), _values(reference))
        exact = logits(copy.deepcopy(reference).double(), IDS)
        ours, stock = (error(logits(m, IDS), exact) for m in (model, reference))
        # This family's norms compute in float32, whatever the model's dtype.
        assert ours <= 1.25 * stock + 2e-6, convert
    handle.revert()
    assert _same(_values(model), _values(reference))
    assert torch.equal(logits(model, IDS), logits(reference, IDS))


def test_fast_in_a_model_turned_to_float16_is_exact() -> None:
    model = cancel_model("gemma4_text", embedding=0.001)
    reference = copy.deepcopy(model)
    fn.patch(model, cancel="fast")
    exact = logits(copy.deepcopy(reference).half().double(), IDS)
    assert error(logits(model, IDS), exact) > 0.03
    ours, stock = (error(logits(m.half(), IDS), exact) for m in (model, reference))
    assert ours < 1.25 * stock < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_always_exact(dtype: torch.dtype) -> None:
    model = cancel_model("gemma4_text", embedding=0.001)
    exact = logits(copy.deepcopy(model).double(), IDS)
    with torch.autocast(DEVICE, dtype):
        stock = logits(model, IDS)
    fn.patch(model, cancel="fast")
    with torch.autocast(DEVICE, dtype):
        ours = logits(model, IDS)
    assert ours.dtype == stock.dtype
    assert error(ours, exact) < 1.25 * error(stock, exact)


@pytest.mark.parametrize(("family", "cancel"), [("gemma4_text", "fast"), ("deepseek_v3", "exact")])
def test_compiles_without_a_break(family: str, cancel: str) -> None:
    # deepseek_v3's first layer is dense; the expert loop of its second breaks the stock graph too.
    model = cancel_model(family, **({"num_hidden_layers": 1} if family == "deepseek_v3" else {}))
    fn.patch(model, cancel=cancel)
    expected = logits(model, IDS, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours = logits(compiled, IDS, use_cache=False)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma4_text", "deepseek_v3"])
def test_gradients_without_folding(family: str) -> None:
    model = cancel_model(family, embedding=0.05).train()
    reference = copy.deepcopy(model)
    fn.patch(model, cancel="fast", fold=False)
    for m in (model, reference):
        m(IDS, labels=IDS).loss.backward()
    grads, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (model, reference))
    assert list(grads) == list(expected) and any("k_norm" in n or "q_a" in n for n in grads)
    for name, grad in expected.items():
        if grad is None:
            assert grads[name] is None or not grads[name].any(), name
            continue
        distance = (grads[name] - grad).norm() / grad.norm().clamp_min(1e-12)
        assert distance < 1e-3, (name, float(distance))


def test_training_with_folded_gains_is_refused() -> None:
    model = cancel_model("gemma4_text").train()
    fn.patch(model, cancel="exact")
    for rows in (3, 100):
        with pytest.raises(RuntimeError, match="layers.0.input_layernorm.*cannot learn so.*fold"):
            model.model.layers[0].input_layernorm(torch.randn(rows, 64, device=DEVICE))


def test_a_slice_given_something_else_says_so() -> None:
    model = cancel_model("gemma4_text")
    fn.patch(model, cancel="exact")
    # Its keys come twice: 4 x 32 queries, and 2 x 32 keys and values.
    with pytest.raises(ValueError, match=r"shape \(2, 64\).*packed output, 256 columns"):
        model.model.layers[1].self_attn.k_proj(torch.randn(2, 64, device=DEVICE))
    shown = repr(model.model.layers[1])
    assert "exact, with q_norm, k_norm, v_norm" in shown
    assert "Gemma4RMSNorm, done in model.layers.1.input_layernorm" in shown
