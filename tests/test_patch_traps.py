"""Models that are written so that a careless patch computes something else, or breaks the code."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_table import FAMILIES, build
from tiny_models import VOCABULARY, randomise, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models import source, weights

K, N = 24, 40
_ORDER = torch.arange(K).flip(0)


class Block(nn.Module):
    """A norm and two linears; what happens in between is each test's own."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.code = code
        self.norm = nn.RMSNorm(K, eps=1e-5)
        self.a, self.b = nn.Linear(K, N, bias=bias), nn.Linear(K, N, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def _scaled_between(block: Block, x: Tensor) -> Tensor:
    h = block.norm(x)
    a = block.a(h)
    h *= 2.0
    return a + block.b(h)


def _scaled_view(block: Block, x: Tensor) -> Tensor:
    h = block.norm(x).clone()
    h[:, 0].mul_(3.0)
    return block.a(h) + block.b(h)


def _selected(block: Block, x: Tensor) -> Tensor:
    return block.a(block.norm(x).index_select(-1, _ORDER)) + block.b(x)


def _indexed(block: Block, x: Tensor) -> Tensor:
    return block.a(block.norm(x)[..., _ORDER]) + block.b(x)


def _turned(block: Block, x: Tensor) -> Tensor:
    return block.a(block.norm(x).transpose(1, 2)) + block.b(x)


def _narrowed(block: Block, x: Tensor) -> Tensor:
    return block.a(block.norm(x).half().float()) + block.b(x)


def _check(model: nn.Module, x: Tensor, tolerance: float = 1e-5) -> fn.PatchHandle:
    model.eval()
    with torch.no_grad():
        stock = model(x.clone())
        handle = fn.patch(model, example_inputs=(x.clone(),))
        ours = model(x.clone())
    assert (ours - stock).abs().max() <= tolerance * stock.abs().max(), handle.report.to_json()
    return handle


@pytest.mark.filterwarnings("ignore:nothing to patch")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("code", [_scaled_between, _scaled_view, _selected, _indexed, _turned])
def test_what_happens_between_norm_and_linear(
    code: Callable[[Any, Tensor], Tensor], bias: bool
) -> None:
    block = Block(code, bias)
    randomise(block)
    _check(block, torch.randn(2, K, K))


@pytest.mark.filterwarnings("ignore:nothing to patch")
def test_cast_to_half_of_what_is_too_large_before_the_norm() -> None:
    block = Block(_narrowed, False)
    randomise(block)
    _check(block, torch.randn(2, 5, K) * 1e6, tolerance=1e-2)


@pytest.mark.filterwarnings("ignore:nothing to patch")
def test_fast_path_of_torchs_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, norm_first=True, batch_first=True)
    randomise(layer)
    handle = _check(layer, torch.randn(2, 5, K))
    assert "fast path" in handle.report.sites[-1].reason


class ConfiguredNorm(nn.Module):
    """Its epsilon is in a config that it holds: two of them look alike otherwise."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(eps=eps)
        self.weight = nn.Parameter(torch.ones(K))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps)


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([ConfiguredNorm(1e-5), ConfiguredNorm(1e-6)])
        self.linears = nn.ModuleList([nn.Linear(K, N), nn.Linear(K, N)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(linear(n(x)) for n, linear in zip(self.norms, self.linears, strict=True))


def test_norms_that_differ_in_what_they_hold() -> None:
    model = TwoNorms()
    randomise(model)
    handle = _check(model, torch.randn(2, 5, K) * 1e-3)
    assert [site.eps for site in handle.report.fused] == [1e-5, 1e-6]


@pytest.mark.parametrize("fold", [True, False])
def test_attributes_that_the_code_around_asks_for(fold: bool) -> None:
    def code(block: Block, x: Tensor) -> Tensor:
        h = block.norm(x)
        return block.a(h) * block.a.factor + block.b(h) * block.norm.normalized_shape[0]

    block = Block(code, True)
    randomise(block)
    block.a.factor = 3.0
    x = torch.randn(2, 5, K)
    with torch.no_grad():
        stock = block(x)
        fn.patch(block, fold=fold, example_inputs=(x,))
        torch.testing.assert_close(block(x), stock, rtol=1e-5, atol=1e-5 * float(stock.abs().max()))


def _plain(block: Block, x: Tensor) -> Tensor:
    h = block.norm(x)
    return block.a(h) + block.b(h)


def _swapped(model: nn.Module, how: str, x: Tensor) -> Tensor:
    """The output with other weights, put in behind the modules' backs."""
    draw = torch.Generator().manual_seed(1)
    new = {n: torch.randn(p.shape, generator=draw) for n, p in model.named_parameters()}
    if how == "functional_call":
        return torch.func.functional_call(model, new, (x,))
    if how == "one":
        model.b.weight.data = new["b.weight"]
    else:
        flat = nn.utils.parameters_to_vector(new.values())
        nn.utils.vector_to_parameters(flat, model.parameters())
    return model(x)


