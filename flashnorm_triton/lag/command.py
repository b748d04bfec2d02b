"""``flashnorm verify MODEL --generate N``: load, find a lag, print, write, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashnorm_triton.lag.finder import find_lag
from flashnorm_triton.lag.prompts import prompts, tokenizer_of
from flashnorm_triton.lag.report import LagReport

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Request:
    """What the command line asked for; the names are those of its options."""

    tokens: int
    mode: str
    layers: bool | str
    out: Path | None
    dtype: str | None
    device: str
    prompt: Sequence[str]
    text: Path | None
    rows: int
    temperature: float
    restart: bool
    seed: int


def run(model: str | Path, request: Request, console: Console) -> LagReport:
    """Load the model and find a lag; prints the outcome, and writes it where asked.

    Raises ValueError or OSError for what cannot be done, before anything has run.
    """
    if request.dtype not in (None, *_DTYPES):
        raise ValueError(f"--dtype {request.dtype}: use one of {', '.join(_DTYPES)}")
    if request.rows < 1:
        raise ValueError(f"--rows {request.rows}: at least 1")
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {request.device}: torch sees no GPU here; use --device cpu")
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
    stock = _load(model, request)
    ids, mask, told = _prompts(model, stock, request)
    console.print(f"Prompt: {told}.", highlight=False)
    with _progress(console) as progress:
        report = find_lag(
            stock,
            ids,
            mask,
            tokens=request.tokens,
            mode=request.mode,
            layers=request.layers,
            temperature=request.temperature,
            restart=request.restart,
            seed=request.seed,
            progress=progress,
        )
    console.print(report.table())
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
    if report.departure is not None and not request.layers:
        console.print("To see at which layer and site it begins, run it again with --layers.")
    if request.out is not None:
        _write(report, request.out, console)
    return report


def _load(model: str | Path, request: Request) -> Any:
    from transformers.utils import logging

    from flashnorm_triton.auto import load

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtype = getattr(torch, request.dtype) if request.dtype else "auto"
    loaded = load(model, dtype=dtype, trust_remote_code=False)
    return loaded.to(request.device).eval().requires_grad_(False)


def _prompts(model: str | Path, stock: Any, request: Request) -> tuple[Any, Any, str]:
    from flashnorm_triton import demo_model

    tokenizer = tokenizer_of(model)
    text = None
    if request.text is not None:
        text = request.text.expanduser().read_text(encoding="utf-8")
    elif tokenizer is not None and not request.prompt:
        text = demo_model.heldout_text()
    size = stock.get_input_embeddings().weight.shape[0]
    return prompts(tokenizer, request.prompt, text, request.rows, size, request.seed)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar a generation on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    names = {"patched": "patched generates, stock follows", "stock": "stock generates"}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(names[name], total=1.0)
            bars.update(tasks[name], completed=done)

        yield progress


def _write(report: LagReport, folder: Path, console: Console) -> None:
    from flashnorm_triton.lag.picture import draw

    path = folder / "lag.json"
    path.write_text(report.to_json(series=True, indent=None) + "\n", encoding="utf-8")
    png, svg = draw(report, folder / "lag.png")
    for written in (path, png, svg):
        console.print(f"written: {written}", soft_wrap=True, highlight=False)
