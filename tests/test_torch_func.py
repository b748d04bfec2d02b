"""torch.func over the operations and over patched models: right values in every nesting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_table import FAMILIES, build
from numerics import make_case
from tiny_models import randomise, tiny_model, token_ids
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import flashnorm_triton as fn
from flashnorm_triton.ops import norm_linear, rms_norm

ARGUMENTS = ("x", "weight", "bias", "gain", "residual")


def _tensors(device: torch.device, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    x, weight, _, bias, gain = make_case(
        15, 8, 12, dtype, device, bias=True, gain=True, x=torch.randn(15, 12).to(device, dtype)
    )
    residual = torch.randn(3, 5, 4, dtype=dtype, device=device)
    return dict(zip(ARGUMENTS, (x.view(3, 5, 12), weight, bias, gain, residual), strict=True))


def _ours(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, residual: Tensor) -> Tensor:
    y = norm_linear(x, weight, 1e-2, bias, gain, residual=residual, activation="silu", gated=True)
    return rms_norm(y, 1e-2, gain[:4])


def _plain(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, residual: Tensor) -> Tensor:
    """The same in operations that torch.func knows."""
    z = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-2) * gain @ weight.T + bias
    y = nn.functional.silu(z[..., :4]) * z[..., 4:] + residual
    return y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-2) * gain[:4]


def _loss(op: Any) -> Any:
    return lambda *tensors: op(*tensors).pow(3).sum()


_ALL = tuple(range(len(ARGUMENTS)))
TRANSFORMS: dict[str, Any] = {
    "grad": lambda op: grad(_loss(op), _ALL),
    "vmap over x": lambda op: (
        lambda x, w, b, g, r: vmap(op, (0, None, None, None, None))(x, w, b, g, r[0])
    ),
    "vmap over x and residual": lambda op: vmap(op, (1, None, None, None, 1)),
    "vmap over residual": lambda op: (
        lambda x, w, b, g, r: vmap(op, (None, None, None, None, 0))(x[0], w, b, g, r)
    ),
    "vmap over gain": lambda op: (
        lambda x, w, b, g, r: vmap(op, (None, None, None, 0, None))(
            x, w, b, torch.stack([g, 2 * g]), r
        )
    ),
    "vmap over weights": lambda op: (
        lambda x, w, b, g, r: vmap(op, (0, 1, 0, None, 0))(
            x, torch.stack([w, 2 * w, -w], 1), torch.stack([b, -b, 3 * b]), g, r
        )
    ),
    "vmap of grad": lambda op: vmap(grad(_loss(op), _ALL), (0, None, None, None, 0)),
    "grad of vmap": lambda op: grad(_loss(vmap(op, (0, None, None, None, 0))), _ALL),
    "jvp": lambda op: lambda *t: jvp(op, t, tuple(torch.roll(part, 1) for part in t)),
    "hessian": lambda op: lambda x, w, b, g, r: hessian(_loss(op))(x[0, 0], w, b, g, r[0, 0]),
    "jvp of vmap": lambda op: (
        lambda *t: jvp(
            vmap(op, (0, None, None, None, 0)), t, tuple(torch.roll(part, 1) for part in t)
        )
    ),
}


def _close(ours: Any, stock: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(ours, stock, rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_operations_under_transforms(name: str, device: torch.device) -> None:
    tensors = _tensors(device).values()
    transform = TRANSFORMS[name]
    _close(transform(_ours)(*tensors), transform(_plain)(*tensors))


@pytest.mark.parametrize("name", ["grad", "vmap over x", "vmap of grad", "jvp"])
def test_compiled_transforms(name: str, device: torch.device) -> None:
    tensors = _tensors(device).values()
    torch.compiler.reset()
    run = torch.compile(TRANSFORMS[name](_ours), fullgraph=True, backend="aot_eager")
    _close(run(*tensors), TRANSFORMS[name](_plain)(*tensors))


def test_ordinary_gradients_through_vmap(device: torch.device) -> None:
    def gradients(op: Any) -> tuple[Tensor, ...]:
        leaves = [part.requires_grad_() for part in _tensors(device).values()]
        torch.manual_seed(0)
        return torch.autograd.grad(_loss(vmap(op, (0, None, None, None, 0)))(*leaves), leaves)

    torch.manual_seed(1)
    ours = gradients(_ours)
    torch.manual_seed(1)
    _close(ours, gradients(_plain))


def test_vmap_over_rows_is_one_call_of_the_operation(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = fn.dispatch.norm_linear
    monkeypatch.setattr(
        fn.dispatch, "norm_linear", lambda x, *more: calls.append(x.shape) or real(x, *more)
    )
    x, weight, *_ = _tensors(device, torch.float32).values()
    y = vmap(lambda rows: norm_linear(rows, weight, 1e-2))(x)
    assert calls == [(3, 5, 12)] and torch.equal(y, real(x, weight, 1e-2, None, None))


def test_bad_input_is_named_under_transforms(device: torch.device) -> None:
    x, weight, *_ = _tensors(device).values()
    for call in (vmap(lambda rows: norm_linear(rows[..., 1:], weight, 1e-2)),
                 grad(lambda x: norm_linear(x[..., 1:], weight, 1e-2).sum())):  # fmt: skip
        with pytest.raises(ValueError, match="K differs: x has 11"):
            call(x)


# Patched models


def _other(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Other weights, not far from the model's own."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() * (1 + 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
        for name, p in model.named_parameters()
    }


def _logits(model: nn.Module, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    return functional_call(model, weights, (ids,), {"use_cache": False}).logits


PATCHED = {
    "llama": {},
    "gemma": {"head": True},
    "opt": {},
    "qwen3": {"cancel": "exact"},
}


def _pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    if name == "opt":
        stock = build(next(family for family in FAMILIES if family.name == name), torch.float64)
    else:
        stock = tiny_model(name, torch.float64)
    stock.set_attn_implementation("eager")  # what forward mode can differentiate
    model = copy.deepcopy(stock)
    assert fn.patch(model, **options).changed
    return model, stock


def _near(ours: Any, stock: Any) -> None:
    """As near as stock norms are to themselves, which compute in float32."""
    if isinstance(ours, dict):
        assert list(ours) == list(stock)
        ours, stock = ours.values(), stock.values()
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=2e-6 * float(theirs.detach().abs().max())
        )


@pytest.mark.parametrize("name", PATCHED)
def test_gradients_of_a_model_with_swapped_weights(name: str) -> None:
    model, stock = _pair(name, fold=False, **PATCHED[name])
    weights, ids = _other(stock), token_ids()

    def loss(model: nn.Module) -> Any:
        return lambda weights: _logits(model, weights, ids).square().mean()

    _near(grad(loss(model))(weights), grad(loss(stock))(weights))
    tangents = {name: torch.randn_like(value) for name, value in weights.items()}
    ours = jvp(loss(model), (weights,), (tangents,))
    _near(ours, jvp(loss(stock), (weights,), (tangents,)))


@pytest.mark.parametrize("name", PATCHED)
def test_model_called_with_other_weights(name: str) -> None:
    model, stock = _pair(name, fold=False, **PATCHED[name])
    ids = token_ids()
    with torch.no_grad():
        for seed in range(3):
            # The weights of one call are freed before the next draws its own.
            ours = _logits(model, _other(stock, seed), ids)
            _near([ours], [_logits(stock, _other(stock, seed), ids)])
        _near([model(ids).logits], [stock(ids).logits])


def test_a_lone_norm_called_with_other_gains() -> None:
    """Gemma's 1 + w is kept from call to call, for the model's own w alone."""
    model, stock = _pair("gemma")
    ids, name = token_ids(), "model.norm.weight"
    memory = _other(stock)[name].numpy().copy()
    for seed in range(3):
        # Gains that were freed, and others where they lay.
        memory[:] = _other(stock, seed)[name].numpy()
        other = {name: torch.from_numpy(memory)}
        with torch.no_grad():
            _near([_logits(model, other, ids)], [_logits(stock, other, ids)])

    def loss(model: nn.Module) -> Any:
        return lambda weights: _logits(model, weights, ids).square().mean()

    _near(grad(loss(model))(other), grad(loss(stock))(other))
    several = {"weight": torch.stack([other[name], 2 * other[name]])}
    x = torch.randn(3, 64, dtype=torch.float64)
    with torch.no_grad():
        ours, theirs = (
            vmap(lambda w, norm=m.model.norm: functional_call(norm, w, (x,)))(several)
            for m in (model, stock)
        )
    _near([ours], [theirs])


SWAPS = {
    "tied head": ("transformer.wte.weight",),
    "gain": ("transformer.ln_f.weight",),
    "shift": ("transformer.ln_f.bias",),
}


@pytest.mark.parametrize("what", SWAPS)
def test_tied_head_of_a_layer_norm_called_with_other_weights(what: str) -> None:
    model, stock = _pair("gpt2", head=True)
    ids = token_ids()
    other = {name: _other(stock)[name] for name in SWAPS[what]}

    def loss(model: nn.Module) -> Any:
        return lambda weights: _logits(model, weights, ids).square().mean()

    with torch.no_grad():
        _near([_logits(model, other, ids)], [_logits(stock, other, ids)])
    _near(grad(loss(model))(other), grad(loss(stock))(other))
    for change in (lambda m: m.to(torch.float64), copy.deepcopy, lambda m: m.float()):
        model, stock = change(model), change(stock)
        with torch.no_grad():
            ours, theirs = model(ids).logits, stock(ids).logits
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert not any(site.source.swapped for site in _sites(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["norm", "linear"])
def test_folded_model_refuses_other_weights(name: str, kind: str) -> None:
    model, stock = _pair(name)
    norm = {"llama": "model.layers.0.input_layernorm.", "gpt2": "transformer.h.1.ln_2."}[name]
    linear = {"llama": "model.layers.0.self_attn.v_proj.", "gpt2": "transformer.h.1.mlp.c_fc."}
    path = {"norm": norm, "linear": linear[name]}[kind] + "weight"
    ids = token_ids()
    with pytest.raises(RuntimeError, match="other memory .* fold=False"):
        _logits(model, {path: _other(stock)[path]}, ids)
    embedding = next(iter(dict(stock.named_parameters())))
    other = {embedding: _other(stock)[embedding]}
    with torch.no_grad():
        _near([_logits(model, other, ids)], [_logits(stock, other, ids)])


def test_gradients_of_inputs_through_a_folded_model() -> None:
    model, stock = _pair("llama")
    embedded = stock.model.embed_tokens(token_ids()).detach()

    def loss(model: nn.Module) -> Any:
        return lambda x: model(inputs_embeds=x, use_cache=False).logits.square().mean()

    _near([grad(loss(model))(embedded)], [grad(loss(stock))(embedded)])


class Block(nn.Module):
    """Two norms, one before two linears, in code that every transform can run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(12, eps=1e-3), nn.LayerNorm(12)
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 7)
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.head(self.last(x + torch.tanh(self.a(h)) * self.b(h)))


