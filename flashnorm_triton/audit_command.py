"""``flashnorm audit``: what could be fused in a model, told from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_FEW = 2  # layers of a model type's default config
_CANCEL = ("exact", "fast")


def audit(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder with a config.json, a hub id, or 'demo' (shipped)."),
    ] = None,
    model_type: Annotated[
        str | None,
        typer.Option(help="A model type of transformers (llama, t5, ...): its default config."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Cut the depth to about this many layers (0: all of them). "
            f"Left out: all of a MODEL, {_FEW} of a --model-type.",
        ),
    ] = None,
    head: Annotated[
        bool, typer.Option("--head", help="Also fuse the final norm with the head.")
    ] = False,
    cancel: Annotated[
        str | None,
        typer.Option(
            help="Also drop norms whose readers are normalised again: 'exact', or 'fast', which "
            "leaves the later eps as it is."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Say which norms of a model can be fused, with which linears, and why not the others.

    Only the model's config is read: no weights are loaded and nothing is computed.
    """
    if (model is None) == (model_type is None):
        raise _stop("give a MODEL or a --model-type, one of the two")
    if cancel not in (None, *_CANCEL):
        raise _stop(f"--cancel {cancel}: give {' or '.join(_CANCEL)}, or leave it out")
    from transformers.utils import logging

    from flashnorm_triton.models.auditor import audit as run_audit
    from flashnorm_triton.models.skeleton import build, from_type, shallow

    logging.set_verbosity_error()
    try:
        if model_type is not None:
            depth = _FEW if layers is None else layers
            skeleton = from_type(model_type, depth or None)
        else:
            config = _config(model)
            skeleton = build(shallow(config, layers) if layers else config)
    except (ValueError, ImportError) as error:
        raise _stop(f"{model or model_type}: {_first_line(error)}") from error
    report = run_audit(skeleton, head=head, cancel=cancel or False)
    if as_json:
        typer.echo(report.to_json())
        return
    from rich.console import Console

    Console().print(report.table())


def _config(model: str) -> Any:
    """The config of a local folder or a hub id."""
    folder = Path(model).expanduser()
    if model == "demo":
        from flashnorm_triton.demo_model import FOLDER as folder
    elif folder.is_dir() and not (folder / "config.json").is_file():
        raise _stop(f"{folder} has no config.json: give a folder written by save_pretrained")
    elif not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise _stop(f"there is no folder {folder}")
    elif folder.is_file():
        raise _stop(f"{folder} is a file: give the folder that holds config.json")
    from transformers import AutoConfig

    try:
        # False, not None: a model with code of its own must not be asked about on the terminal.
        place = folder if folder.is_dir() else model
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _stop(
            f"no model config found for {model!r} ({_first_line(error)}). Give a local folder "
            "that holds config.json, a hub id that this machine can reach, or 'demo'; a model with "
            "code of its own can be loaded in Python and given to flashnorm_triton.audit."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _stop(message: str) -> typer.Exit:
    typer.echo(f"flashnorm: {message}", err=True)
    return typer.Exit(2)
