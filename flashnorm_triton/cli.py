"""The command line: ``flashnorm demo | audit | tune | bench | plot | fold | verify | info``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flashnorm_triton.audit_command import audit
from flashnorm_triton.bench.command import bench
from flashnorm_triton.checkpoints.command import fold
from flashnorm_triton.plots.command import plot
from flashnorm_triton.tuning.command import tune
from flashnorm_triton.tuning.info import info
from flashnorm_triton.verify_command import verify

app = typer.Typer(
    name="flashnorm",
    help="FlashNorm for Hugging Face models: RMSNorm fused into the linear that follows it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(value: bool) -> None:
    if value:
        from flashnorm_triton import __version__

        typer.echo(f"flashnorm_triton {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _stop(message: str) -> typer.Exit:
    typer.echo(f"flashnorm: {message}", err=True)
    return typer.Exit(2)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("flashnorm_demo.png"),
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; left out: a GPU where there is one.")
    ] = None,
) -> None:
    """Patch the shipped model, compare it with stock, time both and draw a picture.

    Exit code 0 when every check passed, 1 when one failed, 2 when the demo could not run.
    """
    from rich.console import Console

    from flashnorm_triton.demo.run import run

    try:
        passed = run(device, out, Console())
    except (ValueError, OSError) as error:
        raise _stop(str(error)) from error
    raise typer.Exit(0 if passed else 1)


app.command()(audit)
app.command()(tune)
app.command()(bench)
app.command()(plot)
app.command()(fold)
app.command()(verify)
app.command()(info)


if __name__ == "__main__":
    sys.exit(app(prog_name="flashnorm"))
