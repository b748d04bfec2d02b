"""A generation in windows (runs of one cache) and chunks (steps held at a time)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flashnorm_triton.lag.following import Follower
from flashnorm_triton.lag.settings import Settings
from flashnorm_triton.lag.stepping import Decoder, Sampler


def generate(
    model: nn.Module,
    settings: Settings,
    prompt: Tensor,
    mask: Tensor | None,
    window: int,
    follower: Follower | None,
    progress: Callable[[float], None],
) -> list[Tensor]:
    """The tokens of a run, one tensor (T, B) a window of up to ``window`` tokens.

    A ``follower`` is shown every prompt and every chunk of steps. A new window goes on from the
    last tokens of the one before, as many as the prompt (B, P) has.
    """
    sampler = Sampler(settings.temperature, settings.top_k, settings.seed, prompt.device)
    length = prompt.shape[1]
    decoder = Decoder(model, settings.mode, settings.cache, len(prompt), length + window)
    texts: list[Tensor] = []
    done = 0
    while done < settings.tokens:
        count = min(window, settings.tokens - done)
        logits = decoder.prefill(prompt, mask)[:, -1]
        if follower is not None:
            follower.begin(prompt, mask, logits)
        tokens = [sampler(logits)]
        while len(tokens) < count:
            steps = min(settings.chunk, count - len(tokens))
            tokens += _chunk(decoder, sampler, follower, tokens[-1], steps)
            progress((done + len(tokens)) / settings.tokens)
        done += count
        texts.append(torch.stack(tokens))
        prompt, mask = torch.cat([prompt, texts[-1].T], 1)[:, -length:].contiguous(), None
    return texts


def _chunk(
    decoder: Decoder, sampler: Sampler, follower: Follower | None, token: Tensor, steps: int
) -> list[Tensor]:
    """The ``steps`` tokens after ``token`` (B,)."""
    tokens = [token]
    for place in range(steps):
        logits = decoder.step(tokens[-1])
        if follower is not None:
            follower.keep(place, logits)
        tokens.append(sampler(logits))
    if follower is not None:
        follower.compare(torch.stack(tokens[:-1], 1))
    return tokens[1:]
