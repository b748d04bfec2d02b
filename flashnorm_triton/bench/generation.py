"""A model that is asked, again and again, for what its own ``generate`` costs a token."""

from __future__ import annotations

import time
from typing import Any

import torch

from flashnorm_triton.bench import decoding

PROMPT = 64
"""Tokens of the prompt, whose forward is a part of every run."""


class Generation:
    """Eager greedy ``generate`` of ``what.tokens`` tokens, at batch 1, with a dynamic cache.

    Answers what ``contenders.Steps`` answers, a token of ``generate`` being a step.
    """

    def __init__(self, what: Any, loaded: Any) -> None:
        self.what, self.model, self.device = what, loaded.model, loaded.device
        self.bytes = loaded.step_bytes(1, PROMPT + what.tokens // 2)
        vocab = self.model.config.vocab_size
        torch.manual_seed(1)
        self.prompt = torch.randint(1, vocab, (1, PROMPT), device=self.device)
        self.forced = torch.randint(1, vocab, (what.tokens,), device=self.device)
        self.ms(min(4, what.tokens))

    @property
    def most(self) -> int:
        return self.what.tokens

    def logits(self) -> tuple[torch.Tensor, ...]:
        """The logits (T, vocabulary) on the CPU, when led along tokens drawn at random: a step that
        answers for another one is as far off as it can be."""
        return (decoding.forced_logits(self.model, self.prompt, self.forced, "eager").cpu(),)

    def ms(self, steps: int) -> float:
        """Milliseconds a new token of one whole call, by the host's clock."""
        self._wait()
        started = time.perf_counter()
        decoding.generate(self.model, self.prompt, steps, "eager")
        self._wait()
        return (time.perf_counter() - started) * 1e3 / steps

    def facts(self) -> dict[str, Any]:
        """Kernels, host calls and the GPU's busy time of a step, its bytes."""
        costs = decoding.step_costs(self.model, self.prompt, self.what.tokens, "eager")
        return {
            "bytes": self.bytes,
            "launches": costs["launches"],
            "host_calls": costs.get("host_calls"),
            "busy_ms": costs.get("gpu_busy_ms"),
        }

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
