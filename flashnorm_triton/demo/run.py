"""The demo from start to finish: load, audit, patch, compare, time, draw, decide."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor
from torch.nn import Module

import flashnorm_triton
from flashnorm_triton import demo_model, runtime
from flashnorm_triton.demo import accuracy, greedy, interpreter, picture, speed
from flashnorm_triton.demo.checks import Check

PROMPT = 64


@dataclass(frozen=True)
class Sizes:
    """How much the demo does, in tokens: logits of ``heldout`` in windows of ``window``, ``greedy``
    tokens generated, and ``rounds`` of ``timed`` tokens. The greedy prompt starts at ``prompt_at``
    of the held-out text: there, inside a function."""

    heldout: int = 60_000  # all there is
    window: int = 1024
    prompt_at: int = 13_500
    greedy: int = 512
    timed: int = 128
    rounds: int = 5


@dataclass
class Models:
    """The shipped weights three times: as stock, patched, and as stock in float64."""

    stock: Module
    patched: Module
    exact: Module


def run(device: str | None, out: Path, console: Console, sizes: Sizes | None = None) -> bool:
    """Run the demo on ``device`` ("cpu", "cuda"; None: a GPU where there is one).

    Prints to ``console`` and writes the picture to ``out``. Returns whether every check passed.
    Raises ValueError when the device is not there, FileNotFoundError when the weights are missing,
    OSError when the picture cannot be written.
    """
    device = _device(device)
    if out.suffix.lower() != ".png":
        raise ValueError(f"--out is {out}: the picture is a PNG, so name a file ending in .png")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out is {out}: its folder does not exist or cannot be written to")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    # The model is too small for more than one thread: they would wait for each other at every step.
    torch.set_num_threads(1)
    try:
        return _run(device, out, console, sizes or Sizes())
    finally:
        torch.set_num_threads(threads)


def _run(device: str, out: Path, console: Console, sizes: Sizes) -> bool:
    console.print(_where(device))
    with _stages(console) as stage:
        with stage("loading the model"):
            models = Models(
                stock=demo_model.load(device=device),
                patched=demo_model.load(device=device),
                exact=demo_model.load(torch.float64, device),
            )
            tokenizer = demo_model.tokenizer()
            ids = tokenizer(demo_model.heldout_text(), verbose=False)["input_ids"]
            text = torch.tensor(ids, device=device)
            prompt = text[sizes.prompt_at :][:PROMPT]
        with stage("audit and patch"):
            handle = flashnorm_triton.patch(models.patched)
        console.print(handle.report.table())
        checks, errors, written = _compare(models, text[: sizes.heldout], prompt, sizes, stage)
        rates, launches = _speed(models, prompt, sizes, stage)
        if device == "cpu":
            checks += _interpreted(models.stock, prompt, stage, console)
        with stage("drawing"):
            _draw(models.stock, errors, rates, launches, out)

    _print_text(tokenizer.decode(prompt), tokenizer.decode(written), console)
    _print_figures(errors, rates, launches, console)
    _print_checks(checks, console)
    console.print(f"Picture: {out.resolve()}", soft_wrap=True)
    return all(check.passed for check in checks)


def _device(wanted: str | None) -> str:
    gpu = torch.cuda.is_available()
    if wanted == "cuda" and not gpu:
        raise ValueError(
            "--device is cuda, but torch sees no GPU here "
            f"(torch {torch.__version__}); leave --device out to run on the CPU"
        )
    if wanted not in (None, "cpu", "cuda"):
        raise ValueError(f"--device is {wanted!r}: it must be cpu or cuda")
    return wanted or ("cuda" if gpu else "cpu")


def _where(device: str) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device == "cpu":
        return (
            f"[bold]On the CPU[/bold] ({versions}). The patched model runs flashnorm's torch path; "
            "the Triton kernels run on a slice of its activations in Triton's interpreter."
        )
    reason = runtime.triton_unavailable()
    if reason:
        return (
            f"[bold]On {torch.cuda.get_device_name()}[/bold] ({versions}), but without the Triton "
            f"kernels: {reason}. The patched model runs flashnorm's torch path."
        )
    return f"[bold]On {torch.cuda.get_device_name()}[/bold] ({versions}), with the Triton kernels."


@contextmanager
def _stages(console: Console) -> Iterator[Callable]:
    """Yields ``stage(title)``: a bar on a terminal, one line a stage elsewhere."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        @contextmanager
        def stage(title: str) -> Iterator[Callable[[float], None]]:
            if not console.is_terminal:
                console.print(f"... {title}")
            task = progress.add_task(title, total=1.0)
            yield lambda done: progress.update(task, completed=done)
            progress.update(task, completed=1.0)

        yield stage


