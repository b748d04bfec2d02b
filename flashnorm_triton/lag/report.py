"""What find_lag returns: findings, places, and every step's figures; as a text, table or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.repeats import Repeats
from flashnorm_triton.lag.steps import Steps

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """One place that is off at one step: what explains it, how far it is, and from what distance on
    rounding is no explanation. For a stale scale ``distance`` is that of the scale from 1, and
    ``expected`` what the scale of t-1 makes of it. ``layer`` and ``site`` are None for logits;
    ``side`` is "logits", "input" or "output"."""

    step: int
    row: int
    kind: str
    side: str
    layer: int | None
    site: str | None
    distance: float
    limit: float
    expected: float | None = None

    def __str__(self) -> str:
        where = "logits" if self.site is None else f"{self.side} of {self.site}"
        told = f"step {self.step}, row {self.row}, {where}: {self.kind}, {self.distance:.3g} away"
        if self.expected is not None:
            told += f" ({abs(self.expected):.3g} is what t-1 gives)"
        return f"{told}; rounding explains {self.limit:.3g}"


@dataclass(frozen=True)
class Place:
    """All steps of one place: how many are of which kind, how many could be decided, of all that
    were judged, the largest distance over the limit, the first step that was off, and the first
    that t-1 explains. ``why`` says what was not compared."""

    site: str | None
    layer: int | None
    side: str
    counts: dict[str, int]
    decidable: int
    judged: int
    limit: float
    worst: float
    first: Finding | None = None
    first_lag: Finding | None = None
    why: str = ""


@dataclass(frozen=True)
class LagReport:
    """What a run of ``find_lag`` found.

    ``lag`` is the first step (then the first site in the model's order) that t-1 explains and
    rounding does not; ``departure`` the first that is beyond rounding, whatever explains it.
    ``false_alarms`` is the share of the control's steps (stock in its own dtype) that the very test
    calls lagged. ``decidable`` is the share of steps at which a lag would show in the logits.
    """

    model: str
    mode: str
    dtype: str
    reference: str
    tokens: int
    batch: int
    prompt: int
    lag: Finding | None
    departure: Finding | None
    lagged_steps: int
    departed_steps: int
    decidable: float
    false_alarms: float
    limit: float
    kl: float
    kl_largest: float
    kl_noise: float
    places: tuple[Place, ...]
    unseen: tuple[str, ...]
    repeats: dict[str, Repeats]
    steps: Steps = field(repr=False)
    sites: dict[str, SiteSteps] = field(repr=False)
    texts: dict[str, np.ndarray] = field(repr=False)

    @property
    def clean(self) -> bool:
        """Whether nothing was beyond rounding."""
        return self.departure is None

    def summary(self) -> str:
        """What was run and what came of it, in a few lines."""
        lines = [
            f"{self.model} ({self.dtype}, {self.mode}): {self.tokens} tokens in {self.batch} rows, "
            f"against stock in {self.reference}",
            f"logits: {self.lagged_steps} steps lagged, {self.departed_steps} beyond rounding "
            f"(limit {self.limit:.3g}); a lag would show at {self.decidable:.1%} of the steps; "
            f"the test calls {self.false_alarms:.2%} of stock's own steps lagged",
            f"KL to the reference, nats a step: {self.kl:.2e} (stock {self.kl_noise:.2e}), "
            f"largest {self.kl_largest:.2e}",
        ]
        for name, figures in self.repeats.items():
            rates = ", ".join(f"{n}: {rate:.3f}" for n, rate in figures.distinct.items())
            lines.append(
                f"{name} text: distinct n-grams {rates}; longest repetition {figures.longest_run} "
                f"tokens; {figures.doubled:.1%} of the tokens doubled"
            )
        if self.lag is not None:
            lines.append(f"LAG, first at {self.lag}")
        if self.departure is not None and self.departure != self.lag:
            lines.append(f"BEYOND ROUNDING, first at {self.departure}")
        if self.clean:
            lines.append("no lag, nothing beyond rounding")
        return "\n".join(lines)

    def to_dict(self, series: bool = False) -> dict[str, Any]:
        """As plain JSON types; with ``series``, the figures of every step as well."""
        told = {
            name: getattr(self, name)
            for name in (
                "model", "mode", "dtype", "reference", "tokens", "batch", "prompt", "clean",
                "lagged_steps", "departed_steps", "decidable", "false_alarms", "limit", "kl",
                "kl_largest", "kl_noise",
            )
        }  # fmt: skip
        told["lag"] = None if self.lag is None else asdict(self.lag)
        told["departure"] = None if self.departure is None else asdict(self.departure)
        told["places"] = [asdict(place) for place in self.places]
        told["unseen"] = list(self.unseen)
        told["repeats"] = {name: figures.to_dict() for name, figures in self.repeats.items()}
        if series:
            told["steps"] = {n: np.round(a, 9).tolist() for n, a in vars(self.steps).items()}
        return _finite(told)

    def to_json(self, series: bool = False, indent: int | None = 2) -> str:
        """``to_dict`` as a text; infinite and missing values are null."""
        return json.dumps(self.to_dict(series), indent=indent, allow_nan=False)

    def table(self) -> Table:
        """A row a place that is off, and one for all the others."""
        from rich.table import Table

        table = Table(title="Steps beyond rounding, by place")
        for heading in ("place", "side", "steps", "t-1 would show", "worst / limit", "found"):
            table.add_column(heading, overflow="fold")
        clean = [place for place in self.places if place.first is None and place.judged]
        for place in self.places:
            if place not in clean:
                table.add_row(*_row(place))
        if clean:
            steps = sum(place.judged for place in clean)
            shown = sum(place.decidable for place in clean) / steps
            worst = max(place.worst for place in clean)
            what = f"{len(clean)} places" if len(clean) > 1 else clean[0].site or "logits"
            end = (f"{shown:.1%}", f"{worst:.2f}", "[green]nothing[/green]")
            table.add_row(what, "", f"{steps:,}", *end)
        return table


def _row(place: Place) -> tuple[str, ...]:
    if not place.judged:
        return place.site or "logits", place.side, "0", "", "", place.why
    found = ", ".join(f"{n:,} {kind}" for kind, n in place.counts.items() if n)
    return (
        place.site or "logits",
        place.side,
        f"{place.judged:,}",
        f"{place.decidable / place.judged:.1%}",
        f"{place.worst:.2f}",
        f"[red]{found}; first at step {place.first.step}[/red]",
    )


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
