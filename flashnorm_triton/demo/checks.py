"""One measured value against its limit: what decides the demo's exit code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``value`` and ``limit`` are texts for the table; ``passed`` is the decision."""

    name: str
    value: str
    limit: str
    passed: bool


def at_most(name: str, value: float, limit: float, form: str = ".3f") -> Check:
    """Passes when value <= limit; NaN fails."""
    return Check(name, format(value, form), f"≤ {limit:{form}}", value <= limit)


def at_least(name: str, value: float, limit: float, form: str = ".3f") -> Check:
    """Passes when value >= limit; NaN fails."""
    return Check(name, format(value, form), f"≥ {limit:{form}}", value >= limit)