def _compare(
    models: Models, text: Tensor, prompt: Tensor, sizes: Sizes, stage: Callable
) -> tuple[list[Check], dict[str, accuracy.Errors], Tensor]:
    pair = {"stock": models.stock, "patched": models.patched}
    with stage(f"logits and perplexity over {len(text):,} held-out tokens") as progress:
        errors = accuracy.measure(pair, models.exact, text, sizes.window, progress)
    checks = accuracy.checks(errors["stock"], errors["patched"])
    if len(text) < sizes.heldout:
        recorded = demo_model.training()["excerpt_perplexity"]
        checks.append(accuracy.perplexity_check(errors["stock"], recorded))

    texts = {}
    with stage(f"{sizes.greedy} greedy tokens from both") as progress:
        for number, (name, model) in enumerate(pair.items(), 1):
            texts[name] = greedy.generate(model, prompt, sizes.greedy)
            progress(number / 2)
    end = models.stock.generation_config.eos_token_id
    chosen = {name: greedy.judge(models.exact, prompt, t, end) for name, t in texts.items()}
    checks += greedy.choice_checks(chosen["stock"], chosen["patched"], errors["stock"].largest)
    first = greedy.first_difference(texts["stock"], texts["patched"])
    checks.append(greedy.equality_note(first, sizes.greedy))

    with stage("cached decode, step by step, of held-out text") as progress:
        piece = text[: PROMPT + sizes.greedy]
        steps = {}
        for number, (name, model) in enumerate(pair.items(), 1):
            steps[name] = greedy.compare_decode(model, models.exact, piece, PROMPT)
            progress(number / 2)
    checks += greedy.decode_checks(steps["stock"], steps["patched"])
    return checks, errors, texts["patched"]


def _speed(
    models: Models, prompt: Tensor, sizes: Sizes, stage: Callable
) -> tuple[dict[str, list[float]], dict[str, int]]:
    pair = {"stock": models.stock, "patched": models.patched}
    title = f"timing generate, {sizes.rounds} rounds of {sizes.timed} tokens, in turns"
    with stage(title) as progress:
        rates = speed.tokens_per_second(pair, prompt, sizes.timed, sizes.rounds, progress)
    launches = {}
    if prompt.device.type == "cuda":
        with stage("counting kernel launches of a decode step"):
            launches = {name: speed.launches_per_step(m, prompt) for name, m in pair.items()}
    return rates, launches


def _interpreted(stock: Module, tokens: Tensor, stage: Callable, console: Console) -> list[Check]:
    with stage("Triton kernels on real activations, in the interpreter"):
        sites = interpreter.capture(stock, tokens)
        try:
            errors = interpreter.run(sites)
        except RuntimeError as error:
            console.print(f"Triton's interpreter failed: {error}", markup=False)
            return [Check("Triton kernels in the interpreter", "failed", "runs", False)]
    return interpreter.checks(errors)


def _draw(
    stock: Module,
    errors: dict[str, accuracy.Errors],
    rates: dict[str, list[float]],
    launches: dict[str, int],
    out: Path,
) -> None:
    on_gpu = next(stock.parameters()).is_cuda
    where = torch.cuda.get_device_name() if on_gpu else "the CPU's torch path"
    gains = {n: p.cpu() for n, p in stock.named_parameters() if "norm" in n}
    profiles = {name: e.profile() for name, e in errors.items()}
    title = (
        f"flashnorm_triton demo: a {stock.num_parameters() / 1e6:.2f} M Llama in bf16 on {where}"
    )
    picture.draw(picture.Panels(title, profiles, rates, launches, gains), out)


def _print_text(prompt: str, written: str, console: Console) -> None:
    console.print("\n[bold]Greedy text of the patched model[/bold], after the prompt's last line:")
    shown = prompt.rsplit("\n", 1)[-1] + written[:300]
    console.print(Syntax(shown, "python", background_color="default", word_wrap=True))


def _print_figures(
    errors: dict[str, accuracy.Errors],
    rates: dict[str, list[float]],
    launches: dict[str, int],
    console: Console,
) -> None:
    table = Table(title="Stock and patched")
    for heading in ("", "logit error", "held-out perplexity", "tokens/s", "launches a step"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, error in errors.items():
        rate = sorted(rates[name])[len(rates[name]) // 2]
        launched = str(launches[name]) if name in launches else "no GPU"
        row = (f"{error.relative:.5f}", f"{error.perplexity:.3f}", f"{rate:,.0f}", launched)
        table.add_row(name, *row)
    console.print(table)
    ratio = speed.median_ratio(rates, "patched", "stock")
    console.print(f"Patched generates at {ratio:.2f}x the rate of stock (median of paired rounds).")


def _print_checks(checks: list[Check], console: Console) -> None:
    table = Table(title="Checks")
    for heading in ("check", "value", "limit", ""):
        table.add_column(heading, justify="left" if heading in ("check", "") else "right")
    for check in checks:
        mark = "[green]pass[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        table.add_row(check.name, check.value, check.limit, mark)
    console.print(table)
    failed = [check.name for check in checks if not check.passed]
    if failed:
        console.print(f"[bold red]{len(failed)} failed:[/bold red] {'; '.join(failed)}")
    else:
        console.print("[green]All checks passed.[/green]")
