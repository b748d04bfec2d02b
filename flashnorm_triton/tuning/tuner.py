"""The tuning run: compile, check, time, decide, store; one cell after the other.

Compiles run ahead in worker processes (tuning/build.py) while the GPU times the cells before. A
candidate is timed only after the lint of its compiled kernels, the check of its values and the
check of its bits (tuning/validate.py). All candidates of a cell are timed interleaved, then the
leaders again, against each other, against the heuristic's plan and against the unfused pair. The
heuristic's plan stays unless it is clearly beaten, and nothing slower than the unfused pair stays.
float16 moves the same bytes as bfloat16 through the same instructions: where this run or these very
kernels have tuned a cell in bfloat16, its plan and few others stand for float16. All that is kept
was compiled, checked and timed in its own dtype.
Finished cells are stored as the run goes: an interrupted run is taken up where it ended.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch

from flashnorm_triton import plans, results, tables
from flashnorm_triton.limits import shared_limit
from flashnorm_triton.plans import UNFUSED, WITHOUT_BLOCKS, Plan, Problem
from flashnorm_triton.tables import Entry, Key, Run
from flashnorm_triton.tuning import measure, space, validate
from flashnorm_triton.tuning.build import Built, Job
from flashnorm_triton.tuning.progress import Progress, Quiet
from flashnorm_triton.tuning.rig import Machine, Session, floor_us

MARGIN = 1.02
"""How much faster than the heuristic's plan another must be to take its place."""
_WORTH_KEEPING = 1.005  # slower than the unfused pair by more than this is not kept
_FINALISTS = 3
_FEW = 5
"""Candidates beside plans that are known to be good: the built-in, the unfused, a few more."""
_STORE_SECONDS = 1.0


@dataclass(frozen=True)
class _Effort:
    """Rounds of the two timings (most, fewest), their seconds, replay length, checked launches."""

    first: tuple[int, int, float]
    final: tuple[int, int, float]
    replay_us: float
    launches: int


_QUICK = _Effort((7, 3, 0.25), (15, 5, 0.4), 200.0, validate.LAUNCHES["quick"])
_EFFORT = {
    "refresh": _QUICK,
    "quick": _QUICK,
    "full": _Effort((11, 5, 0.6), (41, 11, 1.5), 400.0, validate.LAUNCHES["full"]),
}


EFFORTS = tuple(_EFFORT)
"""From the least to the most thorough."""


class Compiler(Protocol):
    """What compiles: ``build.Pool``, or a stand-in of a test."""

    def submit(self, job: Job) -> Future: ...

    def close(self) -> None: ...


class GpuLost(RuntimeError):
    """A candidate took the GPU's context down; it will not be tried again."""


@dataclass
class Report:
    """What a run did.

    ``rejected``: candidates that were not timed, and why; ``skipped``: how many cells the table
    had; ``failed``: cells that could not be tuned; ``unsaved``: why the table lacks finished cells;
    ``left``: cells that were not begun as the time was up.
    """

    path: Path
    done: dict[Key, Entry] = field(default_factory=dict)
    skipped: int = 0
    rejected: list[tuple[Problem, Plan, str]] = field(default_factory=list)
    failed: list[tuple[Problem, str]] = field(default_factory=list)
    seconds: float = 0.0
    rebuilt: int = 0
    interrupted: bool = False
    lost: str | None = None
    unsaved: str | None = None
    left: int = 0

    def summary(self) -> str:
        """A few lines: cells, rejected candidates by kind of reason, and the table's place."""
        lines = [
            f"{len(self.done)} cells tuned, {self.skipped} already in the table, "
            f"{len(self.failed)} failed, in {self.seconds:.0f} s"
        ]
        if self.left:
            lines.append(f"  the time is up with {self.left} cells left: the same command goes on")
        kinds: dict[str, list[str]] = {}
        for problem, plan, reason in self.rejected:
            told = f"{plan_text(plan)} at {name_of(problem)}: {reason}"
            kinds.setdefault(reason.split(":")[0], []).append(told)
        lines += [
            f"  {len(told)} candidates rejected ({kind}); the first: {told[0]}"
            for kind, told in kinds.items()
        ]
        lines += [f"  failed: {name_of(problem)}: {why}" for problem, why in self.failed[:5]]
        if self.rebuilt:
            lines.append(f"  {self.rebuilt} kernels were not in Triton's cache when launched")
        lines.append(self.unsaved or f"table: {self.path}")
        return "\n".join(lines)


