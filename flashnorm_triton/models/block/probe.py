"""Running a layer's double with random numbers in the place of everything that has weights.

Whatever a layer's norms, linears, cache and attention return is drawn anew at every call. What its
code does between them then shows in what the next of them is given: an equation that holds for the
drawn numbers holds for all numbers. No weights are needed, and no model's name is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flashnorm_triton.models.flow import leaves, share_memory
from flashnorm_triton.models.linears import LINEAR, linear_kind, linear_sizes
from flashnorm_triton.models.norms import is_candidate
from flashnorm_triton.models.shadow import SharedFakes, make_shadow

# The name under which transformers finds the probe's attention, for doubles alone.
IMPLEMENTATION = "flashnorm_probe"
CACHE_NAMES = frozenset(("cache", "past_key_values", "past_key_value", "layer_past"))
_RECORDER = "_flashnorm_recorder"
_DTYPE = torch.float64
_FAR = 1 << 20
_ASKING = {"get_interface", "get", "__contains__", "__getitem__"}


class Unproven(Exception):
    """The layer is not the block that is looked for; says why."""


@dataclass
class Event:
    """One call of something with weights or state: ``kind`` is norm, linear, update, attention, or
    rest: a module that a block calls as it is.

    ``given`` and ``gave`` are copies of the tensors at that time; ``args`` and ``kwargs`` what came
    beside them.
    """

    kind: str
    name: str
    given: tuple[Tensor, ...]
    gave: tuple[Tensor, ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One forward of the double: its input, the arguments by name, what happened, its output.

    ``launches`` counts the tensors that the layer's own code has made between the events;
    ``growth`` are the numbers of ``tables.growth`` that its config names, if it does; ``rest`` and
    ``in_tuple`` what the probe was told.
    """

    x: Tensor
    arguments: dict[str, Any]
    events: list[Event]
    output: Tensor
    launches: int
    growth: tuple[float, float] | None = None
    rest: str | None = None
    in_tuple: bool = False


@dataclass(frozen=True)
class CallShape:
    """How a model calls its layers: argument names by what they hold, as seen in a trace.

    ``angles`` is the pair (cos, sin), of width ``rotary`` and with one row of tables for all
    sequences where ``shared``; ``others`` are the names of whatever else is handed over.
    """

    cache: str | None
    mask: str | None
    angles: str | None
    rotary: int
    shared: bool
    others: tuple[str, ...]

    @classmethod
    def read(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShape:
        """The shape of a call that was seen. Raises Unproven for one of another form."""
        if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            raise Unproven("it is not called with its hidden states alone, and the rest by name")
        cache = mask = angles = None
        rotary, shared, others = 0, False, []
        for name, value in kwargs.items():
            if (
                hasattr(value, "update")
                and hasattr(value, "get_seq_length")
                or value is None
                and name in CACHE_NAMES
            ):
                cache = name
            elif name == "attention_mask":
                mask = name
            elif _is_angles(value):
                angles, rotary, shared = name, value[0].shape[-1], value[0].shape[0] == 1
            else:
                others.append(name)
        return cls(cache, mask, angles, rotary, shared, tuple(others))


def _is_cache(value: Any) -> bool:
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _is_angles(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 3 for t in value)
    )


class Passed:
    """A value that a layer may only hand on."""


@dataclass(frozen=True)
class Owned:
    """In the place of a parameter that a module hands to its attention: the parameter's name."""

    name: str


