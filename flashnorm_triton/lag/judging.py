"""The numbers of each step at one site: its input against stock's, its output against t and t-1."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from flashnorm_triton.lag.sites import Site, stock_output
from flashnorm_triton.lag.trio import Trio

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
    from t-1 makes of it, s(t-1) / s(t), and ``other`` what the scale of the site that ran before
    makes of it. Both noises are those of stock modules in their own dtype.
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
    other: np.ndarray
    scale_noise: np.ndarray


_OF_INPUT, _OF_OUTPUT = 4, 9


def joined(parts: list[SiteSteps]) -> SiteSteps:
    """The chunks behind one another."""
    names = [field.name for field in fields(SiteSteps)]
    return SiteSteps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def nothing(batch: int) -> SiteSteps:
    """The figures of a step at which nothing is compared, as a prefill is."""
    return SiteSteps(*(np.full((1, batch), np.nan) for _ in range(_OF_INPUT + _OF_OUTPUT)))


def figures(entering: list[Tensor], leaving: list[Tensor]) -> SiteSteps:
    """The record of a chunk from ``of_input`` and ``of_output``: one copy from the device."""
    return SiteSteps(*torch.stack([*entering, *leaving]).double().cpu().numpy())


def of_input(rows: Tensor, reference: Tensor, control: Tensor) -> list[Tensor]:
    """The input's figures, each (T, B), of the candidate's rows and the reference's, both
    (T + 1, B, K) from one step before the first, and the control's (T, B, K)."""
    wanted = reference.to(torch.promote_types(reference.dtype, torch.float32))
    got, now, last = rows[1:].to(wanted), wanted[1:], wanted[:-1]
    pairs = ((got, now), (got, last), (now, last), (control.to(wanted), now))
    return [_relative(one, other, now) for one, other in pairs]


def of_output(
    site: Site,
    rows: Tensor,
    outputs: list[Tensor],
    scales: Tensor | None,
    before: Tensor | None,
    trio: Trio,
) -> list[Tensor]:
    """The output's figures, each (T, B), of what the candidate made, ``outputs`` (T, B, N_i), of
    its own ``rows`` (T + 1, B, K), whose scales are ``scales`` (T + 1, B); ``before`` (T, B) are
    those of the site that ran before. NaN for a site whose output is not compared."""
    if not outputs:
        empty = rows.new_full(rows[1:].shape[:-1], torch.nan, dtype=torch.float32)
        return [empty] * _OF_OUTPUT
    v, y0 = stock_output(trio.reference, site, rows)
    v, last = v[1:], v[:-1]
    got = torch.cat(outputs, -1).to(v) - y0
    own, own_y0 = stock_output(trio.control, site, rows[1:])
    control = own.to(v) + own_y0.to(v) - y0
    square = v.square().sum(-1)
    empty = square == 0  # a row of zeros, as a padding token's: no scale can be seen there
    safe = square.masked_fill(empty, 1)
    stale = torch.ones_like(square)
    if scales is not None:
        stale = (scales[:-1] / scales[1:]).masked_fill(empty, 1)
    product = last / stale[..., None]
    return [
        _relative(got, v, v),
        _relative(got, last, v),
        _relative(got, product, v),
        torch.minimum(_relative(last, v, v), _relative(product, v, v)),
        _relative(control, v, v),
        ((got * v).sum(-1) / safe).masked_fill(empty, 1),
        stale,
        stale if before is None else (before / scales[1:]).masked_fill(empty, 1),
        ((control * v).sum(-1) / safe).masked_fill(empty, 1) - 1,
    ]


def _relative(one: Tensor, other: Tensor, whole: Tensor) -> Tensor:
    """|one − other| / |whole| of rows (..., K); 0 where nothing differs from nothing."""
    distance = _norm(one - other, dim=-1)
    return (distance / _norm(whole, dim=-1)).masked_fill(distance == 0, 0)
