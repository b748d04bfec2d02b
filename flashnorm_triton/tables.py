"""Tuned plans: their JSON file, and the lookup that every prepared problem makes once.

A table belongs to one GPU model: exact name and number of multiprocessors. Lookup order: the
user's table, the shipped table of exactly this GPU, shipped tables of the same compute capability,
the heuristic. A lookup reads files once a process, never writes, tunes, raises or blocks: a file
that cannot be used is passed over with one warning. Writing (the tuner) is atomic and under a lock;
what was unreadable is set aside then, never deleted.

An entry's key leaves out what does not move the best plan: a bias (one load a column, after the
loop) and alignment (a plan that needs more than a problem has is passed over). A table made with
other kernel sources serves on; ``flashnorm info`` calls it stale. A file has the lowest schema that
holds it: 1 where every entry is plain, 2 with epilogues.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnorm_triton import atomic, plans
from flashnorm_triton.limits import plan_from, unfit
from flashnorm_triton.plans import Device, Plan, Problem

SCHEMA = 2
SHIPPED = Path(__file__).resolve().parent / "configs"
LOCK_SECONDS = 30.0
_OFF = ("off", "0", "no", "false")


class TableError(ValueError):
    """A table's file cannot be used or written; the message says why and what to do."""


class Unreadable(TableError):
    """Not a table: corrupt, truncated, or fields that are no table's."""


class NewerSchema(TableError):
    """Written by a newer version of this package."""


class OtherGpu(TableError):
    """A table of another GPU model."""


@dataclass(frozen=True)
class Gpu:
    """Identity of a GPU model: exact name, multiprocessors, and its compute capability (or 0)."""

    name: str
    sm_count: int
    capability: int = 0

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_") or "gpu"


@dataclass(frozen=True)
class Key:
    """What the best plan depends on; ``m`` is the bucket of the row count (``plans.bucket``),
    ``epilogue`` what follows the linear (``Problem.epilogue``; "" for nothing)."""

    op: str
    dtype: str
    n: int
    k: int
    m: int
    has_gain: bool = False
    epilogue: str = ""


@dataclass(frozen=True)
class Run:
    """With what an entry was measured. ``date`` is UTC; ``effort`` "quick" or "full"."""

    date: str
    torch: str
    triton: str
    kernel_hash: str
    effort: str


@dataclass(frozen=True)
class Entry:
    """One cell's best plan: microseconds a call beside those of the unfused pair and of the
    heuristic's plan in the same interleaved run; relative errors against float64, ours and the
    stock modules'."""

    plan: Plan
    us: float
    baseline_us: float
    heuristic_us: float
    rel_err: float
    rel_err_stock: float
    run: Run


