"""One way of running a model, in a process of its own, timed in turn with the others.

Compiling takes most of a run's time and one core of the CPU. So every contender that compiles (a
model, stock or patched, at a batch size, in a mode) does so in its own process, all at the same
time, and then waits; those that compile nothing share one. Their timings alternate: one round asks
each for the GPU time of a few steps, while the others do nothing. Contenders that measure on the
GPU while they compile (max-autotune) do so one by one, unless an earlier run has left what they
chose in the compiler's cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from flashnorm_triton.bench import generation, quantizing, rungs

MODES = ("eager", "graph", "compiled", "reduce-overhead", "max-autotune")
"""Plain calls; the same captured in a CUDA graph; ``torch.compile`` as it is, and with
``mode="reduce-overhead"``; ``mode="max-autotune-no-cudagraphs"`` captured in a CUDA graph."""
_COMPILER = {"compiled": None, "reduce-overhead": "reduce-overhead",
             "max-autotune": "max-autotune-no-cudagraphs"}  # fmt: skip
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Contender:
    """``level`` is "stock", a level of ``patch`` or a rung of the ladder (rungs.py); ``task``
    "decode", "prefill" or "generate"; ``tokens`` the places of the cache, those of the prompt, or
    those to generate; ``model`` what ``decoders.make`` takes. ``quantization``: of the weights
    (quantizing.py). ``plans``: what problems of the model run, where the package does not choose.
    """

    model: str
    level: str
    mode: str
    batch: int
    tokens: int
    task: str = "decode"
    dtype: str = "bfloat16"
    quantization: str = "none"
    plans: rungs.Forced = ()

    @property
    def name(self) -> str:
        told = "" if self.quantization == "none" else f" {self.quantization}"
        return f"{self.model} batch {self.batch} {self.level} {self.mode}{told}"

    @property
    def compiles(self) -> bool:
        """Whether it is compiled, in a process of its own."""
        return self.mode in _COMPILER

    @property
    def setup(self) -> tuple[Any, ...]:
        """What contenders that share a process have in common."""
        return self.model, self.level, self.dtype, self.quantization, self.plans


def _patched(model: Any, level: str) -> Any:
    from flashnorm_triton import patch

    if level in rungs.RUNGS:
        return rungs.install(model, level)
    return patch(model, level=level, revertible=False)


class Loaded:
    """A model, stock or patched, for all contenders of a process."""

    def __init__(
        self,
        model: str,
        level: str,
        device: str,
        dtype: str = "bfloat16",
        quantization: str = "none",
    ) -> None:
        from flashnorm_triton.bench import decoders

        self.model, self.device = decoders.make(model, device, dtype=dtype), device
        # Of the model as it is before it is patched: with no cache, and with a place of it.
        self._bytes = [decoders.step_bytes(self.model, 1, places) for places in (0, 1)]
        self.library = quantizing.quantize(self.model, quantization)
        self.handle = _patched(self.model, level)

    def step_bytes(self, batch: int, tokens: int) -> int:
        """Least bytes that a step reads."""
        none, one = self._bytes
        return none + batch * tokens * (one - none)


class Steps:
    """A model that is ready to run the same step again and again."""

    def __init__(self, what: Contender, loaded: Loaded) -> None:
        self.what, self.device, self.model = what, loaded.device, loaded.model
        self.handle, self.library = loaded.handle, loaded.library
        self.bytes = loaded.step_bytes(what.batch, what.tokens)
        vocab = self.model.config.vocab_size
        torch.manual_seed(1)
        self.cache: Any = None
        length = what.tokens
        if what.task == "decode":
            self._fill_cache(vocab)
            length = 1
        self.tokens = torch.randint(1, vocab, (what.batch, length), device=self.device)
        forward = self.forward
        if what.mode in _COMPILER:
            on_gpu = self.device == "cuda"
            backend = {"mode": _COMPILER[what.mode]} if on_gpu else {"backend": "eager"}
            forward = torch.compile(self.forward, fullgraph=True, **backend)
        self._run = self._captured(forward) if self.graphed else forward
        for _ in range(3):
            self.rewind()
            self.step()

    @property
    def graphed(self) -> bool:
        """Whether a step is one replay of a graph of the model's calls."""
        return self.device == "cuda" and self.what.mode in ("graph", "max-autotune")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A call of the model, as it is before it is compiled or captured."""
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

    def profile(self) -> dict[str, Any]:
        """What a step's launches are (profiling.py)."""
        from flashnorm_triton.bench import profiling

        return profiling.of(self)

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


def steps_of(what: Contender, loaded: Loaded) -> Any:
    """A contender that is ready to be asked."""
    if what.task == "generate":
        return generation.Generation(what, loaded)
    return Steps(what, loaded)


def _planned(plans: rungs.Forced) -> contextlib.AbstractContextManager[None]:
    """A block in which the problems of a model run the plans that were given."""
    if not plans:
        return contextlib.nullcontext()
    from flashnorm_triton import runtime

    index = torch.cuda.current_device()
    return rungs.only(plans, runtime.device_facts(index), torch.cuda.get_device_name(index))


