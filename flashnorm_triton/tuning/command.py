"""``flashnorm tune``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

# What a restarted command must know: how often it was, and since when --force holds.
_RESTARTS, _SINCE = "FLASHNORM_TUNE_RESTARTS", "FLASHNORM_TUNE_SINCE"
_MOST_RESTARTS = 8


def tune(
    model: Annotated[
        str | None,
        typer.Option(help="A config.json, the folder that holds it, or a hub id. No weights."),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="K:N of norm → linear sites, such as 2048:3072,2048:16384.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, or several: bf16,fp16.")] = "bf16",
    tokens: Annotated[
        str, typer.Option(help="Row counts; each stands for the next power of two.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192",
    effort: Annotated[
        str,
        typer.Option(
            help="quick; full: more candidates, longer; refresh: few, for cells of older kernels."
        ),
    ] = "quick",
    epilogue: Annotated[
        str,
        typer.Option(help="What follows: plain, silu+gated, centred (LayerNorm), … or several."),
    ] = "plain",
    seconds: Annotated[
        float | None, typer.Option(help="Begin no further cell after so long; left out: no limit.")
    ] = None,
    gain: Annotated[
        bool, typer.Option(help="For gains applied in the kernel, not folded.")
    ] = False,
    force: Annotated[bool, typer.Option(help="Tune again what the table has.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The table's file; left out: your table of this GPU.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compiling processes; left out: CPU cores but two.")
    ] = None,
) -> None:
    """Find this GPU's best plans for a model or for shapes, and keep them.

    Stop it at any moment: finished cells are kept, and the same command goes on from there. Exit
    code 0 when every cell is tuned, 1 when some failed, could not be stored or are left as the time
    is up, 2 when it could not start, 130 when it was interrupted.
    """
    from flashnorm_triton.interrupts import terminated_as_interrupted
    from flashnorm_triton.tuning import run, sites
    from flashnorm_triton.tuning.measure import NoGpuError
    from flashnorm_triton.tuning.progress import for_output
    from flashnorm_triton.tuning.tuner import now

    try:
        if (model is None) == (shapes is None):
            raise ValueError("give either --model or --shapes")
        what: Any = model
        if shapes is not None:
            what = [(site.k, site.n) for site in sites.parse_shapes(shapes)]
        with terminated_as_interrupted():
            report = run.tune(
                what,
                dtype=sites.parse_dtypes(dtype),
                tokens=sites.parse_tokens(tokens),
                effort=effort,
                gain=gain,
                force=os.environ.setdefault(_SINCE, now()) if force else False,
                path=out,
                jobs=jobs,
                epilogue=epilogue,
                seconds=seconds,
                progress=for_output(),
            )
    except (ValueError, NoGpuError) as error:
        typer.echo(f"flashnorm tune: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(report.summary())
    if report.interrupted:
        typer.echo("interrupted: the same command goes on from here")
        raise typer.Exit(130)
    if report.lost is not None:
        _restart(report.lost)
    raise typer.Exit(1 if report.failed or report.unsaved or report.left else 0)


def _restart(why: str) -> None:
    """Begin the same command anew: a process whose GPU context broke cannot use the GPU again."""
    count = int(os.environ.get(_RESTARTS, "0")) + 1
    typer.echo(f"{why}; it will not be tried again", err=True)
    if count > _MOST_RESTARTS:
        typer.echo(f"flashnorm tune: given up after {_MOST_RESTARTS} restarts", err=True)
        raise typer.Exit(1)
    os.environ[_RESTARTS] = str(count)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
