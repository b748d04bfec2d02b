"""Gradients through a patched model: stock's with fold=False, refused where wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_models import FUSED_FAMILIES, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn


def _gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _assert_close(ours: dict[str, Tensor], stock: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == stock.keys()
    for name in stock:
        error = (ours[name] - stock[name]).norm() / stock[name].norm().clamp_min(1e-12)
        # A key's bias moves all scores of a query alike: its gradient is zero but for rounding.
        assert error < tolerance or stock[name].norm() < 1e-5, (name, float(error))


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_backward_equals_stock(family: str, device: torch.device) -> None:
    model, ids = tiny_model(family).to(device).train(), token_ids(3, 17).to(device)
    stock = _gradients(model, ids)
    fn.patch(model, fold=False)
    _assert_close(_gradients(model, ids), stock, 1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    stock = _gradients(model, ids)
    fn.patch(model, fold=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _assert_close(_gradients(model, ids), stock, 1e-4)


def test_compiled_backward_equals_stock() -> None:
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    stock = _gradients(model, ids)
    fn.patch(model, fold=False)
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    _assert_close({n: p.grad for n, p in model.named_parameters()}, stock, 1e-4)


def test_optimizer_made_before_patching_goes_on_and_survives_revert() -> None:
    stock, ids = tiny_model("gemma").train(), token_ids(3, 17)
    model = copy.deepcopy(stock)
    steps = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (stock, model)]
    handle = fn.patch(model, fold=False)
    for _ in range(3):
        for m, optimizer in zip((stock, model), steps, strict=True):
            _gradients(m, ids)
            optimizer.step()
    handle.revert()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-3, atol=1e-3)


def test_autocast_training_equals_stock() -> None:
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    exact = _gradients(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        stock = _gradients(model, ids)
        fn.patch(model, fold=False)
        ours = _gradients(model, ids)
    for name in exact:
        if exact[name].norm() > 1e-4:
            allowed = 1.5 * (stock[name] - exact[name]).norm() + 1e-6
            assert (ours[name] - exact[name]).norm() <= allowed, name


def test_training_a_folded_model_is_refused() -> None:
    model, ids = tiny_model("llama"), token_ids()
    handle = fn.patch(model)
    assert not model.model.layers[0].self_attn.q_proj.weight.requires_grad
    assert not model.model.layers[0].input_layernorm.weight.requires_grad
    model.train()
    with pytest.raises(
        RuntimeError, match=r"input_layernorm.*revert\(\).*patch\(model, fold=False"
    ):
        model(ids)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="fold=False"):
        model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(ids)
    handle.revert()
    assert all(p.requires_grad for p in model.parameters())
    _gradients(model, ids)


def test_frozen_folded_model_passes_gradients_to_its_input() -> None:
    model = tiny_model("llama").requires_grad_(False).train()
    embeddings = torch.randn(2, 7, 64, requires_grad=True)

    def gradient() -> Tensor:
        embeddings.grad = None
        model(inputs_embeds=embeddings).logits.square().mean().backward()
        return embeddings.grad.clone()

    stock = gradient()
    handle = fn.patch(model)
    torch.testing.assert_close(gradient(), stock, rtol=1e-3, atol=1e-5)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="fold=False"):
        gradient()
    handle.revert()


def test_gradients_move_with_packed_weights() -> None:
    """Between backward and the step: every gradient is there, in the new dtype, for its weight."""
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    fn.patch(model, fold=False)
    gradients = _gradients(model, ids)
    model.double()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype == torch.float64, name
        assert torch.equal(parameter.grad, gradients[name].double()), name


def test_copies_learn_what_the_model_learns() -> None:
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    fn.patch(model, fold=False)
    gradients = _gradients(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _gradients(twin, ids).keys() == gradients.keys()
        ours, learns = dict(twin.named_parameters()), dict(model.named_parameters())
        assert {n: p.requires_grad for n, p in ours.items()} == {
            n: p.requires_grad for n, p in learns.items()
        }


def test_partly_frozen_linears_get_the_gradients_they_want() -> None:
    model, ids = tiny_model("qwen2").train(), token_ids(3, 17)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    stock = _gradients(model, ids)
    fn.patch(model, fold=False)
    _assert_close(_gradients(model, ids), stock, 1e-4)
