"""Making a layer a block: after its norms have been patched, and tried on the layer itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.block.layer import Block, Runner, block_class
from flashnorm_triton.models.block.spec import BlockSpec, MlpSpec
from flashnorm_triton.models.installers import Declined, Installer
from flashnorm_triton.models.packed import PackedSite
from flashnorm_triton.models.placement import HOOK
from flashnorm_triton.models.report import BlockReport

# Of what a layer adds: far above what two ways of rounding differ by, far below another function.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-9}
_TF32 = 2e-2
_TOKENS = 3


class BlockSite:
    """One layer that runs as a block; the layer has this as ``block``. Holds no weights.

    Raises Declined where the layer's norms were not patched as the audit planned.
    """

    def __init__(
        self, model: nn.Module, report: BlockReport, sites: Mapping[str, Installer]
    ) -> None:
        assert report.spec is not None
        self.report = report
        self.layer = model.get_submodule(report.layer)
        for name in report.spec.packed:
            norm = f"{report.layer}.{name}"
            if not isinstance(sites.get(norm), PackedSite):
                raise Declined(f"{norm} was not fused with its linears")

    def take(self) -> None:
        """Give the layer the class of a block."""
        layer = self.layer
        stock = type(layer)
        runner = Runner(layer, self.report.spec)
        layer.__class__ = block_class(stock)
        layer.runner, layer.block = runner, self
        _rebind(layer)

    def give_back(self) -> None:
        """The layer has its own class again."""
        layer = self.layer
        if isinstance(layer, Block):
            layer.__class__ = type(layer).__mro__[2]
            del layer.runner, layer.block
            _rebind(layer)


def _rebind(layer: nn.Module) -> None:
    """An accelerate hook calls the forward that the layer had: the class's, whichever it is now."""
    if hasattr(layer, HOOK) and "_old_forward" in vars(layer):
        layer._old_forward = type(layer).forward.__get__(layer)


def tried(layer: nn.Module, spec: BlockSpec) -> str | None:
    """Run the layer both ways over a few random rows; why the block must not be, or None.

    Also None where the layer's own code cannot be run so (an attention that needs more than this).
    """
    weight = layer.runner.first._buffers["packed_weight"]
    args, kwargs = _rows(weight, spec)
    stock: Callable[..., Any] = type(layer).__mro__[2].forward
    devices = [weight.device] if weight.is_cuda else []
    with _evaluating(layer), torch.random.fork_rng(devices=devices):
        whole = isinstance(spec.mlp, MlpSpec)
        try:
            if whole:
                expected = stock(layer, *args, **dict(kwargs))
            else:  # what experts are chosen may hang on a rounding: the first half alone
                expected = _given(layer.runner.second, stock, layer, *args, **dict(kwargs))
        except Exception:
            return None
        if not layer.runner.fits(*args, kwargs):
            return None
        run = layer.runner.run if whole else layer.runner.first_half
        made = run(*args, dict(kwargs))
    if not expected.isfinite().all():
        return None
    x, wanted, made = args[0].double(), expected.double(), made.double()
    off, added = float((made - wanted).norm()), float((wanted - x).norm())
    tolerance = _TOLERANCES[weight.dtype]
    if weight.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        tolerance = _TF32
    # What is added may be small beside x, and what it is added to is rounded.
    if not off <= tolerance * added + torch.finfo(weight.dtype).eps * float(wanted.norm()):
        share = off / max(added, 1e-30)
        return f"tried on random rows, its block is off by {share:.1e} of what the layer adds"
    return None


class _Seen(Exception):
    """Ends a forward where a module is called."""


def _given(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """What ``forward`` of these calls ``module`` with; it must."""
    seen: list[Tensor] = []

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])
        raise _Seen

    handle = module.register_forward_pre_hook(look)
    try:
        forward(*args, **kwargs)
    except _Seen:
        return seen[0]
    finally:
        handle.remove()
    raise AssertionError("the module was not called")


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """No gradients, no autocast, no dropout."""
    training = [(module, module.training) for module in layer.modules()]
    kind = next(layer.parameters()).device.type
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
        try:
            for module, _ in training:
                module.training = False
            yield
        finally:
            for module, before in training:
                module.training = before


def _rows(weight: Tensor, spec: BlockSpec) -> tuple[tuple[Tensor], dict[str, Any]]:
    draw = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(1, _TOKENS, weight.shape[1], generator=draw, device="cpu").to(weight)
    kwargs: dict[str, Any] = {}
    if spec.mask is not None:
        kwargs[spec.mask] = None
    if spec.cache is not None:
        kwargs[spec.cache] = None
    if spec.angles is not None:
        turns = torch.rand(1, _TOKENS, spec.rotary // 2, generator=draw, device="cpu") * 6
        turns = torch.cat((turns, turns), -1)
        kwargs[spec.angles] = turns.cos().to(weight), turns.sin().to(weight)
    if spec.attention.growth is not None:
        places = torch.arange(_TOKENS)[None] * int(spec.attention.growth[1])
        kwargs["position_ids"] = places.to(weight.device)
    return (x,), kwargs
