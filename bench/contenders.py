"""One way of running a model, in a process of its own, timed in turn with the others.

Compiling takes most of a run's time and one core of the CPU. So every contender (a model, stock or
patched, at a batch size, in a mode) compiles in its own process, all at the same time, and then
waits. Their timings alternate: one round asks each for the GPU time of a few steps, while the
others do nothing. Contenders that measure on the GPU while they compile (max-autotune) do so one
by one, unless an earlier run has left what they chose in the compiler's cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MODES = ("eager", "graph", "compiled", "reduce-overhead", "max-autotune")
"""Plain calls; the same captured in a CUDA graph; ``torch.compile`` as it is, and with
``mode="reduce-overhead"``; ``mode="max-autotune-no-cudagraphs"`` captured in a CUDA graph."""
_COMPILER = {"compiled": None, "reduce-overhead": "reduce-overhead",
             "max-autotune": "max-autotune-no-cudagraphs"}  # fmt: skip
_PATIENCE_S = 400.0


@dataclass(frozen=True)
class Contender:
    """``level`` is "stock" or a level of ``patch``; ``task`` "decode" or "prefill"; ``tokens`` the
    places of the cache, or of the prompt."""

    model: str
    level: str
    mode: str
    batch: int
    tokens: int
    task: str = "decode"

    @property
    def name(self) -> str:
        return f"{self.model} batch {self.batch} {self.level} {self.mode}"


def _patched(model: Any, level: str) -> Any:
    from flashnorm_triton import patch

    return None if level == "stock" else patch(model, level=level, revertible=False)


class Steps:
    """A model that is ready to run the same step again and again."""

    def __init__(self, what: Contender, device: str) -> None:
        from bench import decoders

        self.what, self.device = what, device
        self.model = decoders.make(what.model, device)
        self.bytes = decoders.step_bytes(self.model, what.batch, what.tokens)
        self.handle = _patched(self.model, what.level)
        vocab = self.model.config.vocab_size
        torch.manual_seed(1)
        self.cache: Any = None
        length = what.tokens
        if what.task == "decode":
            self._fill_cache(vocab)
            length = 1
        self.tokens = torch.randint(1, vocab, (what.batch, length), device=device)
        forward = self._forward
        if what.mode in _COMPILER:
            backend = {"mode": _COMPILER[what.mode]} if device == "cuda" else {"backend": "eager"}
            forward = torch.compile(self._forward, fullgraph=True, **backend)
        self._run = self._captured(forward) if self._graphed else forward

    @property
    def _graphed(self) -> bool:
        return self.device == "cuda" and self.what.mode in ("graph", "max-autotune")

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.model(
            tokens, past_key_values=self.cache, use_cache=self.cache is not None, logits_to_keep=1
        )
        return out.logits

    def _fill_cache(self, vocab: int) -> None:
        """A static cache that is full but for the last eighth, where the timed steps write."""
        from transformers import StaticCache

        what = self.what
        self.cache = StaticCache(config=self.model.config, max_cache_len=what.tokens)
        self.filled = what.tokens - what.tokens // 8
        prompt = torch.randint(1, vocab, (what.batch, self.filled), device=self.device)
        self.model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @property
    def most(self) -> int:
        """Steps that may follow one another before the cache is full."""
        return max(1, self.what.tokens // 8) if self.cache is not None else 4

    def rewind(self) -> None:
        """Go back to where the prompt ended: what was written after it is not looked at."""
        for layer in self.cache.layers if self.cache is not None else ():
            length = layer.cumulative_length
            if isinstance(length, torch.Tensor):
                length.fill_(self.filled)
            if hasattr(layer, "cumulative_length_int"):  # windows count in Python as well
                layer.cumulative_length_int = self.filled

    def _captured(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.rewind()
                forward(self.tokens)
        torch.cuda.current_stream().wait_stream(stream)
        self.rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(self.tokens)
        self.graph = graph

        def run(tokens: torch.Tensor) -> torch.Tensor:
            graph.replay()
            return out

        return run

    def step(self) -> torch.Tensor:
        """One step; in reduce-overhead a new one of torch's own graph trees."""
        if self.what.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return self._run(self.tokens)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """What a step after the prompt gives, on the CPU: the logits (batch, vocabulary) and, of
        the last layer, the keys and values that it wrote into the cache."""
        self.rewind()
        found = [self.step()[:, -1].float().cpu()]
        if self.cache is not None:
            layer = self.cache.layers[-1]
            for written in (layer.keys, layer.values):
                found.append(written[:, :, self.filled].float().cpu())
        return tuple(found)

    def ms(self, steps: int) -> float:
        """Milliseconds of GPU time a step: ``steps`` of them, submitted behind one that is not
        timed, so that the GPU does not wait for the host."""
        self.rewind()
        if self.device != "cuda":
            started = time.perf_counter()
            for _ in range(steps):
                self.step()
            return (time.perf_counter() - started) * 1e3 / steps
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.step()
        start.record()
        for _ in range(steps):
            self.step()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / steps

    def facts(self) -> dict[str, Any]:
        """What is known of it beside its times: kernels of a step, its bytes."""
        found: dict[str, Any] = {"bytes": self.bytes, "launches": None, "host_calls": None}
        if self.device == "cuda":
            from flashnorm_triton.tuning import measure

            self.rewind()
            counted = measure.count_launches(self.step)
            found |= {"launches": counted.kernels, "host_calls": counted.host_calls}
            found["busy_ms"] = counted.busy_us / 1e3
        return found


