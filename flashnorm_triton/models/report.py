"""What an audit says: one frozen record per norm, and the ways to print them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SiteReport:
    """One norm of a model: what it is, who reads it, what is done about it and why.

    ``kind`` is "rms", "layer" or "other"; ``convention`` "w", "1+w" or "none"; ``decision`` "fuse"
    or "keep". ``launches_saved`` counts kernel launches in one eager decode step.
    """

    norm: str
    norm_class: str
    kind: str
    convention: str
    eps: float | None
    consumers: tuple[str, ...]
    decision: str
    reason: str
    launches_saved: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return {
            "norm": self.norm,
            "norm_class": self.norm_class,
            "kind": self.kind,
            "convention": self.convention,
            "eps": self.eps,
            "consumers": list(self.consumers),
            "decision": self.decision,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class AuditReport:
    """All norms of one model, in the order of its modules."""

    model_class: str
    sites: tuple[SiteReport, ...]

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """The sites that are (or would be) fused."""
        return tuple(site for site in self.sites if site.decision == "fuse")

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The norms that are left as they are."""
        return tuple(site for site in self.sites if site.decision == "keep")

    @property
    def launches_saved(self) -> int:
        """Kernel launches saved in one eager decode step."""
        return sum(site.launches_saved for site in self.fused)

    def summary(self) -> str:
        """One line: norms, sites, launches saved in a decode step."""
        return (
            f"{self.model_class}: {len(self.sites)} norms, {len(self.fused)} fused, "
            f"{len(self.kept)} kept; {self.launches_saved} kernel launches saved per decode step"
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain JSON types."""
        return {
            "model_class": self.model_class,
            "norms": len(self.sites),
            "fused": len(self.fused),
            "launches_saved": self.launches_saved,
            "sites": [site.to_dict() for site in self.sites],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The whole report as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self) -> Table:
        """A rich table, one row for all the layers that are alike."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.summary())
        for heading in ("norm", "class", "gain", "eps", "feeds", "decision", "reason"):
            table.add_column(heading, overflow="fold")
        for group in _alike(self.sites):
            site = group[0]
            feeds = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in site.consumers))
            table.add_row(
                _numbered([s.norm for s in group]),
                site.norm_class,
                site.convention,
                "" if site.eps is None else f"{site.eps:g}",
                feeds,
                f"[green]{site.decision}[/green]" if site.decision == "fuse" else site.decision,
                escape(_starred(site.reason) if len(group) > 1 else site.reason),
            )
        return table


def _starred(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _alike(sites: tuple[SiteReport, ...]) -> list[list[SiteReport]]:
    groups: dict[Any, list[SiteReport]] = {}
    for site in sites:
        key = (
            _starred(site.norm),
            site.norm_class,
            site.convention,
            site.eps,
            site.decision,
            _starred(site.reason),
            tuple(_starred(name) for name in site.consumers),
        )
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def _numbered(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{_starred(names[0])} ({len(names)})"
