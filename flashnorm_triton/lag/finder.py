"""find_lag: generate with the patched model, lead the stock model along, compare step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.lag.concluding import conclude
from flashnorm_triton.lag.following import Follower
from flashnorm_triton.lag.generating import generate
from flashnorm_triton.lag.report import LagReport
from flashnorm_triton.lag.settings import Settings, check_model, window_of
from flashnorm_triton.lag.sites import sites_to_watch
from flashnorm_triton.lag.trio import Trio, trio_of

Progress = Callable[[str, float], None]
_PROMPT = 16


def find_lag(
    model: nn.Module | tuple[nn.Module, nn.Module],
    prompt: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    tokens: int = 4096,
    mode: str = "eager",
    cache: Any = None,
    layers: bool | str = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    restart: bool = False,
    repeats: bool = True,
    reference: torch.dtype | None = None,
    progress: Progress | None = None,
) -> LagReport:
    """Whether a patched model answers with what belongs to the step before.

    The patched model generates; a stock copy in a wider dtype (the reference) and the stock model
    in its own (the control) then read the same tokens, ``chunk`` steps at a time. Each step's
    logits are compared with the reference's at t and at t-1. The control's distances say what
    rounding alone does; a step beyond that which t-1 explains is lagged. docs/staleness.md derives
    the statistic and its limits.

    Args:
        model: a causal language model, stock or patched, which is left as it is (copies are
            made); or a pair (patched, stock), of which no copies are made but the reference.
        prompt: token ids (B, P), P ≥ 2; None: 16 random ones.
        attention_mask: (B, P), zeros where a left-padded prompt is padding, two real tokens or more
            a row; None: no padding.
        tokens: to generate a row. The end token does not end it.
        mode: "eager", "compiled" (torch.compile of the decode step) or "graph" (a CUDA graph of the
            step, replayed; a GPU only). The last two run with a static cache.
        cache: "dynamic", "static", or a function of (model, batch, length) that makes one.
        layers: True also watches every patched site, input and output, and names the first that
            is off; of a layer that runs as a block only what enters it, as that is what runs.
            "sites" looks inside blocks, which then run their layer's own code over the sites. Taps
            copy rows between kernels, and a fault of timing may hide behind them: run without too.
        temperature: 0 is greedy. Greedy texts may run in circles, in which steps cannot be told
            apart; the report counts how many could.
        top_k: sample from the likeliest ones only; None: from all.
        seed: of the sampling, and of a random prompt.
        chunk: steps held in memory at a time: chunk · B · vocabulary logits of three models.
        restart: begin anew, with the last tokens as the prompt, when the positions run out.
        repeats: also let the stock model generate, to compare how much the texts repeat.
        reference: dtype of the reference; None: float32 for half precisions, else float64.
        progress: called with (what runs, its share done).

    Returns:
        A LagReport: ``lag`` (None, or the first step, layer and site), ``clean``, every step's
        figures, ``summary()``, ``to_json()``.

    Raises ValueError for what cannot be done (see Settings), before anything is copied or run.
    """
    settings = Settings(
        tokens, mode, cache, layers, temperature, top_k, seed, chunk, restart, repeats
    )
    first = model[0] if isinstance(model, tuple) else model
    device = next(first.parameters()).device
    check_model(first, device, mode)
    if prompt is None:
        prompt = _random_prompt(first, seed)
    prompt, mask = _checked(prompt, attention_mask, device, first)
    window = window_of(first, prompt, settings)
    trio = trio_of(model, reference)
    with trio.evaluating():
        return _find(trio, settings, prompt, mask, window, progress or _silent)


def _silent(what: str, done: float) -> None: ...


def _random_prompt(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.get_input_embeddings().weight.shape[0], (1, _PROMPT), generator=draw)


def _checked(
    prompt: Tensor, mask: Tensor | None, device: torch.device, model: nn.Module
) -> tuple[Tensor, Tensor | None]:
    size = model.get_input_embeddings().weight.shape[0]
    if prompt.dim() != 2 or prompt.shape[1] < 2:
        raise ValueError(
            f"a prompt of shape {tuple(prompt.shape)}: (rows, tokens) with at least two tokens, "
            "for the first step to have one before it"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= size:
        raise ValueError(f"the prompt has token ids outside 0 … {size - 1}: use the model's own")
    if mask is not None:
        if mask.shape != prompt.shape or not bool((mask[:, 1:] >= mask[:, :-1]).all()):
            raise ValueError(
                f"an attention_mask of shape {tuple(mask.shape)} for a prompt of "
                f"{tuple(prompt.shape)}: zeros on the left, then ones (pad on the left)"
            )
        if not bool(mask[:, -2:].all()):
            raise ValueError("a row of the prompt has fewer than two real tokens: give it more")
        mask = None if bool(mask.all()) else mask.to(device)
    return prompt.to(device), mask


def _find(
    trio: Trio,
    settings: Settings,
    prompt: Tensor,
    mask: Tensor | None,
    window: int,
    progress: Progress,
) -> LagReport:
    batch, length = prompt.shape
    sites = []
    if settings.layers:
        sites = sites_to_watch(trio.candidate, trio.audit, settings.layers == "sites")
    follower = Follower(trio, sites, batch, length + window, settings.chunk)
    sizes = (settings, prompt, mask, window)
    texts = {}
    try:
        told = partial(progress, "patched")
        texts["patched"] = generate(trio.candidate, *sizes, follower, told)
    finally:
        follower.close()
    if settings.repeats:
        texts["stock"] = generate(trio.control, *sizes, None, partial(progress, "stock"))
    run = {
        "model": type(trio.control).__name__,
        "mode": settings.mode,
        "dtype": str(trio.dtype).removeprefix("torch."),
        "reference": str(trio.wide).removeprefix("torch."),
        "tokens": settings.tokens,
        "batch": batch,
        "prompt": length,
    }
    steps, figures = follower.results()
    unseen = tuple(site.norm for site in sites if site not in figures)
    return conclude(run, trio.dtype, steps, figures, unseen, texts)