def test_gradients_by_sample_and_ensembles() -> None:
    """The two patterns of torch.func's own tutorials."""
    stock = Block().double().eval()
    model, x = copy.deepcopy(stock), torch.randn(4, 3, 12, dtype=torch.float64)
    fn.patch(model, fold=False, example_inputs=(x,))

    def loss(model: nn.Module) -> Any:
        return lambda weights, x: functional_call(model, weights, (x,)).square().mean()

    weights = _other(stock)
    _near(
        vmap(grad(loss(model)), (None, 0))(weights, x),
        vmap(grad(loss(stock)), (None, 0))(weights, x),
    )
    several = {name: torch.stack([value, 2 * value]) for name, value in weights.items()}
    ours = vmap(lambda w: functional_call(model, w, (x,)))(several)
    _near([ours], [vmap(lambda w: functional_call(stock, w, (x,)))(several)])
    _near([vmap(model)(x)], [stock(x)])
    folded = copy.deepcopy(stock)
    fn.patch(folded, example_inputs=(x,))
    _near([vmap(folded)(x)], [stock(x)])


def test_folded_model_refuses_other_weights_in_a_compiled_graph() -> None:
    model, x = Block().eval(), torch.randn(3, 12)
    fn.patch(model, example_inputs=(x,))
    other = {"norm.weight": torch.rand(12)}
    torch.compiler.reset()
    run = torch.compile(lambda w: functional_call(model, w, (x,)), backend="aot_eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="other memory"):
        run(other)


def _sites(model: nn.Module) -> list[Any]:
    from flashnorm_triton.models.installers import sites_of

    return [site for site in sites_of(model) if hasattr(site, "source")]
