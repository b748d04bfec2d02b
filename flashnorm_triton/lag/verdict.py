"""Which steps are lagged: where t-1 explains what rounding cannot, and t-1 can be told from t."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashnorm_triton.lag import noise
from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.steps import Steps

LAG, INPUT = "lagged logits", "lagged input"
# What a site's output is made of: its own at t-1, or (``OTHER``) the scale of the site before it.
SCALE, OTHER, OUTPUT, PRODUCT = (
    "stale scale", "scale of the site before", "stale output", "stale product",
)  # fmt: skip
DEPARTS = "departs"


@dataclass(frozen=True)
class Marks:
    """The steps (T, B) of one place that are out of what rounding does, by what explains them.

    ``limit`` is the distance beyond which rounding is no explanation; ``decidable`` (T, B) says
    where t and t-1 are further apart than twice that, so that the nearer of the two is the cause.
    ``judged`` (T, B) leaves out the steps at which nothing was compared.
    """

    kinds: dict[str, np.ndarray]
    limit: float
    decidable: np.ndarray
    judged: np.ndarray

    def any(self, *names: str) -> np.ndarray:
        """The steps marked as one of ``names``."""
        return np.logical_or.reduce([self.kinds[name] for name in names if name in self.kinds])


def explained(at_t: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Where another explanation leaves at most half of the squared distance to t.

    With rounding alone that needs t and t-1 closer together than 1.71 times the rounding; a stale
    value leaves nothing but rounding.
    """
    return np.isfinite(otherwise) & (np.square(otherwise) <= 0.5 * np.square(at_t))


def of_logits(steps: Steps, looks: int, floor: float) -> Marks:
    """The marks of the whole model's output."""
    limit = noise.limit_of_size(steps.noise, looks, floor)
    return _against_before(LAG, steps.at_t, steps.at_before, steps.moved, limit)


def of_input(steps: SiteSteps, looks: int, floor: float) -> Marks:
    """The marks of a site's input: what came before the site, attention and its cache included."""
    limit = noise.limit_of_size(steps.input_noise, looks, floor)
    return _against_before(INPUT, steps.input_at_t, steps.input_at_before, steps.input_moved, limit)


def of_output(
    steps: SiteSteps, looks: int, floor: float, scale_floor: float
) -> tuple[Marks, float]:
    """The marks of a site's output, given its input; and the limit of the scale's deviation."""
    limit = noise.limit_of_size(steps.output_noise, looks, floor)
    scale_limit = noise.limit_of_scale(steps.scale_noise, looks, scale_floor)
    at_t = _whole(steps.output_at_t)
    off, judged = at_t > limit, ~np.isnan(steps.input_moved)
    scale = _whole(steps.scale) - 1
    scaled = np.abs(scale) > scale_limit
    # What is left once the scale is right: at a right angle to v, so squares subtract.
    known = np.isfinite(scale)
    rest = np.square(np.where(known, at_t, np.inf)) - np.square(np.where(known, scale, 0))
    distances, fits = {}, {}
    for name, would_be in ((SCALE, steps.stale), (OTHER, steps.other)):
        short = np.where(known, scale + 1, np.inf) - would_be
        distances[name] = np.sqrt(np.maximum(rest, 0) + np.square(short))
        # One number may be near another by chance: here all the rest must be rounding.
        near = (rest <= limit**2) & (np.abs(short) <= scale_limit * would_be)
        fits[name] = scaled & near & explained(np.abs(scale), np.abs(short))
    for name, distance in ((OUTPUT, steps.output_at_before), (PRODUCT, steps.output_mixed)):
        distances[name] = _whole(distance)
        fits[name] = off & explained(at_t, distances[name])
    unexplained = (off | scaled) & ~_any(fits)
    for name in (OTHER, SCALE):
        if fits[name].sum() < unexplained.sum():
            # A scale that is mostly wrong in some other way meets one of these now and then.
            fits[name] &= False
    nearest = np.min([np.where(fits[name], distances[name], np.inf) for name in fits], axis=0)
    kinds = {name: fits[name] & (distances[name] == nearest) for name in fits}
    kinds[OTHER] &= ~kinds[SCALE]
    kinds[DEPARTS] = (off | scaled) & ~_any(fits)
    told_apart = (np.abs(steps.stale - 1) > 2 * scale_limit) | (steps.output_moved > 2 * limit)
    return Marks(
        {k: v & judged for k, v in kinds.items()}, limit, told_apart & judged, judged
    ), scale_limit


def _against_before(
    kind: str, at_t: np.ndarray, at_before: np.ndarray, moved: np.ndarray, limit: float
) -> Marks:
    judged = ~np.isnan(moved)
    off = (_whole(at_t) > limit) & judged
    lagged = off & explained(_whole(at_t), _whole(at_before))
    return Marks(
        {kind: lagged, DEPARTS: off & ~lagged}, limit, (moved > 2 * limit) & judged, judged
    )


def _any(marked: dict[str, np.ndarray]) -> np.ndarray:
    return np.logical_or.reduce(list(marked.values()))


def _whole(values: np.ndarray) -> np.ndarray:
    """A distance to something that is not a number is infinite."""
    return np.where(np.isfinite(values), values, np.inf)
