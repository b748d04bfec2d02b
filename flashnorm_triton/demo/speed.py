"""Tokens per second of eager ``generate`` and kernel launches of a decode step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Module

from flashnorm_triton.demo.greedy import cached, generate


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens_per_second(
    models: Mapping[str, Module],
    prompt: Tensor,
    count: int,
    rounds: int,
    progress: Callable[[float], None],
) -> dict[str, list[float]]:
    """Rates of every model, one value a round; the models take turns within each round.

    Only ratios within a round are comparable: a clock moves between rounds. One short untimed
    round goes first.
    """
    names = list(models)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            _synchronize(prompt.device)
            began = time.perf_counter()
            wanted = count if number else 8
            generate(models[name], prompt, wanted)
            _synchronize(prompt.device)
            if number:
                rates[name].append(wanted / (time.perf_counter() - began))
        progress((number + 1) / (rounds + 1))
    return rates


def median_ratio(rates: Mapping[str, list[float]], above: str, below: str) -> float:
    """Median over rounds of rate ``above`` / rate ``below``."""
    return statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))


@torch.no_grad()
def launches_per_step(model: Module, prompt: Tensor) -> int:
    """GPU kernels of one eager decode step with a dynamic cache; needs a GPU."""
    from flashnorm_triton.tuning.measure import count_launches

    step = cached(model)
    step(prompt)
    return count_launches(lambda: step(prompt[-1:])).kernels