def _serve(pipe: Any, contenders: Sequence[Contender], device: str, undisturbed: Any) -> None:
    """The process of contenders that share a model: tells of each that it is ready, or why not,
    then gives one answer a question until it is told to stop."""
    ready: dict[Contender, Any] = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the asking process's
    with torch.no_grad(), _planned(contenders[0].plans):
        loaded = None
        for what in contenders:
            try:
                kind = what.dtype, what.quantization
                loaded = loaded or Loaded(what.model, what.level, device, *kind)
                with undisturbed or contextlib.nullcontext():
                    ready[what] = steps_of(what, loaded)
                pipe.send((what, "ready", ready[what].most))
            except BaseException as error:
                pipe.send((what, "error", f"{type(error).__name__}: {error}"[:1500]))
                traceback.print_exc()
        with contextlib.suppress(EOFError):  # whoever asked is gone
            while (question := pipe.recv()) is not None:
                what, name, *arguments = question
                try:
                    pipe.send((what, "answer", getattr(ready[what], name)(*arguments)))
                except Exception as error:
                    pipe.send((what, "error", f"{type(error).__name__}: {error}"[:1500]))


class Group:
    """Contenders that are there at the same time and are timed in turn; a context manager.

    Those that compile nothing share a process. ``patience`` is the number of seconds after which
    who is not ready is left out. ``cached``: what max-autotune chooses is in the compiler's cache,
    so nobody waits for anybody. ``log`` is told when each is ready.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        device: str = "cuda",
        *,
        patience: float = 300.0,
        cached: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.contenders, self.device, self.cached = tuple(contenders), device, cached
        self.patience, self.log = patience, log
        self.errors: dict[Contender, str] = {}
        self._pipes: dict[Contender, Any] = {}
        self._most: dict[Contender, int] = {}
        self._processes: list[tuple[Any, Any]] = []

    def __enter__(self) -> Group:
        try:
            self._begin()
        except BaseException:  # Ctrl-C, too: nothing may go on compiling
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self._end(10.0 if kind is None or issubclass(kind, Exception) else 0.0)

    def _begin(self) -> None:
        # Every process would start a compiler for each core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        lock = None if self.cached else multiprocessing.get_context("spawn").Lock()
        hosts: dict[Any, list[Contender]] = {}
        for what in sorted(self.contenders, key=lambda what: what.compiles):
            hosts.setdefault(what if what.compiles else what.setup, []).append(what)
        for sharing in hosts.values():
            self._start(sharing, lock if sharing[0].mode == "max-autotune" else None)
        self.log(f"{len(self.contenders)} contenders start in {len(hosts)} processes")
        self._gather(time.monotonic() + self.patience)

    def _end(self, seconds: float) -> None:
        """Tell the processes to end, and end them after so long."""
        for _, pipe in self._processes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        ended = time.monotonic() + seconds
        for process, _ in self._processes:
            process.join(max(0.1, ended - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self, sharing: Sequence[Contender], lock: Any) -> None:
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(its, sharing, self.device, lock))
        process.start()
        its.close()
        self._processes.append((process, mine))
        self._pipes |= dict.fromkeys(sharing, mine)

    def _gather(self, ended: float) -> None:
        """Wait until every contender is ready or has failed, but not for ever."""
        while waiting := [w for w in self.contenders if w in self._pipes and w not in self._most]:
            pipes = list({id(self._pipes[w]): self._pipes[w] for w in waiting}.values())
            found = connection.wait(pipes, max(0.0, ended - time.monotonic()))
            for pipe in found:
                self._hear(pipe)
            if not found:
                # A process that is still at one of its contenders answers for none.
                busy = [self._pipes[what] for what in waiting]
                for what in [w for w, pipe in self._pipes.items() if pipe in busy]:
                    self._fail(what, f"not ready after {self.patience:.0f} s")

    def _hear(self, pipe: Any) -> tuple[str, Any]:
        """The next message of a process, taken in: its kind and, but for an error, its value."""
        try:
            what, kind, value = pipe.recv()
        except (EOFError, OSError):
            for what in [w for w, its in self._pipes.items() if its is pipe]:
                self._fail(what, "its process ended")
            return "error", None
        if kind == "error":
            self._fail(what, value)
            return kind, None
        if kind == "ready":
            self._most[what] = value
            self.log(f"{what.name}: ready")
        return kind, value

    def _fail(self, what: Contender, why: str) -> None:
        self.errors[what] = why
        self._pipes.pop(what, None)
        self.log(f"{what.name}: {why}")

    def ask(self, what: Contender, *question: Any) -> Any:
        """One answer of one contender; None, and ``errors`` says why, when it fails."""
        pipe = self._pipes.get(what)
        if pipe is None:  # another one of its process has taken it down
            return None
        pipe.send((what, *question))
        if not pipe.poll(_ANSWER_S):
            self._fail(what, f"no answer in {_ANSWER_S:.0f} s")
            return None
        return self._hear(pipe)[1]

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
