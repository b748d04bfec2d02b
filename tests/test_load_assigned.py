"""load_state_dict(assign=True) on a patched model: right values, and no second copy on the GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import flashnorm_triton as fn
from flashnorm_triton.models.fused import Replacing
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.models.source import NormSource
from flashnorm_triton.models.weights import PackedWeights


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(token_ids().to(next(model.parameters()).device)).logits


def _stock_parameters(model: nn.Module) -> list[nn.Parameter]:
    found = []
    for module in model.modules():
        if isinstance(module, Replacing) and module.weights.keeps_stock:
            found += module.stock._parameters.values()
    return [parameter for parameter in found if parameter is not None]


@pytest.mark.parametrize("wrapped", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("fold", [True, False])
def test_values_and_what_stays_the_callers(
    fold: bool, family: str, wrapped: bool, device: torch.device
) -> None:
    model, other = (tiny_model(family, seed=seed).to(device) for seed in (0, 1))
    logits = _logits(other)
    state = {k: v.detach().clone() for k, v in other.state_dict().items()}
    if wrapped:
        state = {k: nn.Parameter(v) for k, v in state.items()}
    given = {k: (v.device, v.data_ptr(), v.detach().clone()) for k, v in state.items()}
    options = {"head": True} if family == "gpt2" else {}
    handle = fn.patch(model, fold=fold, **options)
    model.load_state_dict(state, assign=True)
    torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-4)
    for key, value in state.items():
        where, address, before = given[key]
        assert (value.device, value.data_ptr()) == (where, address) and torch.equal(value, before)
    assert all(p.device.type == "cpu" for p in _stock_parameters(model))
    handle.revert()
    assert torch.equal(_logits(model), logits)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_assigned_weights_of_a_device_go_to_the_host() -> None:
    """With fake tensors of a GPU, which tell where they would be."""
    report = SiteReport("norm", "RMSNorm", "rms", "w", 1e-6, ("a", "b"), "fuse", "")
    linears = [nn.Linear(16, 8) for _ in range(2)]
    norm = nn.RMSNorm(16)
    weights = PackedWeights(NormSource(norm, report), linears, fold=True, revertible=True)
    weights.take()
    kept = dict(linears[0]._parameters)
    with FakeTensorMode():
        mine = {"weight": torch.empty(8, 16, device="cuda"), "bias": torch.empty(8, device="cuda")}
        linears[1].load_state_dict(mine, assign=True)
        for index in range(2):
            weights.rest(index)
    assert {p.device.type for p in linears[1].parameters()} == {"cpu"}
    assert all(value.device.type == "cuda" for value in mine.values())
    assert all(linears[0]._parameters[key] is value for key, value in kept.items())


@pytest.mark.gpu
@pytest.mark.parametrize("revertible", [True, False])
def test_memory_on_the_gpu_is_given_up(revertible: bool) -> None:
    model = tiny_model("llama", torch.bfloat16, hidden_size=512, intermediate_size=4096).cuda()
    fn.patch(model, revertible=revertible)

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    _logits(model)
    before = allocated()
    for _ in range(2):
        state = {k: v.to("cuda", copy=True) for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        del state
        _logits(model)
    assert allocated() <= before + 2**20


@pytest.mark.parametrize("part", ["transformer.ln_f", "lm_head"])
def test_loading_one_module_of_a_tied_head(part: str, device: torch.device) -> None:
    """What is kept beside a LayerNorm's weights is made anew, whichever of the two was loaded."""
    model, other = (tiny_model("gpt2", seed=seed).to(device) for seed in (0, 1))
    twin = tiny_model("gpt2").to(device)
    fn.patch(model, head=True)
    for each in (model, twin):
        each.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict())
    torch.testing.assert_close(_logits(model), _logits(twin), rtol=1e-4, atol=1e-4)
    source, head = model.lm_head.site.source, model.lm_head
    sums = (source.gain(head.weight) * head.weight.detach()).sum(-1)
    torch.testing.assert_close(head.get_buffer("row_sums"), sums, rtol=1e-4, atol=1e-4)