def now() -> str:
    """The time as ``Run.date`` has it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(problem: Problem) -> str:
    """``2048→3072 bfloat16 M=16``, and the epilogue where there is one."""
    name = f"{problem.k}→{problem.n} {problem.dtype} M={problem.m}"
    return f"{name} {problem.epilogue}" if problem.epilogue else name


def plan_text(plan: Plan) -> str:
    """A plan in a few words: ``hopper_swap 16x64x128 w4 s3 in_flight=1``."""
    fields = plan.as_dict()
    if plan.form in WITHOUT_BLOCKS:
        return plan.strategy
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    words = [plan.form, blocks, f"w{plan.num_warps}", f"s{plan.num_stages}"]
    defaults = Plan(plan.strategy, plan.form).as_dict()
    told = ("strategy", "form", "block_m", "block_n", "block_k", "num_warps", "num_stages")
    words += [f"{k}={v}" for k, v in fields.items() if k not in told and v != defaults[k]]
    return " ".join(words)


class Tuner:
    """Tunes problems on a machine and stores each in a table's file. See the module.

    Entries older than ``since`` (UTC, as in ``Run.date``) are tuned again. No cell is begun after
    ``seconds``.
    """

    def __init__(
        self,
        machine: Machine,
        compiler: Compiler,
        path: Path,
        effort: str = "quick",
        progress: Progress | None = None,
        since: str = "",
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        candidates: Callable[..., Sequence[Plan]] = space.candidates,
    ) -> None:
        self.machine, self.compiler, self.path = machine, compiler, path
        self.effort, self.progress = effort, progress or Quiet()
        self.since, self.clock, self.candidates = since, clock, candidates
        self.seconds = math.inf if seconds is None else seconds
        self.report = Report(path)
        self.run = Run(
            date=now(),
            torch=torch.__version__,
            triton=_triton_version(),
            kernel_hash=results.kernel_hash(),
            effort=effort,
        )
        self._pending: dict[Key, Entry] = {}
        self._known: dict[Key, Entry] = {}
        self._refused: dict[str, str] = {}
        self._stored_at = clock()

    def tune(self, problems: Iterable[Problem]) -> Report:
        """Tune every problem that the table does not hold yet.

        An interrupt or a lost GPU ends the run early and shows in the report, after what is
        finished was stored. Raises TableError before anything is measured when the table's file
        cannot be written.
        """
        started, problems = self.clock(), tuple(problems)
        table = tables.merge(self.path, self.machine.gpu, {})
        self._refused, self._known = dict(table.refused), dict(table.entries)
        wanted = [problem for problem in problems if not self._finished(problem)]
        # What the table lacks comes first, should the time not suffice for the rest.
        wanted.sort(key=lambda problem: tables.key_of(problem) in self._known)
        self.report.skipped = len(problems) - len(wanted)
        passes = _passes(wanted)
        expected = {p: self._cost(p, len(self._candidates(p, passes[0]))) for p in wanted}
        self.progress.begin(sum(expected.values()), len(wanted))
        self.report.left = len(wanted)
        try:
            for problem, futures in self._submitted(passes):
                if self.clock() - started >= self.seconds:
                    break
                self.progress.cell(expected[problem], self._attempt(problem, futures))
                self.report.left -= 1
                self._store_sometimes()
        except KeyboardInterrupt:
            self.report.interrupted = True
        except GpuLost as error:
            self.report.lost = str(error)
        finally:
            self._store()
            self.compiler.close()
            self.progress.end()
            self.report.seconds = self.clock() - started
            self.report.rebuilt = self.machine.rebuilt
        return self.report

    # One cell

    def _attempt(self, problem: Problem, futures: dict[Plan, Future]) -> str:
        """Tune one cell; a line that says how it went."""
        try:
            entry = self._cell(problem, futures)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            why = "not enough GPU memory"
        except (measure.CaptureError, RuntimeError) as error:
            if isinstance(error, (GpuLost, measure.NoGpuError)):
                raise
            self._check_alive(problem, UNFUSED, error)
            why = _first_line(error)
        else:
            self.report.done[tables.key_of(problem)] = entry
            self._pending[tables.key_of(problem)] = self._known[tables.key_of(problem)] = entry
            gain = entry.baseline_us / entry.us
            return (
                f"{name_of(problem):<32} {entry.us:9.2f} µs  {gain:5.2f}x unfused  "
                f"{entry.heuristic_us / entry.us:5.2f}x built-in  {plan_text(entry.plan)}"
            )
        self.report.failed.append((problem, why))
        return f"{name_of(problem):<32} failed: {why}"

    def _cell(self, problem: Problem, futures: dict[Plan, Future]) -> Entry:
        self.progress.best(f"{name_of(problem)}: compiling")
        refreshed = tables.key_of(problem) in self._known
        built = {plan: future.result() for plan, future in futures.items()}
        session = self.machine.open(problem)
        effort = _EFFORT[self.effort]
        verdicts: dict[Plan, validate.Verdict] = {}
        replays: dict[Plan, measure.Replay] = {}
        for plan, compiled in built.items():
            reason = self._compiled_badly(compiled)
            if reason is None:
                reason = self._ready(problem, session, plan, effort, verdicts, replays)
            if reason is not None:
                self.report.rejected.append((problem, plan, reason))
        if UNFUSED not in replays:
            raise RuntimeError("the unfused pair itself cannot be run here")
        first = self._time(replays, effort.first)
        leaders = sorted(first, key=lambda plan: first[plan].us)
        best = leaders[0]
        self.progress.best(f"{name_of(problem)}: {plan_text(best)} {first[best].us:.2f} µs")
        heuristic = plans.choose(problem, self.machine.device)
        heuristic = heuristic if heuristic in replays else UNFUSED
        finals = dict.fromkeys((*leaders[:_FINALISTS], heuristic, UNFUSED))
        final = self._time({plan: replays[plan] for plan in finals}, effort.final)
        plan = decide(final, heuristic)
        return Entry(
            plan,
            final[plan].us,
            final[UNFUSED].us,
            final[heuristic].us,
            verdicts[plan].rel_err,
            verdicts[plan].rel_err_stock,
            self.run if refreshed else replace(self.run, effort=_thorough(self.effort)),
        )

    def _compiled_badly(self, built: Built) -> str | None:
        if built.error is not None:
            return f"does not compile: {_first_line(built.error)}"
        if built.findings:
            return f"lint: {built.findings[0]}"
        limit = shared_limit(self.machine.device)
        if built.shared_bytes > limit:
            return f"too much shared memory: {built.shared_bytes} of {limit} bytes"
        return None

    def _ready(
        self,
        problem: Problem,
        session: Session,
        plan: Plan,
        effort: _Effort,
        verdicts: dict[Plan, validate.Verdict],
        replays: dict[Plan, measure.Replay],
    ) -> str | None:
        """Check and capture one candidate; why it is not to be timed, or None."""
        try:
            verdict = session.verify(plan, effort.launches)
            if verdict.reason is not None:
                return f"wrong: {verdict.reason}"
            replays[plan] = measure.prepare(
                plan_text(plan),
                session.call(plan),
                rotations=session.rotations,
                backend=self.machine.backend,
                replay_us=effort.replay_us,
            )
            verdicts[plan] = verdict
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a launch can fail with
            self._check_alive(problem, plan, error)
            return f"does not run: {_first_line(error)}"
        return None

    def _check_alive(self, problem: Problem, plan: Plan, error: Exception) -> None:
        if self.machine.alive():
            return
        why = f"{plan_text(plan)} at {name_of(problem)} took the GPU down ({_first_line(error)})"
        if plan != UNFUSED:
            self._refused[self._refusal(problem, plan)] = why
        raise GpuLost(why) from error

    def _time(
        self, replays: dict[Plan, measure.Replay], rounds: tuple[int, int, float]
    ) -> dict[Plan, measure.Timing]:
        names = {str(number): plan for number, plan in enumerate(replays)}
        timed = measure.interleave(
            {name: replays[plan] for name, plan in names.items()},
            rounds=rounds[0],
            min_rounds=rounds[1],
            budget_s=rounds[2],
            backend=self.machine.backend,
            clock=self.clock,
        )
        return {names[name]: timing for name, timing in timed.items()}

    # What to do, and what is known already

    def _finished(self, problem: Problem) -> bool:
        entry = self._known.get(tables.key_of(problem))
        if entry is None or entry.run.date < self.since:
            return False
        known = entry.run.effort if entry.run.effort in EFFORTS else EFFORTS[0]
        return self._current(entry) and EFFORTS.index(known) >= EFFORTS.index(self.effort)

    def _current(self, entry: Entry) -> bool:
        """Whether an entry was measured with these versions and kernel sources."""
        return replace(entry.run, date="", effort="") == replace(self.run, date="", effort="")

    def _candidates(self, problem: Problem, expected: Sequence[Problem] = ()) -> tuple[Plan, ...]:
        """Plans to try for a cell. ``expected``: cells to take for tuned, when only counting."""
        listed = list(self.candidates(problem, self.machine.device, _thorough(self.effort)))
        before = self._known.get(tables.key_of(problem))
        twin = replace(problem, dtype="bfloat16") if problem.dtype == "float16" else None
        beside = self._known.get(tables.key_of(twin)) if twin else None
        good = [entry.plan for entry in (before, beside) if entry is not None]
        settled = twin in expected or (beside is not None and self._current(beside))
        if (self.effort == "quick" and settled) or (self.effort == "refresh" and good):
            listed = listed[:_FEW]
        every = dict.fromkeys((*listed, *good))
        return tuple(plan for plan in every if self._refusal(problem, plan) not in self._refused)

    def _refusal(self, problem: Problem, plan: Plan) -> str:
        fields = json.dumps(plan.as_dict(), sort_keys=True)
        shape = f"{problem.k}:{problem.n} {problem.dtype}"
        shape += f" {problem.epilogue}" if problem.epilogue else ""
        return f"{self.run.kernel_hash[:12]} {shape} {fields}"

    def _submitted(
        self, passes: Iterable[Sequence[Problem]]
    ) -> Iterator[tuple[Problem, dict[Plan, Future]]]:
        """Every cell with its compiles; those of a pass begin when the pass before is tuned."""
        for work in passes:
            builds = [self._submit(problem) for problem in work]
            yield from zip(work, builds, strict=True)

    def _submit(self, problem: Problem) -> dict[Plan, Future]:
        device, target = self.machine.device, self.machine.target
        return {
            plan: self.compiler.submit(Job(plan, problem, device, target))
            for plan in self._candidates(problem)
        }

    def _cost(self, problem: Problem, count: int) -> float:
        """Seconds that a cell is expected to take."""
        effort = _EFFORT[self.effort]
        replay = max(effort.replay_us, floor_us(problem)) * 1e-6
        rounds = count * (effort.first[0] + 6) + (_FINALISTS + 2) * effort.final[0]
        return 0.05 + 0.012 * count + min(rounds * replay, 3.0)

    # The table's file

    def _store_sometimes(self) -> None:
        if self.clock() - self._stored_at >= _STORE_SECONDS:
            self._store()

    def _store(self) -> None:
        """Store what is finished; where that fails, it is tried again with the next cells."""
        self._stored_at = self.clock()
        try:
            tables.merge(self.path, self.machine.gpu, self._pending, self._refused)
            self._pending, self.report.unsaved = {}, None
        except tables.TableError as error:
            if self.report.unsaved is None:
                self.progress.note(f"warning: {error}")
            self.report.unsaved = f"{len(self._pending)} cells are not stored: {error}"


def _thorough(effort: str) -> str:
    """The effort of a cell of which nothing is known."""
    return "quick" if effort == "refresh" else effort


def _passes(wanted: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """The cells to tune, float16 after the rest: it begins with the plans of bfloat16."""
    late = [problem for problem in wanted if problem.dtype == "float16"]
    return [problem for problem in wanted if problem.dtype != "float16"], late


def decide(timings: dict[Plan, measure.Timing], heuristic: Plan) -> Plan:
    """The plan to keep, from one interleaved run that holds ``heuristic`` and ``UNFUSED``.

    The fastest takes the heuristic's place only if it is faster by ``MARGIN`` in the median of the
    rounds and faster in four of five rounds. What is slower than the unfused pair is not kept.
    """
    fastest = min(timings, key=lambda plan: timings[plan].us)
    faster = measure.ratio(timings[heuristic], timings[fastest])
    kept = fastest if faster.median >= MARGIN and faster.q20 > 1.0 else heuristic
    # By either measure: where the clock moves between rounds the two can differ.
    slower = measure.ratio(timings[kept], timings[UNFUSED]).median
    slower = max(slower, timings[kept].us / timings[UNFUSED].us)
    return UNFUSED if slower > _WORTH_KEEPING else kept


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "absent"
