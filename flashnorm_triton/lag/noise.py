"""What rounding alone does, and the limits beyond which it is no explanation."""

from __future__ import annotations

import math

import numpy as np

# The numerics contract of this package: a patched module may err 1.25 times as much as stock.
CONTRACT = 1.25
# False alarms that a whole run of clean steps may be expected to give.
EXPECTED_ALARMS = 1e-3


def limit_of_size(noise: np.ndarray, looks: int, floor: float) -> float:
    """The largest distance that rounding explains, from the stock model's own distances.

    These (any shape) are near log-normal: their logarithms' mean and spread give the size that
    ``looks`` comparisons stay under but for ``EXPECTED_ALARMS`` of them; the largest one seen
    counts too, as a heavier tail shows there first. Times the contract's allowance. Where nothing
    was rounded (rows of zeros) nothing is learned. ``floor`` is a distance below which nobody is
    blamed: the reference rounds as well.
    """
    seen = noise[np.isfinite(noise)].ravel()
    if not seen.size:
        return math.inf
    logs = np.log(seen[seen > 0])
    if not logs.size:
        return floor
    tail = math.exp(logs.mean() + quantile(looks) * logs.std())
    return max(CONTRACT * max(tail, float(seen.max())), floor)


def limit_of_scale(noise: np.ndarray, looks: int, floor: float) -> float:
    """The largest deviation of a scale from 1 that rounding explains, from stock's own: a mean over
    many elements, so Gaussian; otherwise as ``limit_of_size``."""
    seen = np.abs(noise[np.isfinite(noise)].ravel())
    if not seen.size:
        return math.inf
    tail = quantile(looks) * float(np.sqrt(np.mean(np.square(seen))))
    return max(CONTRACT * max(tail, float(seen.max())), floor)


def quantile(looks: int) -> float:
    """The standard deviations that a Gaussian passes ``EXPECTED_ALARMS`` times in ``looks``."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(1 - EXPECTED_ALARMS / max(looks, 1))
