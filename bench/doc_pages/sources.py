"""Result files as a page cites them: where they are, and whether the kernels have changed since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnorm_triton import results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
OLDER = "older than the kernels"


@dataclass(frozen=True)
class Source:
    """One committed result file: header, records, and its path."""

    path: Path
    header: Mapping[str, Any]
    records: tuple[dict[str, Any], ...]

    @property
    def older(self) -> bool:
        """Whether other kernel sources than those here made it (False where none are named)."""
        made_with = self.header.get("kernel_hash")
        return made_with is not None and made_with != results.kernel_hash()

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The records that hold a measurement."""
        return measured(self.records)

    def cite(self, page: Path) -> str:
        """A link to the file from ``page``, with a word where it is older than the kernels."""
        up = "../" * len(page.resolve().relative_to(ROOT).parent.parts)
        link = f"[{self.path.name}]({up}{self.path.resolve().relative_to(ROOT).as_posix()})"
        return f"{link}, {OLDER}" if self.older else link


def measured(records: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The records that hold a measurement."""
    return [record for record in records if not record.get("error")]


def read(path: Path) -> Source:
    """A result file; tries of one day, which have a header of their own, are read as they are."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "kernel_hash" in data:
        loaded = results.load(path)
        return Source(path, loaded.header, loaded.records)
    records = data.pop("records")
    return Source(path, data, tuple(records))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; an empty cell is left without a space of its own."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
