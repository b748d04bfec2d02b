"""Which layers of a model are alike, so that a trace of one of them tells of the others too.

Two members of a list of modules are alike when they are built of the same classes, hold parameters
and buffers of the same shapes and dtypes that nobody else holds, and have equal attributes. One
kind of attribute may differ: a number that counts with the place in the list (``layer_idx``).
Whether the code does anything with that number is seen while the layer runs (:class:`Position`).
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.shadow import HOOK_OPTIONS, HOOK_TABLES

_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, enum.Enum)
# Compared as such, or put in by the tracing itself.
_TABLES = frozenset(("_parameters", "_buffers", "_modules", "forward", *HOOK_TABLES, *HOOK_OPTIONS))
_DEEPEST = 8
_CACHES = "transformers.cache_utils"


@dataclass
class Group:
    """Modules of one list that are alike; ``numbers`` maps each to its counting attributes.

    ``shared`` are objects (the config) that the attributes of all members refer to.
    """

    members: tuple[str, ...]
    parts: tuple[str, ...]
    numbers: dict[str, dict[tuple[str, str], int]]
    shared: tuple[Any, ...]
    first: str | None = None
    attempts: int = 0


@dataclass
class _Look:
    """What a member looks like: ``plain`` without its whole numbers, which are in ``numbers``."""

    plain: Any
    parts: tuple[str, ...]
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    shared: dict[int, Any] = field(default_factory=dict)


def alike_groups(model: nn.Module, mark: Callable[[str], Any]) -> dict[str, Group]:
    """The groups of alike layers (two or more each), by the name of every member.

    ``mark`` says of a module's name what else must be equal, as something hashable.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    holders = _holders(modules)
    found: dict[str, Group] = {}
    for path, container in modules.items():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(container) > 1:
            start = f"{path}." if path else ""
            names = [start + key for key, child in container._modules.items() if child is not None]
            for group in _groups(names, modules, holders, mark):
                found.update(dict.fromkeys(group.members, group))
    return found


def _groups(
    names: list[str],
    modules: Mapping[str, nn.Module],
    holders: Mapping[int, list[str]],
    mark: Callable[[str], Any],
) -> Iterator[Group]:
    looks: dict[str, _Look] = {}
    for name in names:
        look = _look(name, modules[name], holders, mark) if modules[name]._modules else None
        if look is not None:
            looks[name] = look
    counting = _counting(names, looks)
    alike: dict[Any, list[str]] = {}
    for name, look in looks.items():
        fixed = frozenset(item for item in look.numbers.items() if item[0] not in counting)
        alike.setdefault((look.plain, fixed), []).append(name)
    for members in alike.values():
        if len(members) > 1:
            first = looks[members[0]]
            numbers = {
                name: {at: n for at, n in looks[name].numbers.items() if at in counting}
                for name in members
            }
            yield Group(tuple(members), first.parts, numbers, tuple(first.shared.values()))


def _counting(names: list[str], looks: Mapping[str, _Look]) -> set[tuple[str, str]]:
    """The attributes whose value grows by one from each member to the next."""
    offsets: dict[tuple[str, str], list[int]] = {}
    for place, name in enumerate(names):
        for at, number in (looks[name].numbers if name in looks else {}).items():
            offsets.setdefault(at, []).append(number - place)
    return {at for at, found in offsets.items() if len(found) > 1 and len(set(found)) == 1}


def attributes_of(layer: nn.Module) -> Any:
    """What a layer consists of and what its attributes are now, to be compared with later."""
    look = _look("", layer, None, lambda name: None)
    return look.plain, look.numbers


def _look(
    name: str,
    layer: nn.Module,
    holders: Mapping[int, list[str]] | None,
    mark: Callable[[str], Any],
) -> _Look | None:
    """None for a layer that shares modules, parameters or buffers with others."""
    inside = f"{name}."
    own = dict(layer.named_modules(remove_duplicate=False))
    places = {id(module): part for part, module in own.items()}
    look = _Look(None, tuple(own))
    told = []
    for part, module in own.items():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for thing in (module, *(tensor for _, tensor in tensors if tensor is not None)):
            held_by = () if holders is None else holders[id(thing)]
            if any(h != name and not h.startswith(inside) for h in held_by):
                return None
        described = tuple((key, _described(tensor, look, places)) for key, tensor in tensors)
        attributes = []
        for key, value in vars(module).items():
            if type(value) is int:
                look.numbers[part, key] = value
                attributes.append(key)
            elif key not in _TABLES:
                attributes.append((key, _described(value, look, places)))
        full = f"{inside}{part}" if part else name
        told.append((part, type(module), mark(full), described, tuple(attributes)))
    look.plain = tuple(told)
    return look


def _described(value: Any, look: _Look, places: Mapping[int, str], depth: int = 0) -> Any:
    """A hashable description; of what is only known by being itself, its id."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype
    if isinstance(value, nn.Module) and id(value) in places:
        return nn.Module, places[id(value)]
    deeper = functools.partial(_described, look=look, places=places, depth=depth + 1)
    if depth < _DEEPEST:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(deeper, value))
        if isinstance(value, dict):
            return type(value), tuple((deeper(key), deeper(one)) for key, one in value.items())
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(deeper, value))
        if isinstance(value, functools.partial):
            return functools.partial, deeper(value.func), deeper(value.args), deeper(value.keywords)
    look.shared[id(value)] = value
    return type(value), id(value)


def _holders(modules: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """The names of the modules that hold each tensor, and the names of each module."""
    holders: dict[int, list[str]] = {}
    for name, module in modules.items():
        holders.setdefault(id(module), []).append(name)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                holders.setdefault(id(tensor), []).append(name)
    return holders


def state_of(thing: Any) -> Any:
    """What an object holds now, one level deep: compared before two alike layers run."""
    values = getattr(thing, "__dict__", None)
    if values is None:
        values = thing if isinstance(thing, dict) else dict(enumerate(_entries(thing)))
    return tuple(
        (key, value if value is None or type(value) in (bool, int, str) else id(value))
        for key, value in list(values.items())
    )


def _entries(thing: Any) -> Any:
    return thing if isinstance(thing, (list, tuple, set, frozenset)) else ()


class Position:
    """Stands for a layer's number while the layer runs, and tells when anything is done with it.

    ``read`` is set by whatever compares it, computes with it or finds something with it, except for
    the cache, which keeps a part for each layer (``in_cache``).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.read = self.in_cache = False

    @property
    def __class__(self) -> type:
        return int

    def note(self) -> int:
        """The number; who asks is written down."""
        if sys._getframe(2).f_globals.get("__name__") == _CACHES:
            self.in_cache = True
        else:
            self.read = True
        return self.number


class Parts(list):
    """Stands for the list of a cache's parts while a layer runs; ``others`` tells that it looked at
    another part than its own."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)
        self.others = False

    def __getitem__(self, key: Any) -> Any:
        if type(key) is not Position:
            self.others = True
            return super().__getitem__(key)
        key.in_cache = True
        return super().__getitem__(key.number)

    def __iter__(self) -> Iterator[Any]:
        self.others = True
        return super().__iter__()


def _watch(name: str) -> None:
    plain = getattr(int, name)

    def method(self: Position, *others: Any) -> Any:
        number = self.note()
        return plain(number, *(o.number if type(o) is Position else o for o in others))

    setattr(Position, name, method)


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rand", "ror"),
    *("lshift", "rshift", "rlshift", "rrshift", "rxor", "neg", "pos", "abs", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "index", "float"),
    *("str", "repr", "format", "round", "trunc", "floor", "ceil"),
):
    _watch(f"__{_name}__")