@dataclass
class Table:
    """The plans of one GPU model. ``refused``: plans that must not be tried again, and why."""

    gpu: Gpu
    entries: dict[Key, Entry] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A looked-up plan: ``source`` is "user", "shipped", "capability" or "heuristic"."""

    plan: Plan
    source: str
    reason: str
    path: Path | None = None
    entry: Entry | None = None


def key_of(problem: Problem) -> Key:
    """The table key of a norm_linear problem."""
    m, epilogue = plans.bucket(problem.m), problem.epilogue
    return Key("norm_linear", problem.dtype, problem.n, problem.k, m, problem.has_gain, epilogue)


# Files ---------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where the user's tables live: $FLASHNORM_CACHE_DIR, else the XDG cache folder's own part.

    Raises TableError where no home folder is known.
    """
    if chosen := os.environ.get("FLASHNORM_CACHE_DIR"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "flashnorm_triton"
    try:
        return Path.home() / ".cache" / "flashnorm_triton"
    except RuntimeError as error:
        raise TableError(f"no home folder ({error}): set FLASHNORM_CACHE_DIR") from error


def user_path(gpu: Gpu) -> Path:
    """The file of the user's own table of a GPU model."""
    return cache_dir() / f"{gpu.slug}-{gpu.sm_count}.json"


def dump(table: Table) -> str:
    """The table as JSON text, one entry a line, sorted, so that two versions compare well."""
    measured = {entry.run for entry in table.entries.values()}
    runs = sorted(measured, key=lambda run: tuple(vars(run).values()))
    head = {
        "schema": 2 if any(key.epilogue for key in table.entries) else 1,
        "gpu": table.gpu.name,
        "sm_count": table.gpu.sm_count,
        "capability": table.gpu.capability,
        "runs": [vars(run) for run in runs],
        "refused": table.refused,
    }
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "entries": [']
    rows = []
    for key in sorted(table.entries, key=lambda key: tuple(vars(key).values())):
        entry = table.entries[key]
        row = {**vars(key), **vars(entry)}
        if not key.epilogue:
            del row["epilogue"]
        row |= {"plan": entry.plan.as_dict(), "run": runs.index(entry.run)}
        rows.append("  " + json.dumps(row, allow_nan=False))
    return "\n".join([*lines, ",\n".join(rows), " ]", "}"]) + "\n"


def parse(text: str) -> Table:
    """The table that ``dump`` wrote.

    An entry whose plan no longer exists is left out. Raises Unreadable or NewerSchema.
    """
    try:
        data = json.loads(text)
        schema = data["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise NewerSchema(f"schema {schema} is newer than {SCHEMA}: update flashnorm_triton")
        if schema not in (1, 2) or isinstance(schema, bool):
            raise Unreadable(f"schema {schema!r} is none of 1 to {SCHEMA}")
        table = Table(Gpu(*_typed(data, {"gpu": str, "sm_count": int, "capability": int})))
        runs = [Run(**_texts(run)) for run in data["runs"]]
        table.refused = _texts(data["refused"])
        for row in data["entries"]:
            key, entry = _entry(row, runs)
            if entry is not None:
                table.entries[key] = entry
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, TableError):
            raise
        raise Unreadable(f"not a table ({type(error).__name__}: {error})") from error
    return table


_KEY_TYPES = {"op": str, "dtype": str, "n": int, "k": int, "m": int, "has_gain": bool,
              "epilogue": str}  # fmt: skip
_FIGURES = ("us", "baseline_us", "heuristic_us", "rel_err", "rel_err_stock")


def _entry(row: Mapping[str, Any], runs: list[Run]) -> tuple[Key, Entry | None]:
    key = Key(*_typed({"epilogue": "", **row}, _KEY_TYPES))
    figures = [float(figure) for figure in _typed(row, dict.fromkeys(_FIGURES, (int, float)))]
    if not 0 <= row["run"] < len(runs):
        raise ValueError(f"no run {row['run']!r}")
    try:
        plan = plan_from(row["plan"])
    except ValueError:
        return key, None
    return key, Entry(plan, *figures, runs[row["run"]])


def _typed(row: Mapping[str, Any], types: Mapping[str, Any]) -> list[Any]:
    for name, kind in types.items():
        if not isinstance(row[name], kind) or (isinstance(row[name], bool) and kind is not bool):
            raise ValueError(f"{name} is {row[name]!r}")
    return [row[name] for name in types]


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in row.values()):
        raise ValueError(f"expected texts, not {row!r}")
    return dict(row)


def read(path: Path, gpu: Gpu | None = None) -> Table:
    """The table in a file, which must be of ``gpu`` where that is given.

    Raises FileNotFoundError, OSError, or a TableError that names the file.
    """
    try:
        table = parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path}: not a table ({error})") from error
    except TableError as error:
        raise type(error)(f"{path}: {error}") from None
    found = table.gpu
    if gpu is not None and not _same_model(found, gpu):
        raise OtherGpu(
            f"{path}: a table of {found.name} ({found.sm_count} multiprocessors), "
            f"not of {gpu.name} ({gpu.sm_count})"
        )
    return table


def _same_model(one: Gpu, other: Gpu) -> bool:
    return (one.name, one.sm_count) == (other.name, other.sm_count)


def write(path: Path, table: Table) -> None:
    """Write atomically: a reader sees the old file or the new one. Raises OSError."""
    atomic.write_text(path, dump(table))


