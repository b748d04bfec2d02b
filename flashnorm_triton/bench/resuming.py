"""Going on with a result file: what it has is kept where this run would measure the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashnorm_triton import results
from flashnorm_triton.bench import report

# Figures of two runs may stand side by side where all of these, and the settings, are the same.
SAME = ("gpu", "torch", "triton", "transformers", "driver", "kernel_hash")
_RATES = ("copy_tb_s", "matmul_tflops")


@dataclass
class Kept:
    """The records of one file while it is measured: those it had, and those that come.

    ``save`` writes all of them and tells the display.
    """

    path: Path
    head: dict[str, Any]
    before: tuple[dict[str, Any], ...] = ()
    new: list[dict[str, Any]] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [*self.before, *self.new]

    def has(self, **fields: Hashable) -> bool:
        """Whether a record with these values was there before this run."""
        return any(fields.items() <= _flat(record).items() for record in self.before)

    def forget(self, **fields: Hashable) -> None:
        """Leave out the records of before with these values: they are measured again."""
        self.before = tuple(r for r in self.before if not fields.items() <= _flat(r).items())

    def save(self, more: Sequence[Mapping[str, Any]] = (), **head: Any) -> None:
        """Add records and write the file; ``head``: further fields of its header."""
        self.new += [dict(record) for record in more]
        results.save(self.path, {**self.head, **head}, self.records)
        report.found(self.records)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if isinstance(value, Hashable)}


def begin(
    path: Path,
    head: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    resume: bool,
    log: Callable[[str], None],
) -> Kept:
    """The file of a run: empty, or with ``resume`` going on from the measured records of ``path``.

    ``settings`` are what shapes a record beside its cell (rounds, baselines, …); they go into the
    header. A file of another GPU, version or setting, or one that cannot be read, is set aside with
    a line that says why; nothing is lost. Without ``resume`` the file is written anew.
    """
    head = {**head, "settings": dict(settings)}
    if not resume or not path.exists():
        return Kept(path, head)
    try:
        found = results.load(path)
        why = _difference(found.header, head)
    except results.ResultsError as error:
        why = str(error)
    if why:
        log(f"{path.name}: {why}; kept as {set_aside(path).name}")
        return Kept(path, head)
    # Its floors were computed with its rates.
    head |= {name: found.header[name] for name in _RATES}
    before = tuple(report.measured(found.records))
    log(f"{path.name}: {len(before)} records are there and are kept")
    return Kept(path, head, before)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    for name in SAME:
        if old[name] != new[name]:
            return f"it is of {name} {old[name]}, this is {new[name]}"
    before, now = old.get("settings"), new["settings"]
    if before is None:
        return "it does not say with which settings it was measured"
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            return f"it is of {name} = {before.get(name)}, this is {now.get(name)}"
    return None


def set_aside(path: Path) -> Path:
    """Rename a file so that it is no result file of its folder any more; its new path."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    number, target = 0, path.with_name(f"{path.name}.{stamp}.old")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{stamp}-{number}.old")
    return path.rename(target)
