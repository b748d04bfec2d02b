"""``flashnorm bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_NEEDS = (
    "it measures on a GPU that torch and Triton can use, and here is none: {why}. Run it on a "
    "machine with one; without, flashnorm plot draws the results of an NVIDIA H200 that come with "
    "the package"
)


def bench(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="What decode, prefill, … run, and whose sites op times: a named shape "
            "(llama-3.2-1b, qwen3-4b, …), demo, a folder with a config.json, or a hub id. The "
            "config alone is read; weights are random. May be given several times."
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help="Time the operation alone at these KxN: 2048x3072,4096x28672."),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            help="Several of op, decode, prefill, generate, ablation, profile, paper; left out: "
            "the first four, with --shapes op alone."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    tokens: Annotated[
        str | None, typer.Option(help="Row counts of the operation's curve: 1,16,4096.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The result folder; left out: ./flashnorm-results/<gpu>."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few row counts, few rounds, nothing compiled.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds, shared out among the benches; left out: no limit."),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure again what the folder has (it is set aside)."),
    ] = False,
) -> None:
    """Measure this GPU, stock against patched, and draw the curves.

    Stop it at any moment: finished cells are kept, and the same command goes on from there. Exit
    code 0 when everything was measured, 1 when something failed or is left as the time is up, 2
    when it could not start, 130 when it was interrupted.
    """
    from flashnorm_triton.bench import display, session, stages, summary
    from flashnorm_triton.interrupts import terminated_as_interrupted

    try:
        if budget is not None and not budget > 0:
            raise ValueError(f"--budget {budget}: give a number of seconds, more than 0")
        asked = stages.parse(
            model=model or (), shapes=shapes, what=what, dtype=dtype, tokens=tokens, quick=quick
        )
        gpu = _gpu()
        planned = stages.plan(asked)
        folder = _folder(out, gpu)
    except ValueError as error:
        typer.echo(f"flashnorm bench: {error}", err=True)
        raise typer.Exit(2) from error
    with (folder / session.LOG).open("a", encoding="utf-8") as log:
        shown = display.for_output(log, [stage.name for stage in planned])
        try:
            shown.note(f"{gpu}: {', '.join(asked.what)}; results go into {folder}")
            if fresh:
                session.afresh(folder, planned, shown.note)
            with terminated_as_interrupted():
                outcome = session.run(planned, folder, shown, budget_s=budget)
        finally:
            shown.end()
    files = session.result_files(folder, typer.echo)
    if files:
        typer.echo(summary.table(files))
        for path in (*files, *session.draw(folder, typer.echo)):
            typer.echo(f"  {path}")
    if outcome.interrupted:
        typer.echo("interrupted: finished cells are kept, the same command goes on from here")
        raise typer.Exit(130)
    if outcome.failed:
        typer.echo("not all was measured; the same command tries the rest again:")
        typer.echo("\n".join(f"  {line}" for line in outcome.failed))
    raise typer.Exit(1 if outcome.failed else 0)


def _gpu() -> str:
    """The GPU's name. Raises ValueError where the kernels cannot be measured on one."""
    import torch

    from flashnorm_triton import runtime
    from flashnorm_triton.tuning import measure

    try:
        measure.require_gpu()
    except measure.NoGpuError as error:
        raise ValueError(
            _NEEDS.format(why=str(error).partition(": ")[2].partition(";")[0])
        ) from error
    why = runtime.triton_unavailable()
    if why:
        raise ValueError(_NEEDS.format(why=why))
    return torch.cuda.get_device_name()


def _folder(out: Path | None, gpu: str) -> Path:
    """The result folder, made. Raises ValueError where it is a file or cannot be written."""
    import os

    from flashnorm_triton.bench import running
    from flashnorm_triton.results import gpu_slug

    folder = out or running.FOLDER / gpu_slug(gpu)
    if folder.suffix == ".json" or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"--out {folder}: give a folder, several files are written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: it cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder}: it cannot be written to")
    return folder