def _serve(pipe: Any, what: Contender, device: str, undisturbed: Any) -> None:
    """The process of a contender: ready, then one answer a question until it is told to stop."""
    try:
        from bench import decoders  # noqa: F401  long imports, before anyone is kept waiting

        with torch.no_grad():
            with undisturbed or contextlib.nullcontext():
                steps = Steps(what, device)
                for _ in range(3):
                    steps.rewind()
                    steps.step()
            pipe.send(("ready", steps.most))
            while (question := pipe.recv()) is not None:
                pipe.send(("answer", getattr(steps, question[0])(*question[1:])))
    except EOFError:
        pass  # whoever asked is gone
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"[:1500]))
        traceback.print_exc()


class Group:
    """Contenders that are there at the same time and are timed in turn; a context manager.

    ``cached``: what max-autotune chooses is in the compiler's cache, so nobody waits for anybody.
    """

    def __init__(
        self, contenders: Sequence[Contender], device: str = "cuda", cached: bool = False
    ) -> None:
        self.contenders, self.device, self.cached = tuple(contenders), device, cached
        self.errors: dict[Contender, str] = {}
        self._pipes: dict[Contender, Any] = {}
        self._most: dict[Contender, int] = {}
        self._processes: list[Any] = []

    def __enter__(self) -> Group:
        # Every process would start a compiler for each core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        lock = None if self.cached else multiprocessing.get_context("spawn").Lock()
        for what in self.contenders:
            self._start(what, lock if what.mode == "max-autotune" else None)
        for what in self.contenders:
            self._await(what)
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self, what: Contender, lock: Any) -> None:
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(
            target=_serve, args=(its, what, self.device, lock), name=what.name
        )
        process.start()
        its.close()
        self._pipes[what] = mine
        self._processes.append(process)

    def _await(self, what: Contender) -> Any:
        pipe = self._pipes[what]
        try:
            kind, value = pipe.recv() if pipe.poll(_PATIENCE_S) else ("error", "no answer in time")
        except EOFError:
            kind, value = "error", "its process ended"
        if kind == "error":
            self.errors[what] = value
            del self._pipes[what]
            return None
        if kind == "ready":
            self._most[what] = value
        return value

    def ask(self, what: Contender, *question: Any) -> Any:
        """One answer of one contender; None, and ``errors`` says why, when it fails."""
        self._pipes[what].send(question)
        return self._await(what)

    def running(self, some: Sequence[Contender]) -> list[Contender]:
        """Those of ``some`` that are ready and have not failed."""
        return [what for what in some if what in self._pipes]

    def times(
        self, some: Sequence[Contender], rounds: int, steps: int, until: Callable[[], bool]
    ) -> dict[Contender, list[float]]:
        """GPU ms a step by round; each round asks all of ``some``, every other one backwards.

        Ends early once ``until`` says so, after three rounds at the least.
        """
        taken: dict[Contender, list[float]] = {what: [] for what in self.running(some)}
        for number in range(rounds + 1):
            if number > 3 and until():
                break
            for what in self.running(some)[:: -1 if number % 2 else 1]:
                ms = self.ask(what, "ms", min(steps, self._most[what]))
                if number and ms is not None:  # the first round is the warm-up
                    taken[what].append(ms)
        return {what: values for what, values in taken.items() if what in self._pipes}


def speedup(times: dict[Contender, list[float]], baseline: Contender, what: Contender) -> float:
    """The median of the rounds' ratios baseline / contender."""
    pairs = zip(times[baseline], times[what], strict=False)
    return statistics.median(one / other for one, other in pairs)
