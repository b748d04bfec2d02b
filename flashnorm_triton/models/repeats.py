"""Repeating what was seen of one layer for the layers that are alike.

The first of a group of alike layers (:mod:`alike`) runs as ever; the others only hand on tensors of
the shapes that it returned, as long as they are given what it was given: tensors of the same shapes
and the same plain values, with a cache whose part for them is in the same state. A layer whose code
uses its number, changes its attributes, or handles followed tensors across its border speaks for
itself alone. Whatever does not add up later (``doubt``) calls for a trace without repeating.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flashnorm_triton.models.alike import (
    Group,
    Parts,
    Position,
    alike_groups,
    attributes_of,
    state_of,
)

_ATTEMPTS = 2  # members that may turn out to speak for themselves alone, before a group is given up
_SIMPLE = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))


class Recorder(Protocol):
    """What :class:`Repeats` asks of the tracer that it serves."""

    @property
    def journal(self) -> list[tuple[str, Any]]:
        """The modules that returned in this pass, in order, and what is to be known of it."""

    def note(self, entries: list[tuple[str, Any]]) -> None:
        """Add to the journal."""

    def follows(self, values: Any) -> bool:
        """Whether a tensor among the values is being followed."""

    def counts(self, name: str) -> tuple[Any, Any]:
        """Summaries of what is written down: of the modules inside ``name``, and of all others."""


class _Foreign(Exception):
    """A value whose state is not known."""


@dataclass
class _Call:
    """One call of a layer. ``caches`` holds the parts that it used: which cache of the arguments,
    the number, the state before, and the part as it was afterwards."""

    given: Any
    shared: Any
    output: Any
    entries: list[tuple[str, Any]]
    caches: list[tuple[int, tuple[str, str], Any, Any]]
    counts: Any


class Repeats:
    """The groups of one double, and which layers are repeated from which."""

    def __init__(self, shadow: nn.Module, mark: Callable[[str], Any], host: Recorder) -> None:
        self.groups = alike_groups(shadow, mark)
        self.doubt = False
        self.used = False
        self._host = host
        self._modules = dict(shadow.named_modules(remove_duplicate=False))
        self._repeated: dict[str, bool] = {}
        self._order: list[tuple[str, str]] = []
        self.start()

    def start(self, role: Callable[[str], Any] | None = None) -> None:
        """A pass begins. ``role`` says what is put in a module's place in this pass, if anything;
        without it, the pass is one whose findings are to be repeated."""
        self.used = False
        self._role = role
        self._turns: dict[str, int] = {}
        self._calls: dict[tuple[str, int], _Call] = {}
        self._roles: dict[str, Any] = {}

    def end(self) -> None:
        """A pass is over: what was repeated must not have been added to since."""
        for (name, turn), call in self._calls.items():
            last = self._turns[name] == turn
            if last and self._role is None and self._host.counts(name)[0] != call.counts:
                self.doubt = True
            group = self.groups[name]
            for other in group.members:
                if last and self._repeated.get(other) and self._turns.get(other, -1) != turn:
                    self.doubt |= self._role is None

    def restart(self) -> None:
        """What was seen is thrown away; all layers are looked at anew."""
        self.doubt |= self.used
        self._repeated.clear()
        self._order.clear()
        for group in self.groups.values():
            group.first, group.attempts = None, 0
        self.start()

    def stop(self) -> None:
        """Nothing is repeated from now on."""
        self.restart()
        self.groups, self.doubt = {}, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is repeated in the block."""
        groups, self.groups = self.groups, {}
        try:
            yield
        finally:
            self.groups = groups

    def pairs(self) -> Iterator[tuple[Callable[[str], str], Callable[[str], str]]]:
        """For each layer that was repeated two functions: they put a name, and a text, of the layer
        that it is like in terms of its own. Inner layers come first."""
        for first, name in sorted(self._order, key=lambda pair: -pair[1].count(".")):
            yield functools.partial(_moved, first, name), _told(first, name)

    def call(self, name: str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """The output of the layer ``name``: repeated, or what ``run`` returns."""
        with torch._C.DisableTorchFunction():  # what is asked here is none of the model's doing
            known, answer = self._recall(name, args, kwargs)
        if known:
            return answer
        return run() if answer is None else self._record(name, *answer, run)

    def _recall(self, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the layer's call is repeated, and its output; else what to record it with, or
        None for a call that is not of use."""
        group = self.groups[name]
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        if group.attempts >= _ATTEMPTS and group.first is None:
            return False, None
        values: list[Any] = []
        try:
            given = None if self._host.follows((args, kwargs)) else _given((args, kwargs), values)
        except _Foreign:
            given = None
        call = self._calls.get((group.first, turn)) if group.first is not None else None
        usable = name != group.first and call is not None and given is not None
        if usable and self._same(group, name, call, given, values):
            self._once(group, name)
            return True, self._repeat(group, name, call, values)
        if self._repeated.setdefault(name, False) and self._role is None:
            self.doubt = True
        if given is None or group.first not in (None, name):
            return False, None
        return False, (turn, given, values)

    def _once(self, group: Group, name: str) -> None:
        self.used = True
        if self._role is not None:
            return
        if not self._repeated.setdefault(name, True):
            self.doubt = True
        elif (group.first, name) not in self._order:
            self._order.append((group.first, name))

    def _same(self, group: Group, name: str, call: _Call, given: Any, values: list[Any]) -> bool:
        if call.given != given or call.shared != self._shared(group):
            return False
        if self._role is not None and self._roles_of(group, name) != self._roles_of(
            group, group.first
        ):
            return False
        if self._role is not None and self._repeated.get(name) is False:
            return False
        return all(
            _state(values[index], group.numbers[name][at]) == before
            for index, at, before, _ in call.caches
        )

    def _roles_of(self, group: Group, name: str) -> Any:
        if name not in self._roles:
            paths = [f"{name}.{part}" if part else name for part in group.parts]
            self._roles[name] = [self._role(path) for path in paths]
        return self._roles[name]

    def _repeat(self, group: Group, name: str, call: _Call, values: list[Any]) -> Any:
        for index, at, _, after in call.caches:
            values[index].layers[group.numbers[name][at]] = _copied(after)
        moved = functools.partial(_moved, group.first, name)
        self._host.note([(moved(path), shapes) for path, shapes in call.entries])
        return _made(call.output, values)

    def _record(
        self, name: str, turn: int, given: Any, values: list[Any], run: Callable[[], Any]
    ) -> Any:
        group, host = self.groups[name], self._host
        with torch._C.DisableTorchFunction():
            before = self._surroundings(group, name)
            start = len(host.journal)
            states = [
                {n: _state(one, n) for n in group.numbers[name].values()} if _is_cache(one) else {}
                for one in values
            ]
        with self._watched(group, name) as positions, _watched_parts(values) as parts:
            output = run()
        with torch._C.DisableTorchFunction():
            described = _output(output, values, host)
            speaks_for_others = (
                described is not None
                and before == self._surroundings(group, name)
                and not any(position.read for position in positions.values())
                and not any(one.others for one in parts)
            )
            if not speaks_for_others:
                group.attempts += 1
                return output
            group.first = name
            caches = [
                (index, at, found[position.number], _part(values[index], position.number))
                for index, found in enumerate(states)
                for at, position in positions.items()
                if found and position.in_cache
            ]
            shared, entries = self._shared(group), list(host.journal[start:])
            counts = host.counts(name)[0]
        self._calls[name, turn] = _Call(given, shared, described, entries, caches, counts)
        return output

    def _surroundings(self, group: Group, name: str) -> Any:
        """What a layer's run must leave as it is."""
        return (
            self._host.counts(name)[1],
            self._shared(group),
            attributes_of(self._modules[name]),
        )

    @contextmanager
    def _watched(self, group: Group, name: str) -> Iterator[dict[tuple[str, str], Position]]:
        positions = {at: Position(number) for at, number in group.numbers[name].items()}
        places = [
            (vars(self._modules[f"{name}.{part}" if part else name]), key, position)
            for (part, key), position in positions.items()
        ]
        for table, key, position in places:
            table[key] = position
        try:
            yield positions
        finally:
            for table, key, position in places:
                if table.get(key) is position:
                    table[key] = position.number
                else:  # the code has set it anew
                    position.read = True

    def _shared(self, group: Group) -> Any:
        return tuple(map(state_of, group.shared))


@contextmanager
def _watched_parts(values: list[Any]) -> Iterator[list[Parts]]:
    caches = [value for value in values if _is_cache(value)]
    plain = [cache.layers for cache in caches]
    watched = [Parts(one) for one in plain]
    for cache, one in zip(caches, watched, strict=True):
        cache.layers = one
    try:
        yield watched
    finally:
        for cache, one, before in zip(caches, watched, plain, strict=True):
            one.others |= cache.layers is not one
            before[:] = list.__iter__(one)
            cache.layers = before


def _moved(first: str, name: str, path: str) -> str:
    return name + path[len(first) :] if path == first or path.startswith(f"{first}.") else path


def _told(first: str, name: str) -> Callable[[str], str]:
    pattern = re.compile(rf"(?<![\w.]){re.escape(first)}(?![\w])")
    return lambda text: pattern.sub(lambda match: name, text)


def _given(value: Any, values: list[Any]) -> Any:
    """What a layer is given, to be compared; its tensors and caches go into ``values``.

    Raises _Foreign for an object of an unknown kind, or a tensor whose values are known.
    """
    if isinstance(value, Tensor) or _is_cache(value):
        place = next((n for n, one in enumerate(values) if one is value), len(values))
        if place == len(values):
            values.append(value)
        if not isinstance(value, Tensor):
            return type(value), place
        if getattr(value, "constant", None) is not None:
            raise _Foreign
        return Tensor, place, tuple(value.shape), value.dtype, value.stride(), value.is_contiguous()
    if type(value) in _SIMPLE:
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), [_given(one, values) for one in value]
    if type(value) is dict:
        return dict, [(key, _given(one, values)) for key, one in value.items()]
    raise _Foreign


def _output(value: Any, values: list[Any], host: Recorder) -> Any:
    """How to make the like of an output (:func:`_made`); None if that cannot be told."""
    if isinstance(value, Tensor) or _is_cache(value):
        for place, one in enumerate(values):
            if one is value:
                return "given", place
        if not isinstance(value, Tensor) or host.follows(value) or _shares(value, values):
            return None
        return Tensor, tuple(value.shape), value.stride(), value.dtype
    if type(value) in _SIMPLE:
        return "plain", value
    if type(value) in (list, tuple):
        parts = [_output(one, values, host) for one in value]
        return None if None in parts else (type(value), parts)
    return None


def _made(made: Any, values: list[Any]) -> Any:
    if made[0] == "given":
        return values[made[1]]
    if made[0] == "plain":
        return made[1]
    if made[0] is Tensor:
        return torch.empty_strided(*made[1:3], dtype=made[3])
    return made[0](_made(one, values) for one in made[1])


def _shares(tensor: Tensor, values: list[Any]) -> bool:
    """Whether a tensor lies in the memory of one of the values."""
    return any(isinstance(one, Tensor) and torch._C._is_alias_of(tensor, one) for one in values)


def _is_cache(value: Any) -> bool:
    """Whether it is a cache that has all its parts from the start."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None or type(value) not in (module.DynamicCache, module.StaticCache):
        return False
    return value.layer_class_to_replicate is None


def _part(cache: Any, number: int) -> Any:
    """A cache's part for one layer as it is now."""
    return _copied(cache.layers[number])


def _copied(part: Any) -> Any:
    """A part of a cache with tables of its own, but the same tensors."""
    made = copy.copy(part)
    for key, value in vars(made).items():
        if isinstance(value, (list, dict)):
            vars(made)[key] = copy.copy(value)
    return made


def _state(cache: Any, number: int) -> Any:
    """The kind of a cache's part for one layer, and the shapes and plain values in it."""
    if not 0 <= number < len(cache.layers):
        return None
    part = cache.layers[number]
    return type(part), [(key, _shape(value)) for key, value in sorted(vars(part).items())]


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return [_shape(one) for one in value]
    if isinstance(value, dict):
        return [(key, _shape(one)) for key, one in value.items()]
    return value if type(value) in _SIMPLE else id(value)