@pytest.mark.parametrize("how", ["functional_call", "one", "vector"])
@pytest.mark.parametrize("head", [False, True])
def test_weights_swapped_behind_the_modules_backs(how: str, head: bool) -> None:
    block = Block(_plain, True)
    randomise(block)
    x = torch.randn(2, 5, K)
    stock, folded = copy.deepcopy(block), copy.deepcopy(block)
    fn.patch(block, fold=False, head=head, example_inputs=(x,))
    fn.patch(folded, head=head, example_inputs=(x,))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(
                _swapped(copy.deepcopy(block), how, x),
                _swapped(copy.deepcopy(stock), how, x),
                rtol=1e-5,
                atol=1e-4,
            )
    with pytest.raises(RuntimeError, match=r"norm: its weight or one after it .* fold=False"):
        _swapped(folded.eval(), how, x)


def test_gradients_reach_swapped_weights() -> None:
    block = Block(_plain, True)
    randomise(block)
    x, new = torch.randn(2, 5, K), torch.randn(N, K, requires_grad=True)

    def gradient() -> Tensor:
        output = torch.func.functional_call(block, {"a.weight": new}, (x,))
        return torch.autograd.grad(output.square().sum(), new)[0]

    stock = gradient()
    fn.patch(block, fold=False, example_inputs=(x,))
    torch.testing.assert_close(gradient(), stock, rtol=1e-4, atol=1e-4 * float(stock.abs().max()))


def test_threads_leave_logging_as_it_was() -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    assert not logger.disabled
    models = [Block(_plain, False) for _ in range(6)]
    x = torch.randn(2, 5, K)
    threads = [threading.Thread(target=fn.audit, args=(m,), kwargs={"example_inputs": (x,)})
               for m in models]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not logger.disabled


@pytest.mark.parametrize("family", ["beit", "aimv2_vision_model", "whisper"])
def test_half_models_are_followed_without_example_inputs(family: str) -> None:
    found = [f for f in FAMILIES if f.name == family]
    report = fn.audit(build(found[0], torch.bfloat16))
    assert len(report.fused) == found[0].packed, report.to_json()


def test_head_that_was_replaced_says_so() -> None:
    model = tiny_model("llama")
    fn.patch(model, head=True)
    model.resize_token_embeddings(VOCABULARY + 5)
    with pytest.raises(RuntimeError, match="lm_head is not the module that patch put there"):
        model(token_ids())


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_tied_head_follows_new_embeddings(family: str) -> None:
    model = tiny_model(family)
    stock = copy.deepcopy(model)
    fn.patch(model, head=True)
    table = torch.randn(VOCABULARY + 5, 64)
    for each in (model, stock):
        each.set_input_embeddings(nn.Embedding.from_pretrained(table.clone(), freeze=True))
        each.tie_weights()
        each.eval()
    with torch.no_grad():
        logits = stock(token_ids()).logits
        ours = model(token_ids()).logits
    assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["PackedWeights", "NormSource"])
def test_interrupted_just_after_weights_have_moved(
    place: str, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    logits, modules = model(token_ids()).logits, [id(module) for module in model.modules()]
    owner = {"PackedWeights": weights.PackedWeights, "NormSource": source.NormSource}[place]
    take = owner.take

    def stopped(*args: Any, **kwargs: Any) -> None:
        take(*args, **kwargs)
        raise fault("stopped")

    monkeypatch.setattr(owner, "take", stopped)
    if fault is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            fn.patch(model)
    else:
        with pytest.warns(RuntimeWarning, match="could not be patched"):
            fn.patch(model).revert()  # what has no weights to move was patched
    assert [id(module) for module in model.modules()] == modules
    assert torch.equal(model(token_ids()).logits, logits)
