"""Tracing a model's double: which modules read each norm's output, and what stands in the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from flashnorm_triton.models.examples import guesses
from flashnorm_triton.models.flow import Follower, leaves
from flashnorm_triton.models.integers import are_real, is_real
from flashnorm_triton.models.linears import linear_kind, linear_sizes
from flashnorm_triton.models.repeats import Repeats
from flashnorm_triton.models.rows import UNSEEN
from flashnorm_triton.models.shadow import (
    SharedFakes,
    faked,
    make_shadow,
    options_of,
    run_once,
    without_logging,
)
from flashnorm_triton.models.sightings import PACKED, Flow, Tag

# A module that asks for values there are none of (an expert loop over the tokens' choices).
_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass
class Trace:
    """What was seen. ``inputs``: the norms that feed each module with weights (None: other data).

    ``borrowed`` maps a linear or norm to a foreign module whose code reads its weight. ``failure``
    says why the model could not be followed at all. ``on_meta``: it has no weights in memory.
    ``kinds`` says of each linear what it is (:func:`flashnorm_triton.models.linears.linear_kind`);
    ``calls`` holds the arguments of the last call of every module that has children, ``in_tuples``
    the modules that returned a tuple.
    """

    flows: dict[str, Flow]
    kinds: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, set[str | None]] = field(default_factory=dict)
    borrowed: dict[str, str] = field(default_factory=dict)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    in_tuples: set[str] = field(default_factory=set)
    failure: str | None = None
    on_meta: bool = False


class ShapeMismatch(RuntimeError):
    """A module of the rehearsed model returned other shapes than the stock one."""


@dataclass(frozen=True)
class Rehearsal:
    """A site to rehearse. Packed: the norm emits ``width`` columns, each linear takes a range.

    Passed through (``columns`` is None): the norm returns its input.
    """

    norm: str
    columns: Mapping[str, tuple[int, int]] | None

    @property
    def width(self) -> int:
        """The number of packed output columns N."""
        return max(stop for _, stop in self.columns.values())


class Tracer:
    """Runs the double of one model, stock or rehearsed, and watches its modules."""

    def __init__(
        self,
        model: nn.Module,
        norms: Iterable[str],
        example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    ) -> None:
        kinds = {name: linear_kind(module) for name, module in model.named_modules()}
        self.trace = Trace(
            {name: Flow(name) for name in norms},
            {name: kind for name, kind in kinds.items() if kind is not None},
            on_meta=all(parameter.is_meta for parameter in model.parameters()),
        )
        self._example_inputs = example_inputs
        self._call_with: tuple[Any, dict[str, Any]] | None = None
        self._stack: list[str] = []
        self._packed: dict[str, int] = {}
        self._passed: set[str] = set()
        self._columns: dict[str, tuple[int, int]] = {}
        self._log: list[tuple[str, Any]] = []
        self._expected: list[tuple[str, Any]] | None = None
        self.failed_at: str | None = None
        self._fakes = SharedFakes(allow_non_fake_inputs=True)
        self._shadow = make_shadow(model, self._fakes)
        self._classes: dict[str, str] = {}
        owners: dict[int, tuple[str, Tensor]] = {}
        for name, module in self._shadow.named_modules():
            self._classes[name] = type(module).__name__
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), (name, parameter))
            forward = type(module).forward.__get__(module)
            module.forward = functools.wraps(forward)(
                functools.partial(self._call, name, module, forward)
            )
        closed = {*self.trace.kinds, *self.trace.flows}
        self._follower = Follower(self._stack, self._classes, owners, closed)
        self._repeats = Repeats(self._shadow, self._mark, self)

    def follow(self) -> Trace:
        """Trace the stock model in evaluation and in training mode (dropout, jitter)."""
        self._follow()
        if self._repeats.doubt or (self.trace.failure and self._repeats.used):
            self._repeats.stop()
            self._reset()
            self._call_with, self.trace.failure = None, None
            self._follow()
        self._repeat_findings()
        return self.trace

    def _follow(self) -> None:
        trace = self.trace
        try:
            self._run(training=True, decode=False)
            for flow in trace.flows.values():
                flow.calls, flow.consumers = 0, {}
            self._run(training=False, decode=True)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:200]
            trace.failure = (
                f"the model could not be followed: {type(error).__name__} in "
                f"{self.failed_at or 'its forward'}: {text}"
            )
        trace.borrowed = dict(self._follower.borrowed)

    def _repeat_findings(self) -> None:
        """Write down of the layers that were repeated what was seen of those that they are like."""
        trace = self.trace
        for moved, told in self._repeats.pairs():
            for path in [path for path in trace.flows if moved(path) != path]:
                trace.flows[moved(path)] = trace.flows[path].of_another(moved, told)
            for path in [path for path in trace.inputs if moved(path) != path]:
                norms = trace.inputs[path]
                trace.inputs[moved(path)] = {n if n is None else moved(n) for n in norms}
            for path in [path for path in trace.borrowed if moved(path) != path]:
                trace.borrowed[moved(path)] = told(trace.borrowed[path])
            for path in [path for path in trace.calls if moved(path) != path]:
                trace.calls[moved(path)] = trace.calls[path]
            trace.in_tuples |= {moved(path) for path in trace.in_tuples}

    def rehearse(self, sites: Iterable[Rehearsal]) -> str | None:
        """Run with these sites fused; None when every module returns the shapes it did before.

        Otherwise the name of the module where the two part. Call after :meth:`follow`.
        """
        for site in sites:
            if site.columns is None:
                self._passed.add(site.norm)
            else:
                self._packed[site.norm] = site.width
                self._columns.update(site.columns)
        self._expected = self._log
        try:
            failed_at = self._rehearsed()
            if failed_at is not None and self._repeats.used:
                with self._repeats.paused():
                    failed_at = self._rehearsed()
            return failed_at
        finally:
            self._log, self._expected = self._expected, None
            self._packed, self._columns, self._passed = {}, {}, set()

    def _rehearsed(self) -> str | None:
        self._log, self.failed_at = [], None
        try:
            self._run(training=False, decode=False, role=self._role)
        except Exception:
            return self.failed_at or ""
        return None

    def _role(self, name: str) -> Any:
        """What is put in a module's place in a rehearsal."""
        return self._packed.get(name), name in self._passed, self._columns.get(name)

    def _mark(self, name: str) -> Any:
        """What else than its attributes tells a module from others."""
        return self.trace.kinds.get(name), name in self.trace.flows

    def _run(self, training: bool, decode: bool, role: Callable[[str], Any] | None = None) -> None:
        self._shadow.train(training)
        self._log, self.failed_at = [], None
        self._stack.clear()
        follower = self._follower
        follower.forget()
        self._repeats.start(role)
        with ExitStack() as stack:
            stack.enter_context(without_logging())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for device_type in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device_type, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(self._fakes)
            stack.enter_context(follower)
            self._pass(decode)
        self._repeats.end()
        for tag in {id(tag): tag for _, tag in follower.tags.values()}.values():
            tag.flow.call_sets.add(frozenset(tag.consumers))

    def _pass(self, decode: bool) -> None:
        """One forward with the first inputs and options that the model takes, found out once."""
        if self._call_with is not None:
            inputs, options = self._call_with
            self._follower.counting = are_real(inputs)
            run_once(self._shadow, inputs, options, self._returned, decode)
            return
        follower, first = self._follower, None
        with follower.looking_away():
            if self._example_inputs is not None:
                choices = [faked(self._example_inputs, keep) for keep in (None, is_real)]
            else:
                choices = list(guesses(self._shadow))
            all_options = options_of(self._shadow, self._example_inputs)
        for inputs in choices:
            follower.counting = are_real(inputs)
            for options in all_options:
                try:
                    run_once(self._shadow, inputs, options, self._returned, decode)
                except Exception as error:
                    first = first or (error, self.failed_at)
                    self._reset()
                    continue
                self._call_with = inputs, options
                return
        error, self.failed_at = first
        raise error

    def _reset(self) -> None:
        """Forget an attempt that failed."""
        self._repeats.restart()
        self._stack.clear()
        self._follower.forget()
        self._log, self.failed_at = [], None
        trace, borrowed = self.trace, self._follower.borrowed
        for seen in (trace.inputs, trace.calls, trace.in_tuples, borrowed):
            seen.clear()
        for name, flow in trace.flows.items():
            flow.__init__(name)

    def _returned(self, output: Any) -> None:
        for key, value in output.items() if isinstance(output, Mapping) else [("", output)]:
            for tag in self._follower.tags_in(value):
                tag.flow.returned.setdefault("its output is also an output of the model", "")
                tag.flow.outputs.setdefault(key)

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._follower.quiet:
            return forward(*args, **kwargs)
        run = functools.partial(self._visit, name, module, forward, args, kwargs)
        if name in self._repeats.groups:
            return self._repeats.call(name, args, kwargs, run)
        return run()

    def _visit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self._stack.append(name)
        try:
            if name in self._packed:
                output = args[0].new_empty((*args[0].shape[:-1], self._packed[name]))
            elif name in self._passed:
                output = args[0]
            elif name in self._columns:
                start, stop = self._columns[name]
                output = args[0].narrow(-1, start, stop - start)
            else:
                output = self._observed(name, module, forward, args, kwargs)
            self._compare(name, output)
            return output
        except Exception:
            self.failed_at = self.failed_at or name
            raise
        finally:
            self._stack.pop()

    def _observed(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        follower = self._follower
        if module._modules:
            self.trace.calls[name] = args, kwargs
        tags = follower.tags_in((args, kwargs))
        for tag in tags:
            tag.flow.readers.setdefault(name)
        sources = self.trace.inputs.setdefault(name, set())
        sources.update([tag.flow.norm for tag in tags] or [None])
        if name in self.trace.flows:
            return self._norm(name, forward, args, kwargs, tags)
        kind = self.trace.kinds.get(name)
        if kind is not None and self._fits(module, args, kwargs):
            return self._linear(name, kind, module, args, kwargs, tags)
        output = self._unseen(name, module, forward, args, kwargs, tags)
        if isinstance(output, tuple):
            self.trace.in_tuples.add(name)
        for tag in follower.tags_in(output):
            tag.flow.readers.setdefault(name)
            if isinstance(output, Mapping):
                for key, value in output.items():
                    if tag in follower.tags_in(value):
                        tag.flow.returned.setdefault(
                            f"its output is also returned as {key} by {self._follower.where()}", key
                        )
        return output

    def _unseen(
        self, name: str, module: nn.Module, forward: Any, args: Any, kwargs: Any, tags: list[Tag]
    ) -> Any:
        """The output of a module; a stand-in for it where its code needs data there is not."""
        before = [(tag.flow, dict(tag.flow.obstacles)) for tag in tags]
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            first = _first(args, kwargs)
            row = next((row for row in UNSEEN if row.fits(module, first)), None)
            if not name or first is None or not (row or isinstance(error, _DEPENDS_ON_DATA)):
                raise  # a model that depends on data as a whole has not been followed
        self._stack[self._stack.index(name) + 1 :] = []
        self.failed_at = None
        with self._follower.looking_away():
            output = first.new_empty(
                first.shape if row is None else row.output_shape(module, first)
            )
        for tag, (flow, obstacles) in zip(tags, before, strict=True):
            if row is None:
                flow.obstruct(
                    f"its output goes into {self._follower.where()}, which depends on data"
                )
            else:  # what its parameters say replaces what was seen of its code
                flow.obstacles = obstacles
                self._follower.consume(tag, name, row.kind)
                flow.obstruct(f"{self._follower.where()} depends on data: {row.reason}", PACKED)
        return output

    def _norm(
        self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, tags: list[Tag]
    ) -> Any:
        follower, flow = self._follower, self.trace.flows[name]
        for tag in tags:
            tag.flow.obstruct(f"its output goes into another norm, {self._follower.where()}")
        if len(args) != 1 or kwargs:
            self._unlike(flow, "it is not called with one positional argument")
        with follower.looking_away():
            output = forward(*args, **kwargs)
        flow.calls += 1
        flow.operations = max(flow.operations, follower.kernels)
        if not isinstance(output, Tensor):
            self._unlike(flow, "its forward does not return one tensor")
        else:
            source = _first(args, kwargs)
            if source is not None and output.dtype != source.dtype:
                self._unlike(flow, f"it turns {source.dtype} into {output.dtype}")
            follower.tag(output, Tag(flow, source))
        return output

    def _unlike(self, flow: Flow, reason: str) -> None:
        flow.unlike = reason
        flow.obstruct(reason)

    def _linear(
        self, name: str, kind: str, module: nn.Module, args: Any, kwargs: Any, tags: list[Tag]
    ) -> Tensor:
        for tag in tags:
            if len(args) != 1 or kwargs or self._follower.tag_of(args[0]) is not tag:
                tag.flow.obstruct(
                    f"{self._follower.where()} is not given its input as one positional argument"
                )
            self._follower.consume(tag, name, kind)
        # The shape is all that is wanted: much cheaper than the fake matmul.
        with self._follower.looking_away():
            x = _first(args, kwargs)
            return x.new_empty((*x.shape[:-1], linear_sizes(module)[1]))

    def _fits(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a linear is called as one; what only names sizes as one does is looked into."""
        x, (columns, _) = _first(args, kwargs), linear_sizes(module)
        with self._follower.looking_away():
            if x is not None and x.shape[-1:] == (columns,):
                return True
        if type(module) is nn.Linear:
            raise ShapeMismatch(f"a linear of {columns} columns got another size")
        return False

    def _compare(self, name: str, output: Any) -> None:
        follower = self._follower
        shapes = None
        if not follower.tags_in(output):
            shapes = [(t.shape, t.dtype) for t in leaves(output) if isinstance(t, Tensor)]
        self.note([(name, shapes)])

    @property
    def journal(self) -> list[tuple[str, Any]]:
        """The modules that returned in this pass, with the shapes of what is not followed."""
        return self._log

    def note(self, entries: list[tuple[str, Any]]) -> None:
        """Add to the journal; raises ShapeMismatch where a rehearsal parts from the stock model."""
        for name, shapes in entries:
            self._log.append((name, shapes))
            if self._expected is None:
                continue
            place = len(self._log) - 1
            stock = self._expected[place] if place < len(self._expected) else ("", [])
            if stock[0] != name or (stock[1] is not None and stock[1] != shapes):
                raise ShapeMismatch(f"{name}: stock {stock}, rehearsed {shapes}")

    def follows(self, values: Any) -> bool:
        """Whether a norm's output is among the values."""
        return bool(self._follower.tags_in(values))

    def counts(self, name: str) -> tuple[Any, Any]:
        """How much is written down of the norms inside ``name``, and of the others."""
        inside: list[Any] = []
        outside: list[Any] = []
        for path, flow in self.trace.flows.items():
            (inside if path.startswith(f"{name}.") else outside).append(flow.size())
        return inside, outside


def _first(args: Any, kwargs: Any) -> Tensor | None:
    tensors = (value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
    return next(filter(Tensor.is_floating_point, tensors), None)
