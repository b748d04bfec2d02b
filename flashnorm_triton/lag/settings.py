"""What ``find_lag`` is asked to do, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MODES = ("eager", "compiled", "graph")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class Settings:
    """``tokens`` to generate a row; ``mode`` of the decode step; ``cache`` "dynamic", "static" or
    None (what fits the mode); ``temperature`` 0 is greedy; ``chunk`` steps are held and compared at
    a time; ``restart``: begin anew with the last tokens as the prompt when positions run out."""

    tokens: int = 4096
    mode: str = "eager"
    cache: Any = None
    layers: bool | str = False
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0
    chunk: int = 64
    restart: bool = False
    repeats: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"tokens={self.tokens}: at least 2, to tell step t from step t-1")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: use one of {', '.join(MODES)}")
        if self.layers not in (False, True, "sites"):
            raise ValueError(f"layers={self.layers!r}: use False, True or 'sites'")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: at least 1, or None for all tokens")
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: at least 1 step at a time")
        if not callable(self.cache) and self.cache not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache={self.cache!r}: use 'dynamic', 'static' or a function of "
                "(model, batch, length) that makes one"
            )
        if self.mode == "graph" and self.cache == "dynamic":
            raise ValueError(
                "mode='graph' with a dynamic cache: its tensors move as it grows, which a captured "
                "graph cannot follow; use cache='static' or mode='eager'"
            )


def positions_of(model: nn.Module) -> int | None:
    """The most positions a model can tell apart; None when its config sets no limit."""
    config = text_config(model)
    return next((int(getattr(config, n)) for n in _POSITIONS if getattr(config, n, None)), None)


def text_config(model: nn.Module) -> Any:
    """The config of a model's language part."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_model(model: nn.Module, device: torch.device, mode: str) -> None:
    """Raise ValueError for a model or a mode that is not served."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder: only decoder-only language models are generated with "
            "here; compare its logits by fn.verify_checkpoint or its own generate"
        )
    if (
        not hasattr(model, "config")
        or getattr(model, "get_output_embeddings", lambda: None)() is None
    ):
        raise ValueError(f"{name} has no language-model head: give a causal language model")
    if mode == "graph" and device.type != "cuda":
        raise ValueError(
            f"mode='graph' on {device}: only a GPU captures graphs; use mode='eager' or 'compiled'"
        )


def window_of(model: nn.Module, prompt: Tensor, settings: Settings) -> int:
    """The tokens that one run of the cache generates after prompt (B, P).

    Raises ValueError when the model's positions do not reach and ``restart`` is off.
    """
    limit, length = positions_of(model), prompt.shape[1]
    if limit is None or length + settings.tokens <= limit:
        return settings.tokens
    room = limit - length
    if room < max(2, length):
        raise ValueError(
            f"the prompt has {length} tokens and the model {limit} positions, which leaves "
            f"{max(room, 0)} to generate: give a shorter prompt"
        )
    if not settings.restart:
        raise ValueError(
            f"{settings.tokens} tokens after a prompt of {length} need "
            f"{length + settings.tokens} positions, the model has {limit}: ask for at most {room}, "
            "or restart (--restart): it goes on with the last tokens as a new prompt whenever the "
            "positions run out"
        )
    return room
