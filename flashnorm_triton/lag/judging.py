"""The numbers of each step at one site: its input against stock's, its output against t and t-1."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from flashnorm_triton.lag.sites import Site, scale_of, stock_output

_norm = torch.linalg.vector_norm


@dataclass(frozen=True)
class SiteSteps:
    """One figure a step and row, all (T, B), float64; NaN where there is nothing to compare.

    ``input_*``: the distance of the candidate's input to the reference's at t and at t-1, between
    those two, and of the stock model in its own dtype to the reference; relative to the reference.

    ``output_*``: with v(t) what stock modules make of the candidate's own input at t, the distances
    relative to v(t) of its output to v(t), to v(t-1) (a stale output), and to v(t-1) at the scale
    of t (a stale product); ``output_moved`` is the least of what tells those from v(t).
    ``scale`` is the output's component along v(t), 1 when right; ``stale`` what a scale left over
    from t-1 makes of it: s(t-1) / s(t). Both noises are those of stock modules in their own dtype.
    """

    input_at_t: np.ndarray
    input_at_before: np.ndarray
    input_moved: np.ndarray
    input_noise: np.ndarray
    output_at_t: np.ndarray
    output_at_before: np.ndarray
    output_mixed: np.ndarray
    output_moved: np.ndarray
    output_noise: np.ndarray
    scale: np.ndarray
    stale: np.ndarray
    scale_noise: np.ndarray


def joined(parts: list[SiteSteps]) -> SiteSteps:
    """The chunks behind one another."""
    names = [field.name for field in fields(SiteSteps)]
    return SiteSteps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def nothing(batch: int) -> SiteSteps:
    """The figures of a step at which nothing is compared, as a prefill is."""
    return SiteSteps(*(np.full((1, batch), np.nan) for _ in fields(SiteSteps)))


@torch.no_grad()
def judge(
    site: Site,
    candidate: dict[tuple[str, bool], Tensor],
    before: Tensor,
    reference_inputs: Tensor,
    control_inputs: Tensor,
    reference: nn.Module,
    stock: nn.Module,
) -> SiteSteps:
    """The figures of a chunk of T steps.

    ``candidate`` holds what was tapped, (T, B, K) and (T, B, N); ``before`` (B, K) is the input one
    step before the first; ``reference_inputs`` (T + 1, B, K), from one step before the first, and
    ``control_inputs`` (T, B, K) are those of the two stock models that read the same tokens.
    """
    x = candidate[site.norm, True]
    wanted = reference_inputs.to(torch.promote_types(reference_inputs.dtype, torch.float32))
    size = _norm(wanted[1:], dim=-1)
    figures = [
        _norm(x.to(wanted) - wanted[1:], dim=-1) / size,
        _norm(x.to(wanted) - wanted[:-1], dim=-1) / size,
        _norm(wanted[1:] - wanted[:-1], dim=-1) / size,
        _norm(control_inputs.to(wanted) - wanted[1:], dim=-1) / size,
    ]
    figures += _output_figures(
        site, candidate, torch.cat([before[None], x]), wanted, reference, stock
    )
    return SiteSteps(*torch.stack(figures).double().cpu().numpy())


def _output_figures(
    site: Site,
    candidate: dict[tuple[str, bool], Tensor],
    inputs: Tensor,
    wanted: Tensor,
    reference: nn.Module,
    stock: nn.Module,
) -> list[Tensor]:
    if not site.outputs:
        return [wanted.new_full(wanted[1:].shape[:-1], torch.nan)] * 8
    wide = inputs.to(wanted)
    v, y0 = stock_output(reference, site, wide)
    v, last = v[1:], v[:-1]
    got = torch.cat([candidate[path, False] for path in site.outputs], -1).to(v) - y0
    own, own_y0 = stock_output(stock, site, inputs[1:])
    control = own.to(v) + own_y0.to(v) - y0
    square = v.square().sum(-1)
    size = square.sqrt()
    scale = scale_of(site, wide)
    stale = torch.ones_like(square) if scale is None else scale[:-1] / scale[1:]
    product = last / stale[..., None]
    return [
        _norm(got - v, dim=-1) / size,
        _norm(got - last, dim=-1) / size,
        _norm(got - product, dim=-1) / size,
        torch.minimum(_norm(last - v, dim=-1), _norm(product - v, dim=-1)) / size,
        _norm(control - v, dim=-1) / size,
        (got * v).sum(-1) / square,
        stale,
        (control * v).sum(-1) / square - 1,
    ]
