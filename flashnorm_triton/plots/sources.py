"""What is drawn: result files and tuned tables, read, told apart, and compared with the kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnorm_triton import results, tables
from flashnorm_triton.results import ResultsError

SHIPPED = "shipped"
# The key by which records of a kind are told, the most special first. A lag run draws its own
# figure while it has the steps; the other kinds without a figure are tables of words and counts.
_KINDS = (
    ("call", ""),
    ("family", ""),
    ("patching", ""),
    ("fault", ""),
    ("lag", ""),
    ("rung", "ablation"),
    ("paper_us", "paper"),
    ("quantization", "profile"),
    ("norm_share", "profile"),
    ("groups", "profile"),
    ("over", "overlap"),
    ("op", "operation"),
    ("tokens", "step"),
    ("mode", "generate"),
)


@dataclass(frozen=True)
class Source:
    """A file to draw. ``kind`` says which figures fit, or "" where none does; ``name`` is its
    figures' name; ``stale``: measured with other kernels than this package has. ``digest`` is the
    start of the file's SHA-256."""

    name: str
    kind: str
    header: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    stale: bool = False
    path: Path | None = None
    digest: str = ""

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The records that hold a figure."""
        return [record for record in self.records if not record.get("error")]

    @property
    def gpu(self) -> str:
        return self.header["gpu"]


def of_results(loaded: results.Results, path: Path, digest: str = "") -> Source:
    """A source of a read result file."""
    kind = next((kind for key, kind in _KINDS if any(key in r for r in loaded.records)), "")
    stale = loaded.header["kernel_hash"] != results.kernel_hash()
    return Source(path.stem, kind, loaded.header, loaded.records, stale, path, digest)


def of_table(table: tables.Table, path: Path, digest: str = "") -> Source:
    """A source of a tuned table: a record a cell, its speedup over the unfused pair."""
    if not table.entries:
        raise ResultsError(f"{path}: the table has no entry to draw: run flashnorm tune")
    ours = results.kernel_hash()
    newest = max((entry.run for entry in table.entries.values()), key=lambda run: run.date)
    records = [
        {
            **vars(key),
            "case": "",
            "plan": entry.plan.as_dict(),
            "us": entry.us,
            "baselines_us": {"unfused": entry.baseline_us},
            "speedup": entry.baseline_us / entry.us,
        }
        for key, entry in table.entries.items()
    ]
    header = {
        "gpu": table.gpu.name,
        "torch": newest.torch,
        "triton": newest.triton,
        "transformers": "not used",
        "date": newest.date,
        "kernel_hash": newest.kernel_hash,
    }
    stale = any(entry.run.kernel_hash != ours for entry in table.entries.values())
    return Source(f"table_{path.stem}", "table", header, records, stale, path, digest)


def read(path: Path) -> Source:
    """One file. Raises ``ResultsError`` that names it: unreadable, foreign, of another schema."""
    try:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        data = json.loads(content)
    except OSError as error:
        raise ResultsError(f"cannot read the results {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not a result file: not JSON ({error})") from error
    if isinstance(data, dict) and "entries" in data and "sm_count" in data:
        try:
            return of_table(tables.read(path), path, digest)
        except tables.TableError as error:
            raise ResultsError(str(error)) from error
    loaded = results.load(path)
    if not loaded.records:
        raise ResultsError(f"{path} holds no record: the run that wrote it measured nothing")
    return of_results(loaded, path, digest)


def shipped() -> list[Path]:
    """The folders of the results that come with the package.

    Raises ``ResultsError`` where it came without.
    """
    root = results.shipped_folder()
    if root is None:
        raise ResultsError("this installation came without results: name files of your own")
    return sorted({path.parent for path in root.glob("*/*.json")})


def gather(paths: Iterable[str | Path]) -> tuple[list[list[Source]], list[str]]:
    """The sources in groups that overlay, and a line on every file that was passed over.

    Folders are read one level deep: their files overlay by name, and one that cannot be drawn is
    passed over (of the shipped ones, silently). Files that are named one by one overlay by kind,
    and must be drawable.
    """
    given = list(paths) or [SHIPPED]
    ours = shipped() if SHIPPED in given else []
    places = [place for one in given for place in (ours if one == SHIPPED else [Path(one)])]
    by_name = any(place.is_dir() for place in places)
    found: list[Source] = []
    notes: list[str] = []
    without: list[str] = []
    for place in places:
        if not place.is_dir():
            source = read(place)
            if not source.kind:
                raise ResultsError(f"{place}: there is no figure for records of this kind")
            found.append(source)
            continue
        inside = sorted(place.glob("*.json"))
        if not inside:
            raise ResultsError(f"{place} has no result file (*.json): name the folder of one GPU")
        for path in inside:
            try:
                source = read(path)
            except ResultsError as error:
                if place not in ours:
                    notes.append(f"passed over: {str(error).partition(': it needs')[0]}")
                continue
            if source.kind:
                found.append(source)
            elif place not in ours:
                without.append(path.name)
    if without:
        notes.append(f"no figure shows: {', '.join(without)}")
    if not found:
        raise ResultsError("nothing to draw:\n  " + "\n  ".join(notes))
    groups: dict[tuple[str, str], list[Source]] = {}
    for source in found:
        groups.setdefault((source.kind, source.name if by_name else ""), []).append(source)
    return list(groups.values()), notes


def labels(sources: Sequence[Source]) -> list[str]:
    """What tells the sources apart in a legend: the GPU; where it does not, also the date and
    the kernels, then the file's folder."""
    for told in (
        lambda s: s.gpu,
        lambda s: f"{s.gpu}, {s.name}",
        lambda s: f"{s.gpu}, {s.header['date'][:10]}, kernels {s.header['kernel_hash'][:8]}",
    ):
        names = [told(source) for source in sources]
        if len(set(names)) == len(names):
            return names
    return [f"{source.gpu}, {source.path}" for source in sources]


def stale_notes(groups: Iterable[Sequence[Source]]) -> list[str]:
    """A line on every source that was measured with other kernels than this package has."""
    ours = results.kernel_hash()[:8]
    return [
        f"stale: {source.path} was measured with kernels {source.header['kernel_hash'][:8]}, this "
        f"package has {ours}: run it again for today's figures"
        for group in groups
        for source in group
        if source.stale
    ]
