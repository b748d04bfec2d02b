"""The command line: ``flashnorm demo | audit | tune | fold | info``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flashnorm_triton.checkpoints.command import fold
from flashnorm_triton.tuning.command import tune
from flashnorm_triton.tuning.info import info

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


@app.command()
def audit(
    model: Annotated[
        str, typer.Argument(help="A folder with a config.json, a hub id, or 'demo' (shipped).")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Say which norms of a model can be fused, with which linears, and why not the others.

    Only the model's config is read: no weights are loaded and nothing is computed.
    """
    skeleton = _skeleton(model)
    from flashnorm_triton import audit as run_audit

    report = run_audit(skeleton)
    if as_json:
        typer.echo(report.to_json())
        return
    from rich.console import Console

    Console().print(report.table())


def _skeleton(model: str) -> Any:
    """The model's modules on the meta device: shapes and classes, no memory."""
    folder = Path(model).expanduser()
    if model == "demo":
        from flashnorm_triton.demo_model import FOLDER as folder
    elif folder.is_dir() and not (folder / "config.json").is_file():
        raise _stop(f"{folder} has no config.json: give a folder written by save_pretrained")
    elif not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise _stop(f"there is no folder {folder}")
    elif folder.is_file():
        raise _stop(f"{folder} is a file: give the folder that holds config.json")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder if folder.is_dir() else model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise _stop(
            f"no model config found for {model!r} ({first}). Give a local folder that holds "
            "config.json, a hub id that this machine can reach, or 'demo'."
        ) from error
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise _stop(f"{model!r} is not a causal language model: {first}") from error


app.command()(tune)
app.command()(fold)
app.command()(info)


if __name__ == "__main__":
    sys.exit(app(prog_name="flashnorm"))
