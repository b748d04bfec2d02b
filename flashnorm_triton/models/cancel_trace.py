"""Following every linear's output, column by column, to the norms that read it.

Beside each fake output of a linear goes a small real tensor of the same shape that says, for every
element, where it stood: ``row * N + column``. Views, transposes, splits and slices are applied to
both, so at a norm it is plain which columns make one normalised row, whatever lies between.
Whatever else touches an output is written down for the columns it touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from flashnorm_triton.models.flow import leaves
from flashnorm_triton.models.trace import Tracer


def _functions(*names: str) -> set[Any]:
    return {getattr(owner, n) for owner in (Tensor, torch) for n in names if hasattr(owner, n)}


# What moves elements without changing them, and needs nothing but the tensor and sizes.
_VIEWS = _functions(
    *("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "swapaxes", "movedim"),
    *("flatten", "unflatten", "expand", "__getitem__", "narrow", "select", "alias", "swapdims"),
    *("split", "split_with_sizes", "tensor_split", "chunk", "unbind", "moveaxis"),
)
_COPIES = _functions("contiguous", "clone", "detach", "to", "type_as", "float", "half", "bfloat16")


@dataclass
class LinearUse:
    """What became of one linear's output (..., columns).

    ``normed`` maps a norm to the (start, width) ranges of columns it normalised, ``other`` a column
    to the first other thing that read it. ``heads_before_last``: whatever norm met this output had
    all its heads, in order, in the dimension before the last.
    """

    columns: int
    normed: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    other: dict[int, str] = field(default_factory=dict)
    heads_before_last: bool = True

    def size(self) -> tuple[int, ...]:
        """How much is written down: it changes with every addition."""
        grids = sum(map(len, self.normed.values()))
        return len(self.normed), grids, len(self.other), self.heads_before_last

    def of_another(self, moved: Callable[[str], str], told: Callable[[str], str]) -> LinearUse:
        """The same of another layer's linear: ``moved`` gives the names there, ``told`` texts."""
        normed = {moved(name): set(ranges) for name, ranges in self.normed.items()}
        texts = {text: told(text) for text in set(self.other.values())}
        other = {column: texts[text] for column, text in self.other.items()}
        return LinearUse(self.columns, normed, other, self.heads_before_last)


@dataclass
class NormUse:
    """How one norm was called: ``sources`` are the linears whose columns it read, each call's
    ranges in ``grids``. ``operations`` counts the tensors that a call makes, ``obstacles`` say why
    its place cannot be taken."""

    sources: set[str] = field(default_factory=set)
    grids: set[frozenset[tuple[int, int]]] = field(default_factory=set)
    operations: int = 0
    obstacles: dict[str, None] = field(default_factory=dict)

    def size(self) -> tuple[int, ...]:
        """How much is written down: it changes with every addition."""
        return len(self.sources), len(self.grids), self.operations, len(self.obstacles)

    def of_another(self, moved: Callable[[str], str], told: Callable[[str], str]) -> NormUse:
        """The same of a norm in another layer: ``moved`` gives the names there, ``told`` texts."""
        obstacles = {told(text): None for text in self.obstacles}
        return NormUse(set(map(moved, self.sources)), set(self.grids), self.operations, obstacles)


@dataclass(frozen=True)
class _Tag:
    linear: str
    places: Tensor


