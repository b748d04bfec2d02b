"""Faults of a patched model's decode steps, planted at one module and at chosen steps; and how the
detector's tests run models.

Each takes ``when``, a set of steps (the first call after the prompt's is step 1). They are made of
plain torch on one instance, so they run everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import pytest
import torch
from torch import Tensor, nn

from flashnorm_triton import runtime

ALWAYS: Container[int] = range(1, 1 << 30)


def _wrapped(module: nn.Module, change: Callable[[int, Tensor, Tensor], Tensor]) -> None:
    """``change(step, x, y)`` stands between a module and its caller; step 0 is the prompt."""
    real, calls = module.forward, iter(range(1 << 30))
    module.forward = lambda x: change(next(calls), x, real(x))


def stale_scale(site: nn.Module, when: Container[int], eps: float) -> None:
    """The scale is that of the call before, the field's bug; of a site without biases."""
    kept: dict[str, Tensor] = {}

    def change(step: int, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        before = kept.get("scale")
        kept["scale"] = scale[:, -1:]
        return (y.double() * (before / scale)).to(y.dtype) if step in when else y

    _wrapped(site, change)


def scale_of_the_site_before(
    site: nn.Module, before: nn.Module, when: Container[int], eps: float
) -> None:
    """One buffer for all scales, which the site's own has not reached yet."""
    kept: dict[str, Tensor] = {}

    def scale_of(x: Tensor) -> Tensor:
        return torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)

    def keep(step: int, x: Tensor, y: Tensor) -> Tensor:
        kept["scale"] = scale_of(x)[:, -1:]
        return y

    def change(step: int, x: Tensor, y: Tensor) -> Tensor:
        return (y.double() * (kept["scale"] / scale_of(x))).to(y.dtype) if step in when else y

    _wrapped(before, keep)
    _wrapped(site, change)


def stale_output(site: nn.Module, when: Container[int]) -> None:
    """The whole output is that of the call before."""
    kept: dict[str, Tensor] = {}

    def change(step: int, x: Tensor, y: Tensor) -> Tensor:
        before = kept.get("y")
        kept["y"] = y[:, -1:]
        return before if step in when else y

    _wrapped(site, change)


def stale_product(site: nn.Module, when: Container[int], eps: float) -> None:
    """The product is that of the call before, the scale is right."""
    kept: dict[str, Tensor] = {}

    def change(step: int, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        before = kept.get("product")
        kept["product"] = (y.double() / scale)[:, -1:]
        return (before * scale).to(y.dtype) if step in when else y

    _wrapped(site, change)


def swapped_outputs(one: nn.Module, other: nn.Module, when: Container[int]) -> None:
    """A site reads another site's buffer: that of the step before, as it runs earlier."""
    kept: dict[str, Tensor] = {}

    def keep(step: int, x: Tensor, y: Tensor) -> Tensor:
        kept["y"] = y[:, -1:]
        return y

    _wrapped(other, keep)
    _wrapped(one, lambda step, x, y: kept["y"] if step in when else y)


def stale_keys(attention: nn.Module, when: Container[int]) -> None:
    """The keys that enter the cache are those of the step before."""
    stale_output(attention.k_proj, when)


def stale_logits(model: nn.Module, when: Container[int]) -> None:
    """The head's output is that of the call before."""
    stale_output(model.lm_head, when)


def wrong_weight(site: nn.Module, factor: float) -> None:
    """No lag at all: the packed weights are off."""
    site._buffers["packed_weight"].mul_(factor)


@pytest.fixture(scope="module", autouse=True)
def as_a_user_runs_it() -> Iterator[None]:
    """One thread, as the model is too small for more; plain torch, not Triton's interpreter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(runtime, "interpreting", lambda: False)
        yield
    torch.set_num_threads(threads)