def merge(
    path: Path, gpu: Gpu, entries: Mapping[Key, Entry], refused: Mapping[str, str] | None = None
) -> Table:
    """Add entries to a table's file under its lock, and return what the file now holds.

    Entries of other processes stay; a file that cannot be used is set aside beside it (renamed, one
    warning). Raises TableError, naming the folder and the remedy, when it cannot be written.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            table = _for_writing(path, gpu)
            table.entries.update(entries)
            table.refused.update(refused or {})
            write(path, table)
    except Timeout:
        raise TableError(f"{path}.lock was held by another process for {LOCK_SECONDS:.0f} s") from (
            None
        )
    except OSError as error:
        raise TableError(
            f"cannot write {path} ({error.strerror or error}): free the disk, or point "
            "FLASHNORM_CACHE_DIR to a folder that can be written"
        ) from error
    return table


def _for_writing(path: Path, gpu: Gpu) -> Table:
    try:
        return read(path, gpu)
    except FileNotFoundError:
        return Table(gpu)
    except TableError as error:
        aside = path.with_name(
            f"{path.name}.{'newer' if isinstance(error, NewerSchema) else 'bad'}"
        )
        os.replace(path, aside)
        _warn(aside, f"{error}; set aside as {aside.name}")
        return Table(gpu)


# Lookup --------------------------------------------------------------------------------------

_served: dict[Gpu, tuple[tuple[str, Path, Table], ...]] = {}
_warned: set[Path | None] = set()


def forget() -> None:
    """Read the files again at the next lookup: after tuning, or when they were changed."""
    _served.clear()
    _warned.clear()


def lookup(problem: Problem, device: Device, device_name: str) -> Plan:
    """The plan for a problem: from a table where one has it, else the heuristic's. Never raises."""
    return choice(problem, device, device_name).plan


def choice(problem: Problem, device: Device, device_name: str) -> Choice:
    """``lookup``, with where the plan comes from and why. Never raises."""
    reason = "the problem runs in plain torch"
    if device.backend != "cpu" and problem.dtype != "float64":
        try:
            found, reason = _from_tables(problem, device, device_name)
            if found is not None:
                return found
        except Exception as error:  # a forward never fails because of a table
            reason = f"the tables could not be read ({type(error).__name__}: {error})"
            _warn(None, f"flashnorm_triton uses its built-in plans: {reason}")
    return Choice(plans.choose(problem, device), "heuristic", reason)


def _from_tables(problem: Problem, device: Device, device_name: str) -> tuple[Choice | None, str]:
    gpu = Gpu(device_name, device.sm_count, device.capability)
    sources = _served.get(gpu)
    if sources is None:
        sources = _served[gpu] = tuple(_sources(gpu))
    key = key_of(problem)
    reason = "no table has this cell" if sources else "no table serves this GPU"
    for source, path, table in sources:
        entry = table.entries.get(key)
        if entry is None:
            continue
        obstacle = unfit(entry.plan, problem, device)
        if obstacle is None:
            where = f"tuned on {table.gpu.name} on {entry.run.date}"
            return Choice(entry.plan, source, where, path, entry), ""
        reason = f"the plan of {path.name} does not fit: {obstacle}"
    return None, reason


def survey(gpu: Gpu) -> Iterator[tuple[str, Path, Table | Exception]]:
    """(source, path, table or why it cannot be used) of every table that may serve a GPU.

    In the order in which they are asked; "capability" tables nearest in multiprocessors first.
    Nothing at all where $FLASHNORM_TABLES is "off".
    """
    if os.environ.get("FLASHNORM_TABLES", "").lower() in _OFF:
        return
    with contextlib.suppress(TableError):  # no home folder: no table of the user's
        path = user_path(gpu)
        if path.exists():
            yield "user", path, _attempt(path, gpu)
    relatives = []
    for path in sorted(SHIPPED.glob("*.json")):
        table = _attempt(path, None)
        if isinstance(table, Exception) or _same_model(table.gpu, gpu):
            yield "shipped", path, table
        elif gpu.capability and table.gpu.capability == gpu.capability:
            relatives.append((abs(table.gpu.sm_count - gpu.sm_count), path, table))
    for _, path, table in sorted(relatives, key=lambda found: found[:2]):
        yield "capability", path, table


def _attempt(path: Path, gpu: Gpu | None) -> Table | Exception:
    try:
        return read(path, gpu)
    except (OSError, TableError) as error:
        return error


def _sources(gpu: Gpu) -> Iterator[tuple[str, Path, Table]]:
    for source, path, table in survey(gpu):
        if isinstance(table, Exception):
            _warn(path, f"passing over a table of plans: {table}")
        else:
            yield source, path, table


def _warn(path: Path | None, message: str) -> None:
    """Warn once a file, without ever raising (warnings may be errors)."""
    if path not in _warned:
        _warned.add(path)
        with contextlib.suppress(Warning):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