class ColumnTracer(Tracer):
    """Runs the double of ``model`` and follows the outputs of ``linears`` to ``norms``.

    The model is only read. After :meth:`observe`, ``linear_uses`` and ``norm_uses`` hold what was
    seen. :meth:`replay` then runs it with changed modules in their places.

    Raises whatever copying the model raises.
    """

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, int],
        norms: Iterable[str],
        example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    ) -> None:
        self._widths, self._names = dict(linears), list(norms)
        self._observed_norms = frozenset(self._names)
        super().__init__(model, (), example_inputs)
        self._tags: dict[int, tuple[Tensor, _Tag]] = {}
        self._quiet, self._kernels = False, 0
        self._stand_ins: dict[str, Callable[[Tensor], Tensor]] = {}
        self._shapes: list[tuple[str, Any]] = []
        self._stock_shapes: list[tuple[str, Any]] = []
        self._forget_uses()

    def observe(self) -> str | None:
        """Trace in training and in evaluation mode; None, or why the model could not be run."""
        failure = self._observe()
        if self._repeats.doubt or (failure is not None and self._repeats.used):
            self._repeats.stop()
            self._reset()
            self._call_with = None
            failure = self._observe()
        for moved, told in self._repeats.pairs():
            for path in [path for path in self.linear_uses if moved(path) != path]:
                self.linear_uses[moved(path)] = self.linear_uses[path].of_another(moved, told)
            for path in [path for path in self.norm_uses if moved(path) != path]:
                self.norm_uses[moved(path)] = self.norm_uses[path].of_another(moved, told)
        return failure

    def _observe(self) -> str | None:
        try:
            self._run(training=True, decode=False)
            self._run(training=False, decode=True)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:200]
            return f"{type(error).__name__}: {text}"
        self._stock_shapes = self._shapes
        return None

    def replay(self, stand_ins: Mapping[str, Callable[[Tensor], Tensor]]) -> str | None:
        """Run with other functions in the places of some modules.

        None when all other modules return the shapes that they did before, else the name of the
        first that does not. Call after :meth:`observe`.
        """
        place = self._replay(stand_ins)
        if place is not None and self._repeats.used:
            with self._repeats.paused():
                place = self._replay(stand_ins)
        return place

    def _replay(self, stand_ins: Mapping[str, Callable[[Tensor], Tensor]]) -> str | None:
        self._stand_ins = dict(stand_ins)
        try:
            self._run(training=False, decode=True, role=self._stand_ins.get)
        except Exception:
            return self.failed_at or "the model"
        finally:
            self._stand_ins = {}
        for before, after in zip(self._stock_shapes, self._shapes, strict=False):
            if before != after and before[0] not in stand_ins:
                return before[0]
        return None if len(self._stock_shapes) == len(self._shapes) else "the model"

    def _run(self, training: bool, decode: bool, role: Callable[[str], Any] | None = None) -> None:
        self._tags.clear()
        self._shapes = []
        with _Watch(self._watch):
            super()._run(training, decode, role)

    def _mark(self, name: str) -> Any:
        return super()._mark(name), self._widths.get(name), name in self._observed_norms

    @property
    def journal(self) -> list[tuple[str, Any]]:
        """The modules that returned in this pass, with the shapes that they returned."""
        return self._shapes

    def note(self, entries: list[tuple[str, Any]]) -> None:
        """Add to the journal."""
        self._shapes += entries

    def follows(self, values: Any) -> bool:
        """Whether a linear's output is among the values."""
        return any(id(value) in self._tags for value in leaves(values))

    def counts(self, name: str) -> tuple[Any, Any]:
        """How much is written down of the linears and norms inside ``name``, and of the others."""
        inside: list[Any] = []
        outside: list[Any] = []
        for uses in (self.linear_uses, self.norm_uses):
            for path, use in uses.items():
                (inside if path.startswith(f"{name}.") else outside).append(use.size())
        return inside, outside

    def _reset(self) -> None:
        super()._reset()
        self._tags.clear()
        self._shapes = []
        self._forget_uses()

    def _forget_uses(self) -> None:
        self.linear_uses = {name: LinearUse(n) for name, n in self._widths.items()}
        self.norm_uses = {name: NormUse() for name in self._names}

    def _returned(self, output: Any) -> None:
        self._other(output, "returned by the model")

    def _call(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._quiet:
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
            if name in self._stand_ins:
                output = self._stand_ins[name](*args, **kwargs)
            else:
                output = self._seen(name, module, forward, args, kwargs)
        except Exception:
            self.failed_at = self.failed_at or name
            raise
        finally:
            self._stack.pop()
        shapes = [(t.shape, t.dtype) for t in leaves(output) if isinstance(t, Tensor)]
        self.note([(name, shapes)])
        return output

    def _seen(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if name in self.norm_uses:
            return self._norm_call(name, forward, args, kwargs)
        if type(module) is not nn.Linear or len(args) != 1 or kwargs:
            returned = []

            def noted(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                returned.append(True)
                return output

            output = self._unseen(name, module, noted, args, kwargs, [])
            if not returned:
                self._other((args, kwargs), f"given to {name}, which depends on data")
            return output
        self._other(args, f"read by {name}")
        output = args[0].new_empty((*args[0].shape[:-1], module.out_features))
        if name in self.linear_uses:
            with unset_fake_temporarily():
                places = torch.arange(output.numel(), dtype=torch.int32).view(output.shape)
            self._tags[id(output)] = (output, _Tag(name, places))
        return output

    def _norm_call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        use = self.norm_uses[name]
        entry = self._tags.get(id(args[0])) if len(args) == 1 and not kwargs else None
        self._quiet, self._kernels = True, 0
        try:
            output = forward(*args, **kwargs)
        finally:
            self._quiet = False
        use.operations = max(use.operations, self._kernels)
        if entry is None:
            use.obstacles.setdefault("it also reads something other than a linear's output")
            self._other((args, kwargs), f"{name} is called with more than one argument")
            return output
        tensor, tag = entry
        if not isinstance(output, Tensor) or output.shape != tensor.shape:
            use.obstacles.setdefault("it does not return one tensor of its input's shape")
        elif output.dtype != tensor.dtype:
            use.obstacles.setdefault(f"it turns {tensor.dtype} into {output.dtype}")
        linear = self.linear_uses[tag.linear]
        grid = _grid(tag.places, linear.columns)
        if grid is None:
            self._other(args, f"{name} does not normalise columns that lie side by side")
            use.obstacles.setdefault("its rows are not columns that lie side by side")
            return output
        use.sources.add(tag.linear)
        use.grids.add(grid)
        linear.normed.setdefault(name, set()).update(grid)
        linear.heads_before_last &= _heads_before_last(tag.places, linear.columns)
        return output

    def _other(self, values: Any, reason: str) -> None:
        for value in leaves(values):
            entry = self._tags.get(id(value))
            if entry is not None:
                use = self.linear_uses[entry[1].linear]
                with unset_fake_temporarily():
                    columns = (entry[1].places % use.columns).unique().tolist()
                for column in columns:
                    use.other.setdefault(column, reason)

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict) -> Any:
        """One torch function of a module's code: what it does with what is followed."""
        result = _call_or_false(func, args, kwargs)
        if self._quiet:
            self._kernels += _is_new(result, args)
        if self._quiet or not self._tags:
            return result
        values = list(leaves((args, kwargs)))
        if not any(id(value) in self._tags for value in values):
            return result
        outputs = [value for value in leaves(result) if isinstance(value, Tensor)]
        if not outputs and func is not Tensor.__bool__:
            return result  # a question about shape, dtype or device
        entry = self._tags.get(id(args[0])) if args else None
        tensors = [value for value in values if isinstance(value, Tensor)]
        if entry is not None and func in _COPIES and outputs[0].dtype == args[0].dtype:
            self._tags[id(result)] = (result, entry[1])
        elif entry is not None and func in _VIEWS and len(tensors) == 1:
            with unset_fake_temporarily():
                moved = func(entry[1].places, *args[1:], **kwargs)
            for output, places in zip(outputs, leaves(moved), strict=True):
                self._tags[id(output)] = (output, _Tag(entry[1].linear, places))
        else:
            where = (self._stack[-1] if self._stack else "") or "the model"
            name = getattr(func, "__name__", str(func)).strip("_")
            self._other(values, f"read by {name} in {where}")
        return result


class _Watch(TorchFunctionMode):
    """Shows every torch function to ``watch``, which calls it."""

    def __init__(self, watch: Callable[[Any, tuple[Any, ...], dict], Any]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        return self._watch(func, args, kwargs or {})


def _call_or_false(func: Any, args: tuple[Any, ...], kwargs: dict) -> Any:
    """Call ``func``; a truth value that depends on data there is not is taken to be False."""
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is Tensor.__bool__:
            return False
        raise


def _is_new(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``result`` is a tensor with memory of its own, which a kernel had to fill."""
    if not isinstance(result, Tensor):
        return False
    memory = result.untyped_storage()._cdata
    tensors = (value for value in leaves(args) if isinstance(value, Tensor))
    return all(value.untyped_storage()._cdata != memory for value in tensors)


def _grid(places: Tensor, columns: int) -> frozenset[tuple[int, int]] | None:
    """The (start, width) ranges that the rows of ``places`` (..., width) are; None if they are not
    ranges of columns of one token."""
    width = places.shape[-1]
    with unset_fake_temporarily():
        rows = places.reshape(-1, width)
        first = rows[:, :1]
        if not torch.equal(rows, first + torch.arange(width, dtype=rows.dtype)):
            return None
        starts = (first % columns).unique().tolist()
    if any(start + width > columns for start in starts):
        return None
    return frozenset((start, width) for start in starts)


def _heads_before_last(places: Tensor, columns: int) -> bool:
    """Whether dimension -2 of ``places`` runs through all the heads of one token, in order."""
    width = places.shape[-1]
    if places.dim() < 2 or places.shape[-2] * width != columns:
        return False
    with unset_fake_temporarily():
        starts = places[..., 0] % columns
        heads = torch.arange(0, columns, width, dtype=starts.dtype)
        return torch.equal(starts, heads.expand_as(starts))
