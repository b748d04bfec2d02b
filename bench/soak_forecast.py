"""How long each family of a soak will take, by how it went before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnorm_triton import results

_SETUP_S = 3.0  # of a family's members, where a file does not tell


@dataclass(frozen=True)
class Past:
    """How a family went before, with whatever kernels: its launches, and what they took."""

    launches: int
    goal: int
    seconds: float
    setup_seconds: float

    @property
    def short(self) -> bool:
        """Whether it ran out of time."""
        return self.launches < self.goal

    def needs(self, launches: int) -> float:
        """Seconds that so many launches will take, the members' setup included."""
        if not self.launches or launches <= 0:
            return 0.0
        return self.setup_seconds + launches * self.seconds / self.launches


def past(path: Path) -> dict[str, Past]:
    """Every family of a result file as it went then; none where there is no such file."""
    try:
        records = results.load(path).records
    except results.ResultsError:
        return {}
    return {
        record["family"]: Past(
            record["launches"],
            record["goal_launches"],
            record["seconds"],
            record.get("setup_seconds", _SETUP_S),
        )
        for record in records
    }


def short_first(families: Mapping[str, Any], before: Mapping[str, Past]) -> dict[str, Any]:
    """The families, those first that ran out of time before."""
    late = {name for name, went in before.items() if went.short}
    return dict(sorted(families.items(), key=lambda item: item[0] not in late))


def listing(path: Path, wanted: int) -> str:
    """What the next run will do, by the last one's file: launches still to make, and seconds."""
    try:
        loaded = results.load(path)
    except results.ResultsError as error:
        return f"no earlier run: {error}"
    current = loaded.header["kernel_hash"] == results.kernel_hash()
    before = short_first(past(path), past(path))
    failed = {r["family"] for r in loaded.records if r.get("error") or r["mismatches"]}
    width = max((len(name) for name in before), default=10)
    lines = [f"{'family':<{width}} {'launches':>10} {'to make':>10} {'seconds':>8}"]
    total = 0.0
    for name, went in before.items():
        made = went.launches if current and name not in failed else 0
        left = max(0, wanted - made)
        total += went.needs(left)
        lines.append(f"{name:<{width}} {made:>10,} {left:>10,} {went.needs(left):>8.1f}")
    if not current:
        lines.append("the file is of other kernels: its rates hold about, its counts do not")
    lines.append(f"in all about {total:.0f} s of {loaded.header['gpu']}, compiling not included")
    return "\n".join(lines)
