"""The command ``flashnorm fold``, and the comparison behind ``flashnorm verify SRC DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def stop(message: str) -> typer.Exit:
    """Say why the command could not run; raise what this returns."""
    typer.echo(f"flashnorm: {message}", err=True)
    return typer.Exit(2)


def source(name: str) -> str | Path:
    """A folder or hub id; 'demo' is the shipped model."""
    if name != "demo":
        return name
    from flashnorm_triton.demo_model import FOLDER

    return FOLDER


def fold(
    src: Annotated[
        str, typer.Argument(help="A folder written by save_pretrained, a hub id, or 'demo'.")
    ],
    dst: Annotated[Path, typer.Argument(help="The folder to write: absent, or empty.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave the folded norms' tensors out.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the result with the source afterwards.")
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
    max_crest: Annotated[
        float | None,
        typer.Option(help="Leave norms with more uneven gains alone, for quantizing (try 1.25)."),
    ] = None,
    flags: Annotated[bool, typer.Option(help="Mark config.json and the card as folded.")] = True,
    digest: Annotated[
        str | None,
        typer.Option(help="Name the source's files by blake3 (default) or sha256 (slower)."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload the result to this hub repository.")
    ] = None,
) -> None:
    """Write a copy of a model with its norm gains folded into the weights that follow.

    Exit code 0: written, and where asked verified and pushed. 1: written, but out of contract;
    nothing is pushed then. 2: refused, and nothing was written; or written and not pushed.
    """
    from flashnorm_triton.checkpoints import fold_checkpoint

    try:
        result = fold_checkpoint(
            source(src),
            dst,
            strict=strict,
            dtype=dtype,
            untie=untie,
            head=head,
            max_crest=max_crest,
            flags=flags,
            digest=digest,
        )
        for folder in result.cleared:
            typer.echo(f"removed what a fold that was killed had left: {folder}")
        typer.echo(result.summary())
        for file in result.record["left_out"]:
            typer.echo(f"not copied, it holds the unfolded weights: {file}")
        if result.record["head"]:
            typer.echo("the final norm is folded too: last_hidden_state is without its gain")
        if flags and not result.record["marks"]:
            typer.echo("config.json is not marked: norms that engines would drop keep their gains")
        if verify:
            compare(source(src), dst, None, "cpu", "float64")
        if push is not None:
            from flashnorm_triton.checkpoints.push import push as upload

            typer.echo(f"pushed: {upload(dst, push)}")
    except (ValueError, OSError) as error:
        raise stop(str(error)) from error


def compare(
    src: str | Path, dst: str | Path, text: Path | None, device: str, reference: str
) -> None:
    """Print the comparison of two checkpoints; exits with 1 when it is out of contract."""
    import torch
    from rich.console import Console

    from flashnorm_triton.checkpoints import verify_checkpoint

    dtypes = {"float64": torch.float64, "float32": torch.float32}
    if reference not in dtypes:
        raise ValueError(f"--reference {reference}: use float64 or float32")
    words = None if text is None else text.expanduser().read_text(encoding="utf-8")
    result = verify_checkpoint(src, dst, text=words, device=device, reference=dtypes[reference])
    for table in result.tables():
        Console().print(table)
    if not result.passed:
        typer.echo("out of contract")
        raise typer.Exit(1)