class Probe:
    """The double of one layer, ready to run. The layer is only read.

    ``rest`` names a module that is not looked into; it returns what it is given the size of, alone
    or, ``in_tuple``, with something that may only be handed on.

    Raises Unproven for a layer that holds modules with weights of another kind.
    """

    def __init__(self, layer: nn.Module, rest: str | None = None, in_tuple: bool = False) -> None:
        self._rest, self._in_tuple = rest, in_tuple
        self._loose: dict[str, str] = {}
        self._double: nn.Module | None = make_shadow(layer, SharedFakes())
        self._events: list[Event] = []
        self._quiet = False
        self._launches = 0
        self._draw = torch.Generator(device="cpu").manual_seed(0)
        self._asked: list[str] = []
        self._growth: tuple[float, float] | None = None
        implementation = _Implementation(IMPLEMENTATION)
        implementation.asked = self._asked
        _register()
        kinds = {name: linear_kind(module) for name, module in layer.named_modules()}
        for name, module in self._double.named_modules():
            config = vars(module).get("config")
            self._growth = self._growth or _growth(config)
            if hasattr(config, "_attn_implementation"):
                try:
                    config._attn_implementation = implementation
                except ValueError as error:
                    raise Unproven(f"its config takes no other attention: {error}") from error
            vars(module)[_RECORDER] = self
            self._watch(name, module, kinds[name])
        first = next((name for name, kind in kinds.items() if kind == LINEAR), None)
        if first is None:
            raise Unproven("it has no linear")
        self._width = linear_sizes(layer.get_submodule(first))[0]

    def _watch(self, name: str, module: nn.Module, kind: str | None) -> None:
        if name == self._rest:
            module.forward = _Leaf(self, "rest", name, None, self._in_tuple)
        elif self._rest is not None and name.startswith(f"{self._rest}."):
            return
        elif is_candidate(module):
            module.forward = _Leaf(self, "norm", name, None)
        elif kind == LINEAR:
            module.forward = _Leaf(self, "linear", name, linear_sizes(module))
        elif module._parameters or module._buffers:
            told = f"{name or 'it'} ({type(module).__name__}) has weights or buffers of its own"
            if module._buffers:
                raise Unproven(told)
            self._loose[name] = told  # unless all of them go to the attention as they are

    def run(self, call: CallShape, batch: int, tokens: int, cached: bool, scale: float) -> Run:
        """One forward in evaluation mode over random rows of size ``scale``.

        Raises Unproven for whatever the layer does that a block cannot.
        """
        self._events, self._launches, self._scale = [], 0, scale
        x = self.random(batch, tokens, self._width)
        arguments = self._arguments(call, batch, tokens, cached)
        before = x.clone()
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            try:
                with torch.autocast("cpu", enabled=False), _Counting(self):
                    output = self._double(x, **arguments)
            except Unproven:
                raise
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0][:120]
                raise Unproven(f"its code fails on a probe: {type(error).__name__}: {text}") from (
                    error
                )
        handed = {e.name: _owned(e.kwargs) for e in self._events if e.kind == "attention"}
        for name, told in self._loose.items():
            if handed.get(name) != set(self._double.get_submodule(name)._parameters):
                raise Unproven(told)
        if self._asked:
            raise Unproven(f"its code asks for the attention implementation in {self._asked[0]}")
        if not isinstance(output, Tensor):
            raise Unproven("it does not return one tensor")
        if not torch.equal(x, before):
            raise Unproven("it changes its input in place")
        more = self._growth, self._rest, self._in_tuple
        return Run(x, arguments, self._events, output, self._launches, *more)

    def close(self) -> None:
        """Let go of the double and of all copies: they hold one another, and would wait for gc."""
        self._double, self._events = None, []

    def random(self, *shape: int) -> Tensor:
        """Numbers between twice the run's size and minus that, in float64."""
        noise = torch.rand(*shape, generator=self._draw, dtype=_DTYPE, device="cpu")
        return noise.sub_(0.5).mul_(4 * self._scale)

    def _arguments(self, call: CallShape, batch: int, tokens: int, cached: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {name: Passed() for name in call.others}
        if "position_ids" in arguments:
            # Far ones too: of some layers the queries grow with them.
            places = torch.randint(_FAR, (batch, tokens), generator=self._draw, device="cpu")
            arguments["position_ids"] = places
        if call.mask is not None:
            arguments[call.mask] = self.random(batch, 1, tokens, tokens)
        if call.angles is not None:
            rows = 1 if call.shared else batch
            angles = [self.random(rows, tokens, call.rotary) / self._scale for _ in range(2)]
            arguments[call.angles] = tuple(angles)
        if call.cache is not None:
            arguments[call.cache] = _Cache(self) if cached else None
        return arguments

    def note(
        self, kind: str, name: str, given: tuple[Any, ...], gave: tuple[Tensor, ...], *more: Any
    ) -> None:
        """Write down one event."""
        self._quiet = True
        copies = [tuple(t.detach().clone() for t in tensors) for tensors in (given, gave)]
        self._quiet = False
        self._events.append(Event(kind, name, *copies, *more))

    def attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """What stands in for the attention function: (B, T, heads, D) of random numbers."""
        if len(args) < 3 or not all(isinstance(t, Tensor) and t.dim() == 4 for t in args[:3]):
            raise Unproven("its attention is not given query, key and value by position")
        q, v = args[0], args[2]
        self._quiet = True
        output = self.random(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        self._quiet = False
        name = next(n for n, m in self._double.named_modules() if m is module)
        names = {id(weight): key for key, weight in module._parameters.items()}
        kwargs = {n: Owned(names[id(v)]) if id(v) in names else v for n, v in kwargs.items()}
        self.note("attention", name, args[:3], (output,), args[3:], kwargs)
        return output, None


def _owned(kwargs: Mapping[str, Any]) -> set[str]:
    return {value.name for value in kwargs.values() if isinstance(value, Owned)}


def _growth(config: Any) -> tuple[float, float] | None:
    """What a config says of queries that grow with their positions (Llama 4, Ministral 3)."""
    rope = getattr(config, "rope_parameters", None)
    names = "llama_4_scaling_beta", "original_max_position_embeddings"
    found = [rope.get(name) for name in names] if isinstance(rope, Mapping) else [None]
    return None if None in found else (float(found[0]), float(found[1]))


class _Leaf:
    """In the place of the forward of a norm, a linear or the rest."""

    def __init__(
        self,
        probe: Probe,
        kind: str,
        name: str,
        sizes: tuple[int, int] | None,
        in_tuple: bool = False,
    ) -> None:
        self.probe, self.kind, self.name, self.sizes = probe, kind, name, sizes
        self.in_tuple = in_tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise Unproven(f"{self.name} is not called with one positional argument")
        (x,), probe = args, self.probe
        if self.sizes is not None and x.shape[-1] != self.sizes[0]:
            raise Unproven(f"{self.name} is given rows of another size than its weight has")
        last = x.shape[-1] if self.sizes is None else self.sizes[1]
        probe._quiet = True
        output = probe.random(*x.shape[:-1], last)
        probe.note(self.kind, self.name, (x,), (output,))
        return (output, Passed()) if self.in_tuple else output


class _Cache:
    """In the place of a cache: takes keys and values, gives others."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probe = self._probe
        probe._quiet = True
        gave = tuple(probe.random(*t.shape[:2], t.shape[2] + 2, t.shape[3]) for t in (k, v))
        probe.note("update", "", (k, v), gave, args, kwargs)
        return gave

    def __getattr__(self, name: str) -> Any:
        raise Unproven(f"its code asks the cache for {name}")


class _Implementation(str):
    """The name of an attention implementation that notices who compares it."""

    asked: list[str]

    def __eq__(self, other: object) -> bool:
        self._note(sys._getframe(1))
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self._note(sys._getframe(1))
        return str.__ne__(self, other)

    __hash__ = str.__hash__

    def _note(self, frame: Any) -> None:
        if frame.f_code.co_name not in _ASKING:
            self.asked.append(frame.f_code.co_qualname)

    def __deepcopy__(self, memo: Any) -> _Implementation:
        return self


class _Counting(TorchFunctionMode):
    """Counts the tensors that a layer's own code makes: launches, but for views."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._probe._quiet and isinstance(result, Tensor) and result.dim():
            tensors = [t for t in leaves((args, kwargs or {})) if isinstance(t, Tensor)]
            self._probe._launches += not any(share_memory(result, t) for t in tensors)
        return result


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function of doubles; it finds its recorder in the module that calls."""
    return vars(module)[_RECORDER].attention(module, args, kwargs)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
