"""What an audit says: one frozen record per norm, and the ways to print them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

    from flashnorm_triton.models.block.spec import BlockSpec

BLOCK = "block"
_Record = TypeVar("_Record")

_DECISIONS = {
    "fuse": "fused",
    "cancel": "dropped",
    "partial": "dropped in part",
    "norm_only": "as one launch each",
    "keep": "kept",
}


@dataclass(frozen=True)
class SiteReport:
    """One norm of a model: what it is, who reads it, what is done about it and why.

    ``kind`` is "rms", "layer", "dyt" or "other"; ``convention`` "w", "1+w" or "none"; ``eps`` None
    where there is none. ``consumers`` are the modules whose parameters read the norm's output, and
    ``consumer_kinds`` what each is: "linear", "conv1d", "router" (a 2-D weight used in the module's
    own code), "experts" (3-D weights) or "foreign" (quantized, LoRA, sharded, ...).

    ``decision`` is "fuse" (norm and consumers become one), "norm_only" (the norm alone becomes one
    launch), "keep", or what a later pass makes of it: "cancel", "partial". ``form`` says how a site
    is fused: "packed" (the norm's module emits the packed output of all consumers), "passthrough"
    (it returns its input, each consumer normalises for itself) or "experts" (as passthrough, for
    a router and experts); "" where nothing can be fused. A "keep" with a form could be fused (and
    is, in a checkpoint), but would save no launch. ``foldable`` is False where the gain must be
    applied in the kernel, as a weight is shared with another module. ``returned_as`` are the names
    under which the norm's output also leaves a module of the model (``last_hidden_state``, ...),
    ``outputs`` those that it has in what the whole model returns.
    ``launches_saved`` counts kernel launches in one eager decode step.
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
    consumer_kinds: tuple[str, ...] = ()
    form: str = ""
    foldable: bool = True
    returned_as: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

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
class BlockReport:
    """One layer with a fused norm before its attention and one before its MLP.

    ``level`` is "block" where it runs as a whole, with ``launches_saved`` beside what its norms
    save in an eager decode step, or "norm"; ``reason`` says why. ``spec``: what was proven of it.
    """

    layer: str
    level: str
    reason: str
    launches_saved: int = 0
    spec: BlockSpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return {
            "layer": self.layer,
            "level": self.level,
            "reason": self.reason,
            "launches_saved": self.launches_saved,
        }


@dataclass(frozen=True)
class AuditReport:
    """All norms of one model, in the order of its modules, and its layers (``blocks``)."""

    model_class: str
    sites: tuple[SiteReport, ...]
    blocks: tuple[BlockReport, ...] = ()

    def decided(self, *decisions: str) -> tuple[SiteReport, ...]:
        """The sites with one of these decisions."""
        return tuple(site for site in self.sites if site.decision in decisions)

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """The sites that are (or would be) fused."""
        return self.decided("fuse")

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The norms that are left as they are."""
        return self.decided("keep")

    @property
    def launches_saved(self) -> int:
        """Kernel launches that the norms save in one eager decode step."""
        return sum(site.launches_saved for site in self.sites)

    @property
    def launches_saved_by_blocks(self) -> int:
        """Kernel launches that layers which run as whole blocks save beside that."""
        return sum(block.launches_saved for block in self.blocks)

    def summary(self) -> str:
        """One line: norms, sites, layers, launches saved in a decode step."""
        counts = {name: len(self.decided(name)) for name in _DECISIONS}
        told = [
            f"{count} {_DECISIONS[name]}"
            for name, count in counts.items()
            if count or name in ("fuse", "keep")
        ]
        text = (
            f"{self.model_class}: {len(self.sites)} norms, {', '.join(told)}; "
            f"{self.launches_saved} kernel launches saved per decode step"
        )
        if not self.blocks:
            return text
        whole = sum(block.level == BLOCK for block in self.blocks)
        more = f", {self.launches_saved_by_blocks} launches fewer again" if whole else ""
        return f"{text}; {whole} of {len(self.blocks)} layers run as whole blocks{more}"

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain JSON types."""
        return {
            "model_class": self.model_class,
            "norms": len(self.sites),
            "fused": len(self.fused),
            "decisions": {name: len(self.decided(name)) for name in _DECISIONS},
            "launches_saved": self.launches_saved,
            "launches_saved_by_blocks": self.launches_saved_by_blocks,
            "sites": [site.to_dict() for site in self.sites],
            "layers": [block.to_dict() for block in self.blocks],
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
        for group in _grouped(self.sites, _kind):
            site = group[0]
            feeds = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in site.consumers))
            table.add_row(
                _numbered([s.norm for s in group]),
                site.norm_class,
                site.convention,
                "" if site.eps is None else f"{site.eps:g}",
                feeds,
                site.decision if site.decision == "keep" else f"[green]{site.decision}[/green]",
                escape(_starred(site.reason) if len(group) > 1 else site.reason),
            )
        for blocks in _grouped(self.blocks, lambda b: (b.level, _starred(b.reason))):
            name = _numbered([block.layer for block in blocks], ": the whole layer")
            level = blocks[0].level
            told = f"[green]{level}[/green]" if level == BLOCK else level
            reason = blocks[0].reason
            reason = _starred(reason) if len(blocks) > 1 else reason
            table.add_row(name, "", "", "", "", told, escape(reason))
        return table


def _starred(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _kind(site: SiteReport) -> Any:
    return (
        _starred(site.norm),
        site.norm_class,
        site.convention,
        site.eps,
        site.decision,
        _starred(site.reason),
        tuple(_starred(name) for name in site.consumers),
    )


def _grouped(records: Iterable[_Record], kind: Callable[[_Record], Any]) -> list[list[_Record]]:
    groups: dict[Any, list[_Record]] = {}
    for record in records:
        groups.setdefault(kind(record), []).append(record)
    return list(groups.values())


def _numbered(names: list[str], what: str = "") -> str:
    if len(names) == 1:
        return f"{names[0]}{what}"
    return f"{re.sub(r'(?<=[.])[0-9]+$', '*', _starred(names[0]))}{what} ({len(names)})"
