"""Generation with a cache, judged step by step against float64.

Two bf16 models part ways at the first near-tie, and from there on their texts have nothing to do
with each other. So every greedy token is judged on its own: would the float64 model, given the
same text so far, have chosen it, or was the choice within rounding of a tie?

A greedy text may repeat itself, and then a model that lags one token behind looks right. So the
cached decode is also run over held-out text, where its logits at step t have to match float64 at t
and must not match float64 at t - 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache

from flashnorm_triton.demo.accuracy import ERROR_RATIO
from flashnorm_triton.demo.checks import Check, at_least, at_most

AGREEMENT_LOSS = 0.05  # near-ties: a percent of the tokens in bf16, stock or patched
LAG_FACTOR = 5.0


@dataclass(frozen=True)
class Choices:
    """Of a greedy text: ``agree`` is the share of tokens that float64 would have chosen too,
    ``gap`` the most (in logits) by which it prefers its own choice to the token taken."""

    agree: float
    gap: float


@dataclass(frozen=True)
class Decoding:
    """Relative Frobenius error of decode logits against float64 at t, and shifted to t - 1."""

    at_t: float
    at_t_minus_1: float


@torch.no_grad()
def generate(model: Module, prompt: Tensor, count: int) -> Tensor:
    """``count`` greedy tokens after prompt (P,), never ending early; returns (count,)."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
    )
    return out[0, len(prompt) :]


@torch.no_grad()
def judge(exact: Module, prompt: Tensor, tokens: Tensor, barred: int) -> Choices:
    """Score tokens (n,) that followed prompt (P,); ``barred`` is the end token never generated."""
    text = torch.cat([prompt, tokens])
    logits = exact(text[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    logits[:, barred] = -torch.inf
    best, choice = logits.max(-1)
    taken = logits.gather(-1, tokens[:, None])[:, 0]
    return Choices(agree=(choice == tokens).double().mean().item(), gap=(best - taken).max().item())


def cached(model: Module) -> Callable[[Tensor], Tensor]:
    """A call that feeds tokens (n,) on top of all those before; returns their logits (n, V)."""
    cache = DynamicCache(config=model.config)
    # transformers renamed the argument; the old name warns at every call where both exist.
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[None], use_cache=True, **{name: cache}).logits[0]

    return step


@torch.no_grad()
def decode(model: Module, text: Tensor, prefill: int) -> Tensor:
    """Logits (T - prefill, V) of text (T,): a prefill, then one cached step a token."""
    step = cached(model)
    step(text[:prefill])
    return torch.stack([step(token[None])[-1] for token in text[prefill:]])


@torch.no_grad()
def compare_decode(model: Module, exact: Module, text: Tensor, prefill: int) -> Decoding:
    """Decode text (T,) step by step and compare with one float64 pass over all of it."""
    reference = exact(text[None], use_cache=False).logits[0].double()
    got = decode(model, text, prefill).double()

    def error(want: Tensor) -> float:
        return ((got - want).norm() / want.norm()).item()

    return Decoding(
        at_t=error(reference[prefill:]), at_t_minus_1=error(reference[prefill - 1 : -1])
    )


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """The first index at which two texts differ; None when they are equal."""
    differs = (a != b).nonzero()
    return int(differs[0]) if len(differs) else None


def equality_note(first: int | None, count: int) -> Check:
    """Where the texts of stock and patched part; told, not judged (see above)."""
    value = f"all {count}" if first is None else f"first {first}"
    return Check("greedy tokens equal to stock's", value, "told only", True)


def choice_checks(stock: Choices, patched: Choices, rounding: float) -> list[Check]:
    """``rounding``: the stock model's own largest logit error against float64.

    A token other than float64's choice needs both logits off by at most 1.25 x rounding each.
    """
    return [
        at_least("greedy tokens as float64's", patched.agree, stock.agree - AGREEMENT_LOSS),
        at_most("greedy choice short of best, logits", patched.gap, 2 * ERROR_RATIO * rounding),
    ]


def decode_checks(stock: Decoding, patched: Decoding) -> list[Check]:
    """The cached decode: as near to float64 as stock, and to the right step of it."""
    return [
        at_most("decode logit error, patched / stock", patched.at_t / stock.at_t, ERROR_RATIO),
        at_least("decode error at t-1 / at t", patched.at_t_minus_1 / patched.at_t, LAG_FACTOR),
    ]
