"""All stages of ``flashnorm bench`` in one folder: run, kept after every cell, drawn, told."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashnorm_triton import results
from flashnorm_triton.bench import report, resuming
from flashnorm_triton.bench.display import Lines
from flashnorm_triton.bench.stages import Stage

LOG = "bench.log"
FIGURES = "figures"


@dataclass
class Outcome:
    """What became of a session. ``failed``: a line a stage that did not measure all it should."""

    failed: list[str] = field(default_factory=list)
    interrupted: bool = False


def result_files(folder: Path, note: Callable[[str], None] = lambda text: None) -> list[Path]:
    """The result files of a folder, by name; of others ``note`` is told."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.load(path)
            found.append(path)
        except results.ResultsError as error:
            note(f"left out: {error}")
    return found


def afresh(folder: Path, stages: Sequence[Stage], note: Callable[[str], None]) -> None:
    """Set the files of these stages aside."""
    for name in dict.fromkeys(stage.file for stage in stages):
        if (folder / name).exists():
            note(f"{name}: begun anew; what was there is {resuming.set_aside(folder / name).name}")


def run(
    stages: Sequence[Stage],
    folder: Path,
    display: Lines,
    *,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the stages one after the other; Ctrl-C ends the session, and what is measured stays.

    ``budget_s`` is shared out by the stages' costs, what one leaves goes to those after it; once
    it is spent none is begun. A stage that fails does not end the session.
    """
    outcome, ends = Outcome(), clock() + (budget_s or 0.0)
    with report.shown_on(display):
        for number, stage in enumerate(stages):
            display.stage(number + 1, len(stages), stage.name)
            share = stage.kind.cost / sum(each.kind.cost for each in stages[number:])
            left = (ends - clock()) * share if budget_s else float("inf")
            try:
                with _undone():
                    late = left <= 0
                    why = "not begun, for the time is up" if late else _run(stage, folder, left)
            except KeyboardInterrupt:
                outcome.interrupted = True
                return outcome
            if why:
                outcome.failed.append(f"{stage.name}: {why}")
                display.note(outcome.failed[-1])
    return outcome


def _run(stage: Stage, folder: Path, seconds: float) -> str | None:
    """Run one stage; why it did not measure all it should, None where it did."""
    try:
        module = importlib.import_module(f"flashnorm_triton.bench.{stage.kind.module}")
        code = module.main([*stage.argv, "--out", str(folder), "--budget", str(seconds)])
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    if code:
        return f"exit code {code}: some cells failed, broke a check or are left; see {folder / LOG}"
    return None


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """A bench sets environment and warnings for itself, and leaves memory behind."""
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        gc.collect()
        import torch

        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # a broken context frees nothing
                torch.cuda.empty_cache()


def draw(folder: Path, note: Callable[[str], None]) -> list[Path]:
    """The pictures of a result folder; none, and a line that says why, where that fails."""
    try:
        from flashnorm_triton import plots

        return plots.draw([folder], folder / FIGURES, say=note)
    except Exception as error:
        note(f"no pictures ({type(error).__name__}: {error}); flashnorm plot {folder} tries again")
        return []
