"""The commands ``flashnorm fold`` and ``flashnorm verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _stop(message: str) -> typer.Exit:
    typer.echo(f"flashnorm: {message}", err=True)
    return typer.Exit(2)


def fold(
    src: Annotated[str, typer.Argument(help="A folder written by save_pretrained, or a hub id.")],
    dst: Annotated[Path, typer.Argument(help="The folder to write: absent, or empty.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave the folded norms' tensors out.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Convert: bfloat16, float16, float32 or float64.")
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give a tied output head a tensor of its own.")
    ] = False,
    head: Annotated[
        bool, typer.Option(help="Fold the final norm into an untied output head.")
    ] = True,
    flags: Annotated[bool, typer.Option(help="Mark config.json and the card as folded.")] = True,
) -> None:
    """Write a copy of a model with its norm gains folded into the weights that follow.

    Exit code 0 when it is written (and within the contract), 1 when --verify found it out of
    contract, 2 when it was refused; then nothing is written.
    """
    from flashnorm_triton.checkpoints import fold_checkpoint

    try:
        result = fold_checkpoint(
            src, dst, strict=strict, dtype=dtype, untie=untie, head=head, flags=flags
        )
    except (ValueError, OSError) as error:
        raise _stop(str(error)) from error
    typer.echo(result.summary())
    for file in result.record["left_out"]:
        typer.echo(f"not copied, it holds the unfolded weights: {file}")
