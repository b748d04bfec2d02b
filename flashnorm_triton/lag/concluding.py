"""From the figures of every step to a report: limits, marks, the first step that is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from flashnorm_triton.lag import verdict
from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.repeats import repeats
from flashnorm_triton.lag.report import Finding, LagReport, Place
from flashnorm_triton.lag.sites import Site
from flashnorm_triton.lag.steps import Steps
from flashnorm_triton.lag.verdict import Marks

# A scale is made of sums in float32, whatever the tensors' dtype; they round it a few times.
_SCALE_FLOOR = 2.0**-21
# Stock norms compute in float32 in a float64 model too.
_FLOAT64_FLOOR = 2.0**-20


def conclude(
    run: Mapping[str, object],
    dtype: torch.dtype,
    steps: Steps,
    sites: Mapping[Site, SiteSteps],
    unseen: tuple[str, ...],
    texts: Mapping[str, list[Tensor]],
) -> LagReport:
    """The report of a finished run.

    ``run`` holds the report's fields that say what was run, ``dtype`` is the candidate's, ``texts``
    are a list of windows of tokens (T, B) by name.
    """
    looks = steps.at_t.size * (1 + 2 * len(sites))
    floor, scale_floor = torch.finfo(dtype).eps / 2, _SCALE_FLOOR
    if dtype == torch.float64:
        floor = scale_floor = _FLOAT64_FLOOR
    logits = verdict.of_logits(steps, looks, floor)
    places = list(_places(sites, looks, floor, scale_floor))
    places.append(_place(None, "logits", logits, steps.at_t, steps.at_before))
    alarms = (steps.noise > logits.limit) & verdict.explained(steps.noise, steps.noise_before)
    return LagReport(
        **run,
        lag=_earliest(place.first_lag for place in places),
        departure=_earliest(place.first for place in places),
        lagged_steps=places[-1].counts[verdict.LAG],
        departed_steps=sum(places[-1].counts.values()),
        decidable=float(logits.decidable.mean()),
        false_alarms=float(alarms.mean()),
        limit=logits.limit,
        kl=float(steps.kl.mean()),
        kl_largest=float(steps.kl.max()),
        kl_noise=float(steps.kl_noise.mean()),
        places=tuple(places),
        unseen=unseen,
        repeats={name: repeats(_rows(windows)) for name, windows in texts.items()},
        steps=steps,
        sites={site.norm: figures for site, figures in sites.items()},
        texts={name: torch.cat(windows).cpu().numpy() for name, windows in texts.items()},
    )


def _rows(windows: list[Tensor]) -> list[list[int]]:
    return [row for window in windows for row in window.T.tolist()]


def _earliest(findings: Iterator[Finding | None]) -> Finding | None:
    """The first step; at one step, the first place in the order in which the model runs them."""
    return min((f for f in findings if f is not None), key=lambda f: f.step, default=None)


def _places(
    sites: Mapping[Site, SiteSteps], looks: int, floor: float, scale_floor: float
) -> Iterator[Place]:
    for site, figures in sites.items():
        entering = verdict.of_input(figures, looks, floor)
        yield _place(site, "input", entering, figures.input_at_t, figures.input_at_before)
        if site.outputs:
            leaving, limit = verdict.of_output(figures, looks, floor, scale_floor)
            yield _place(
                site, "output", leaving, figures.output_at_t, figures.output_at_before,
                {verdict.SCALE: figures.stale - 1, verdict.OTHER: figures.other - 1},
                figures.scale - 1,
                limit,
            )  # fmt: skip


def _place(
    site: Site | None,
    side: str,
    marks: Marks,
    at_t: np.ndarray,
    at_before: np.ndarray,
    stale: Mapping[str, np.ndarray] | None = None,
    scale: np.ndarray | None = None,
    scale_limit: float = 1.0,
) -> Place:
    """``scale``: the deviation from 1 of an output's scale; ``stale``: by kind, a late read's;
    ``scale_limit``: what rounding gives."""

    def first(*kinds: str) -> Finding | None:
        found = np.argwhere(marks.any(*kinds))
        if not len(found):
            return None
        step, row = map(int, found[0])
        kind = next(name for name in kinds if marks.kinds[name][step, row])
        distance, expected, limit = at_t[step, row], at_before[step, row], marks.limit
        if stale and kind in stale:
            distance, expected, limit = scale[step, row], stale[kind][step, row], scale_limit
        return Finding(
            step, row, kind, side, site and site.layer, site and site.norm,
            float(abs(distance)), float(limit), float(abs(expected)),
        )  # fmt: skip

    judged = marks.judged
    with np.errstate(invalid="ignore"):  # a limit of infinity: nothing was learned of the noise
        ratio = np.where(np.isfinite(at_t), at_t, np.inf)[judged] / marks.limit
    if scale is not None:
        ratio = np.fmax(ratio, np.abs(scale[judged]) / scale_limit)
    kinds = [name for name in marks.kinds if name != verdict.DEPARTS]
    return Place(
        site and site.norm,
        site and site.layer,
        side,
        {name: int(marked.sum()) for name, marked in marks.kinds.items()},
        int(marks.decidable.sum()),
        int(judged.sum()),
        marks.limit,
        float(np.max(ratio, initial=0.0)),
        first(*marks.kinds),
        first(*kinds),
        site.why if site else "",
    )
