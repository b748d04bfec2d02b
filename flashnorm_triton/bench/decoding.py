"""Running a model's own ``generate``: watched, forced along given tokens, and compared.

Everything goes through ``generate``, so what is checked and counted is what a user runs: prefill,
then one call of the model a token, eager with a dynamic cache or compiled with a static one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from flashnorm_triton.tuning import measure

MODES = ("eager", "compiled")
LIMIT = 1.25
# Step t must be at least this many times closer to the reference at t than to that at t−1.
LEAST_MARGIN = 4.0
_PROFILED_STEP = 8  # past the steps in which a compiled step is recorded and warmed up


class Forced(LogitsProcessor):
    """Makes ``generate`` continue with given tokens, whatever the model prefers."""

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -math.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._prompt]] = 0
        return forced


def generate(model: Any, prompt: Tensor, new: int, mode: str, **options: Any) -> Any:
    """Greedy ``model.generate`` of exactly ``new`` tokens after prompt (1, P)."""
    if mode == "compiled":
        options["cache_implementation"] = "static"
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        **options,
    )


def forced_logits(model: Any, prompt: Tensor, tokens: Tensor, mode: str) -> Tensor:
    """The logits (T, V), float32, that ``generate`` sees at each step when led along ``tokens``."""
    out = generate(
        model,
        prompt,
        len(tokens),
        mode,
        logits_processor=LogitsProcessorList([Forced(tokens, prompt.shape[1])]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    if not torch.equal(out.sequences[0, prompt.shape[1] :], tokens):
        raise RuntimeError("generate did not follow the forced tokens")
    return torch.cat(out.logits)


def reference_logits(model64: Any, prompt: Tensor, tokens: Tensor) -> Tensor:
    """The same logits (T, V) from one pass of the float64 model over the whole sequence."""
    ids = torch.cat([prompt, tokens[None, :-1]], dim=1)
    return model64(ids, logits_to_keep=len(tokens), use_cache=False).logits[0]


@dataclass(frozen=True)
class Agreement:
    """Logits of the patched and the stock model against float64, over forced decode steps.

    ``margin`` is the least, over steps t ≥ 1, of (distance to the reference at t−1) / (distance
    to that at t): near or below 1 the model answers with the previous step.
    """

    rel_err: float
    rel_err_stock: float
    max_err: float
    margin: float

    @property
    def ratio(self) -> float:
        return self.rel_err / self.rel_err_stock

    @property
    def problem(self) -> str | None:
        """What is wrong, or None."""
        if not self.margin >= LEAST_MARGIN:
            return (
                f"decode steps are not the reference's: a step is only {self.margin:.3g} times "
                f"closer to step t than to t-1 (at least {LEAST_MARGIN})"
            )
        if not self.ratio <= LIMIT:
            return (
                f"logits err by {self.rel_err:.3g} of float64, {self.ratio:.3g} times the stock "
                f"model's {self.rel_err_stock:.3g} (limit {LIMIT})"
            )
        return None

    def fields(self) -> dict[str, Any]:
        names = ("rel_err", "rel_err_stock", "max_err", "margin", "ratio")
        values = {name: getattr(self, name) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def agreement(patched: Tensor, stock: Tensor, reference: Tensor) -> Agreement:
    """Compare forced logits (T, V) of both models with the float64 reference (T, V)."""
    wanted = reference.double()
    norm = torch.linalg.vector_norm
    off, off_stock = patched.double() - wanted, stock.double() - wanted
    now = norm(off[1:], dim=1)
    before = norm(patched[1:].double() - wanted[:-1], dim=1)
    return Agreement(
        rel_err=float(norm(off) / norm(wanted)),
        rel_err_stock=float(norm(off_stock) / norm(wanted)),
        max_err=float(torch.maximum(off.abs().max(), off_stock.abs().max())),
        margin=float((before / now).min()),
    )


def tokens_problem(
    stock: Tensor, patched: Tensor, prompt: Tensor, model64: Any, max_err: float
) -> tuple[int | None, str | None]:
    """First step at which greedy tokens (T,) differ, and what is wrong with that, if anything.

    Both models round, so they may part where the float64 model's logits of the two tokens are
    closer than twice the largest error seen (``max_err``); anywhere else it is a fault.
    """
    differs = (stock != patched).nonzero()
    if not len(differs):
        return None, None
    step = int(differs[0])
    ids = torch.cat([prompt, stock[None, :step]], dim=1)
    logits = model64(ids, logits_to_keep=1, use_cache=False).logits[0, -1]
    gap = abs(float(logits[stock[step]] - logits[patched[step]]))
    if gap <= 2 * max_err:
        return step, None
    return step, (
        f"greedy tokens part at step {step}, where float64 puts {gap:.3g} between them "
        f"(rounding explains at most {2 * max_err:.3g})"
    )


@dataclass
class Watch:
    """What the calls of the model during one ``generate`` cost."""

    profiled_step: int | None = None
    host_s: list[float] = field(default_factory=list)
    events: list[tuple[Any, Any]] = field(default_factory=list)
    launches: measure.Launches | None = None
    _profiler: Any = None
    _started: float = 0.0

    def before(self) -> None:
        if len(self.host_s) == self.profiled_step:
            from torch.profiler import ProfilerActivity, profile

            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profiler.__enter__()
        if torch.cuda.is_available():
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            self.events.append((start, torch.cuda.Event(enable_timing=True)))
        self._started = time.perf_counter()

    def after(self) -> None:
        self.host_s.append(time.perf_counter() - self._started)
        if self.events:
            self.events[-1][1].record()
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            self.launches = measure.tally(self._profiler.events())
            self._profiler = None

    def medians_ms(self) -> tuple[float, float | None]:
        """Host and device milliseconds of a decode step: medians over the later half of them."""
        half = len(self.host_s) // 2
        host = statistics.median(self.host_s[half:]) * 1e3
        if not self.events:
            return host, None
        torch.cuda.synchronize()
        spans = [start.elapsed_time(stop) for start, stop in self.events[half:]]
        return host, statistics.median(spans)


@contextmanager
def watching(model: Any, mode: str, watch: Watch) -> Iterator[None]:
    """Call the watch around every call that ``generate`` makes of the model.

    Eager calls are seen by hooks. A compiled step must not see hooks (they would be compiled
    into it), so there the callable that ``generate`` asks for is wrapped on this one instance.
    """
    if mode == "eager":
        hooks = [
            model.register_forward_pre_hook(lambda module, args: watch.before()),
            model.register_forward_hook(lambda module, args, out: watch.after()),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        return
    original = model.get_compiled_call

    def watched(config: Any) -> Callable[..., Any]:
        call = original(config)

        def timed(*args: Any, **kwargs: Any) -> Any:
            watch.before()
            out = call(*args, **kwargs)
            watch.after()
            return out

        return timed

    model.get_compiled_call = watched
    try:
        yield
    finally:
        del model.get_compiled_call


def step_costs(model: Any, prompt: Tensor, new: int, mode: str) -> dict[str, Any]:
    """Host and device ms of a decode step, its kernels, launching host calls and busy GPU ms.

    Two runs: one timed, one with a single step profiled. Without a GPU only the host's time.
    """
    timed = Watch()
    with watching(model, mode, timed):
        generate(model, prompt, new, mode)
    host_ms, step_ms = timed.medians_ms()
    costs: dict[str, Any] = {"host_ms": host_ms, "step_ms": step_ms, "launches": None}
    if torch.cuda.is_available():
        counted = Watch(profiled_step=min(_PROFILED_STEP, new - 2))
        with watching(model, mode, counted):
            generate(model, prompt, new, mode)
        if counted.launches is not None:
            costs["launches"] = counted.launches.kernels
            costs["host_calls"] = counted.launches.host_calls
            costs["gpu_busy_ms"] = counted.launches.busy_us / 1e3
    return costs
