"""A decode step in three forms (eager, compiled, a replayed CUDA graph), and teacher forcing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_WARM_UPS = 2  # steps run before a capture: steps of the text like any other


def new_cache(model: nn.Module, kind: Any, batch: int, length: int) -> Any:
    """A cache for ``batch`` rows of up to ``length`` tokens: "dynamic", "static" or kind(...)."""
    if callable(kind):
        return kind(model, batch, length)
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


def _cache_argument(model: nn.Module) -> str:
    # transformers renamed it; the old name warns at every call where both exist.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Text:
    """Tokens fed to a model in order, with the cache, mask and positions that belong to them.

    ``mask`` (B, P) is zero where a left-padded prompt is padding; None: there is none.
    """

    def __init__(
        self, model: nn.Module, kind: Any, batch: int, length: int, mask: Tensor | None
    ) -> None:
        self.model = model
        self.cache = new_cache(model, kind, batch, length)
        self.static = bool(getattr(self.cache, "is_compileable", False))
        self.seen = 0
        self._name = _cache_argument(model)
        self._pad = self._columns = None
        if mask is not None:
            self._pad = (mask == 0).sum(1, keepdim=True)
            self._columns = (torch.arange(length, device=mask.device) >= self._pad).long()

    def begin_again(self) -> None:
        """An empty text without padding in the same memory: graphs hold on to its addresses."""
        self.cache.reset()
        self.seen = 0
        if self._pad is not None:
            self._pad.zero_()
            self._columns.fill_(1)

    def arguments(self, ids: Tensor) -> dict[str, Any]:
        """The keyword arguments that feed ids (B, n) on top of what was seen."""
        stop = self.seen + ids.shape[1]
        places = torch.arange(self.seen, stop, device=ids.device).expand(ids.shape[0], -1)
        mask = None
        if self._pad is not None:
            places = (places - self._pad).clamp_min(0)
            mask = self._columns if self.static else self._columns[:, :stop]
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": places.contiguous(),
            "use_cache": True,
            self._name: self.cache,
        }

    def feed(self, ids: Tensor, call: Callable[..., Any] | None = None) -> Tensor:
        """Logits (B, n, V) of ids (B, n), which become part of the text."""
        arguments = self.arguments(ids)
        self.seen += ids.shape[1]
        return (call or self.model)(**arguments).logits


class Decoder:
    """What a generation runs of one model: a prefill, then a step a token, in one mode.

    Raises ValueError in mode "graph" for a cache that a graph cannot be captured with.
    """

    def __init__(self, model: nn.Module, mode: str, kind: Any, batch: int, length: int) -> None:
        self.model, self.mode = model, mode
        self._kind = kind or ("dynamic" if mode == "eager" else "static")
        self._sizes = (batch, length)
        self._text: Text | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._call = torch.compile(model.forward) if mode == "compiled" else None

    def prefill(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Begin a text with prompt ids (B, P); the logits (B, P, V) of it."""
        if self._text is not None and self._text.static and mask is None:
            self._text.begin_again()
        else:
            self._text = Text(self.model, self._kind, *self._sizes, mask)
            self._graph = None
        return self._text.feed(ids)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B,), in memory that the next step may write."""
        if self.mode != "graph":
            return self._text.feed(tokens[:, None], self._call)[:, -1]
        if self._graph is None:
            self._steps += 1
            if self._steps <= _WARM_UPS:
                return self._aside(tokens)
            self._capture(tokens)
        self._inputs["input_ids"].copy_(tokens[:, None])
        places = self._text.arguments(tokens[:, None])["position_ids"]
        self._inputs["position_ids"].copy_(places)
        self._graph.replay()
        self._text.seen += 1
        return self._logits

    def _aside(self, tokens: Tensor) -> Tensor:
        """A step on a stream of its own, as captures run: first calls allocate and try things."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            logits = self._text.feed(tokens[:, None])[:, -1]
        here.wait_stream(side)
        logits.record_stream(here)
        return logits

    def _capture(self, tokens: Tensor) -> None:
        layers = getattr(self._text.cache, "layers", [])
        counted = [layer for layer in layers if hasattr(layer, "cumulative_length_int")]
        if not self._text.static or counted:
            what = type(counted[0] if counted else self._text.cache).__name__
            raise ValueError(
                f"mode='graph': {what} counts its tokens in Python, which a replayed graph does "
                "not do; use mode='eager' or 'compiled'"
            )
        self._inputs = self._text.arguments(tokens[:, None].clone())
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self.model(**self._inputs).logits[:, -1]


class Sampler:
    """Chooses tokens: greedily, or at a temperature with noise that a seed fixes, step by step."""

    def __init__(
        self, temperature: float, top_k: int | None, seed: int, device: torch.device
    ) -> None:
        self._temperature, self._top_k = temperature, top_k
        self._draw = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (B,) of logits (B, V)."""
        if self._temperature == 0:
            return logits.argmax(-1)
        wide = logits.float() / self._temperature
        if self._top_k is not None and self._top_k < wide.shape[-1]:
            least = wide.topk(self._top_k).values[:, -1:]
            wide = wide.masked_fill(wide < least, -torch.inf)
        # The race of exponential clocks: the same seed gives the same noise to any two models.
        clocks = torch.empty_like(wide).exponential_(generator=self._draw)
        return (wide.softmax(-1) / clocks).argmax(-1)
