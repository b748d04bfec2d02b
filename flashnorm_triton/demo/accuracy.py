"""Logits of the stock and the patched model against float64, over held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from flashnorm_triton.demo.checks import Check, at_most

ERROR_RATIO = 1.25  # the numerics contract: patched error over the stock model's own
# The one largest of tens of millions of errors moves by a quarter between two equally good runs.
EXTREME_RATIO = 2.0
PERPLEXITY_RATIO = 1.005


@dataclass
class Errors:
    """One model's deviation from the float64 logits; ``nll`` sums nats over ``tokens``."""

    square: float = 0.0
    reference_square: float = 0.0
    largest: float = 0.0
    largest_sum: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    by_position: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Logits and exact (L, V), targets (L,)."""
        off = logits.double() - exact
        self.square += off.square().sum().item()
        self.reference_square += exact.square().sum().item()
        # torch's max, unlike Python's, keeps a NaN.
        each = off.abs().amax(-1)
        self.largest = torch.stack([each.new_tensor(self.largest), each.max()]).max().item()
        self.largest_sum += each.sum().item()
        self.nll += torch.nn.functional.cross_entropy(
            logits.double(), targets, reduction="sum"
        ).item()
        self.tokens += len(targets)
        self.by_position.append((off.norm(dim=-1) / exact.norm(dim=-1)).cpu())

    @property
    def relative(self) -> float:
        """Relative Frobenius error over all logits."""
        return math.sqrt(self.square / self.reference_square)

    @property
    def token_largest(self) -> float:
        """The largest error among a token's logits, averaged over the tokens."""
        return self.largest_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    def profile(self) -> Tensor:
        """Relative error by position in the window, averaged over the windows of full length."""
        longest = max(len(p) for p in self.by_position)
        return torch.stack([p for p in self.by_position if len(p) == longest]).mean(0)


def windows(text: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) of up to ``length`` tokens each, without overlap; both (L,)."""
    for at in range(0, len(text) - 1, length):
        piece = text[at : at + length + 1]
        yield piece[:-1], piece[1:]


@torch.no_grad()
def measure(
    models: Mapping[str, Module],
    exact: Module,
    text: Tensor,
    length: int,
    progress: Callable[[float], None],
) -> dict[str, Errors]:
    """Errors of every model against ``exact`` (float64) over text (T,), in windows of ``length``.

    A NaN in any logit makes a model's figures NaN, which no check passes.
    """
    errors = {name: Errors() for name in models}
    for inputs, targets in windows(text, length):
        reference = exact(inputs[None], use_cache=False).logits[0].double()
        for name, model in models.items():
            errors[name].add(model(inputs[None], use_cache=False).logits[0], reference, targets)
        done = next(iter(errors.values())).tokens
        progress(done / (len(text) - 1))
    return errors


def checks(stock: Errors, patched: Errors) -> list[Check]:
    """The patched model against the stock one: logits and held-out perplexity."""
    return [
        at_most("logit error, patched / stock", patched.relative / stock.relative, ERROR_RATIO),
        at_most(
            "largest error of a token, ratio",
            patched.token_largest / stock.token_largest,
            ERROR_RATIO,
        ),
        at_most("largest error of all, ratio", patched.largest / stock.largest, EXTREME_RATIO),
        at_most(
            "held-out perplexity, ratio", patched.perplexity / stock.perplexity, PERPLEXITY_RATIO
        ),
    ]


def perplexity_check(stock: Errors, recorded: float) -> Check:
    """The stock model against its training's own figure: are these the weights that shipped?"""
    ratio = stock.perplexity / recorded
    return at_most("stock perplexity / recorded", ratio, PERPLEXITY_RATIO)
