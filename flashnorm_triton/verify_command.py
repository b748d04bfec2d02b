"""``flashnorm verify``: two checkpoints against one another, or a patched model against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashnorm_triton.checkpoints.command import compare, source, stop


def verify(
    src: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or 'demo' (shipped).")
    ],
    dst: Annotated[
        str | None,
        typer.Argument(metavar="[FOLDED]", help="A folded checkpoint to compare with MODEL."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            "--generate", metavar="TOKENS", help="Patch MODEL, generate, and look for a lag."
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Watch every patched site or block, not logits alone.")
    ] = False,
    sites: Annotated[
        bool,
        typer.Option("--sites", help="Look inside blocks too, which then run site by site."),
    ] = False,
    mode: Annotated[str, typer.Option(help="The decode step: eager, compiled or graph.")] = "eager",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write lag.json, lag.png and lag.svg there.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Load MODEL in this dtype; left out: its own.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A text to go on from; given several times, one row of a batch each."),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Rows of the batch, from different places of the text.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(help="Of the sampling; 0 takes the likeliest token.")
    ] = 1.0,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="When the positions run out, go on from the last tokens."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file, not trained on: for the perplexity, or the prompts."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the three models are held.")] = "cpu",
    reference: Annotated[
        str, typer.Option(help="With FOLDED, the reference's dtype: float64, float32.")
    ] = "float64",
) -> None:
    """Compare a folded checkpoint with its source, or (--generate) look for reads that come late.

    MODEL FOLDED: logits, perplexity, greedy choices, layers. MODEL --generate N: the patched model
    generates N tokens, the stock one reads them, and every step is compared with stock's step t and
    with its step t-1. Exit code 0: within the contract, no lag. 1: out of it, a lag, or anything
    that rounding does not explain. 2: the comparison could not be made.
    """
    if (dst is None) == (generate is None):
        raise stop("give a FOLDED checkpoint to compare with, or --generate TOKENS, one of the two")
    try:
        if dst is not None:
            compare(source(src), dst, text, device, reference)
            return
        from rich.console import Console

        from flashnorm_triton.lag.command import Request, run

        report = run(
            source(src),
            Request(
                generate, mode, "sites" if sites else layers, out, dtype, device,
                tuple(prompt or ()), text, rows, temperature, restart, seed,
            ),
            Console(),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise stop(str(error)) from error
    raise typer.Exit(0 if report.clean else 1)
