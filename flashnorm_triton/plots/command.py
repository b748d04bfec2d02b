"""``flashnorm plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    results: Annotated[
        list[str] | None,
        typer.Argument(
            help="Result files, tuned tables, or folders of them, of one GPU or several; "
            "left out, or 'shipped': the results that come with the package."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the figures.")] = Path(
        "flashnorm_figures"
    ),
) -> None:
    """Draw result files as figures, each as SVG and PNG. Needs no GPU.

    Files of one kind overlay in one figure: those of one name from several folders, or all that are
    named one by one. Exit code 0 when something was drawn, 2 when nothing could be.
    """
    from flashnorm_triton.plots import draw
    from flashnorm_triton.results import ResultsError

    try:
        written = draw(results or [], out, say=lambda line: typer.echo(line, err=True))
    except ResultsError as error:
        typer.echo(f"flashnorm plot: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(
            f"flashnorm plot: cannot write into {out} ({error.strerror or error}): "
            "give another folder with --out",
            err=True,
        )
        raise typer.Exit(2) from error
    for path in written:
        typer.echo(path)
