"""Which stored tensors a parameter of the model is made of.

transformers renames checkpoint tensors and may convert them while it loads (experts stored one by
one become one 3-D parameter, a packed tensor is cut up). Its own table of conversions is asked, and
followed backwards: from a parameter's input axis to that axis of each stored tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_SIZE_KEEPING = (
    *("Transpose", "MergeModulelist", "SplitModulelist"),
    *("Concatenate", "Chunk", "Split", "Interleave"),
)


class NotFollowed(Exception):
    """The stored layout of a parameter is none that a fold can follow; the message says why."""


@dataclass(frozen=True)
class Stored:
    """A stored tensor that is (part of) a parameter, and which of its axes is the input axis."""

    tensor: str
    axis: int


@dataclass
class _Group:
    """The stored tensors that one converter turns into ``targets``."""

    converter: Any
    targets: tuple[str, ...]
    tensors: list[str] = field(default_factory=list)


class StoredNames:
    """The relation of stored tensors and parameters, for one model and one checkpoint.

    Args:
        model: the model on the meta device, built from the checkpoint's config.
        shapes: the shape of every stored tensor, by name.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        self._shapes = shapes
        self._state = model.state_dict()
        self._direct: dict[str, str] = {}
        self._groups: dict[str, _Group] = {}
        self.unknown: list[str] = []
        transforms = get_model_conversion_mapping(model)
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix = model.base_model_prefix
        for stored in sorted(shapes, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, self._state)
            if name not in self._state and stored in self._state:
                name, pattern = rename_source_key(stored, [], [], prefix, self._state)
            if name not in self._state:
                self.unknown.append(stored)
            elif pattern is None:
                self._direct[name] = stored
            else:
                converter = by_pattern[pattern]
                first = converter.target_patterns[0]
                targets = [name.replace(first, one) for one in converter.target_patterns]
                group = self._groups.setdefault(name, _Group(converter, tuple(targets)))
                group.tensors.append(stored)
        self._group_of = {t: group for group in self._groups.values() for t in group.targets}
        self._made_from = {stored: (name,) for name, stored in self._direct.items()}
        for group in self._groups.values():
            self._made_from.update(dict.fromkeys(group.tensors, group.targets))

    def direct(self, parameter: str) -> str | None:
        """The stored tensor that is this parameter as it stands, or None."""
        return self._direct.get(parameter)

    def parts(self, parameter: str, axis: int) -> tuple[Stored, ...]:
        """The stored tensors of a parameter, each with what is the parameter's ``axis`` in it.

        Raises NotFollowed.
        """
        stored = self._direct.get(parameter)
        if stored is not None:
            return (Stored(stored, axis),)
        group = self._group_of.get(parameter)
        if group is None:
            raise NotFollowed(f"{parameter} is not stored")
        if len(group.converter.source_patterns) > 1 and len(group.targets) > 1:
            raise NotFollowed(f"{parameter} is stored mixed with others ({group.tensors[0]})")
        shape = tuple(self._state[parameter].shape)
        rank, place = len(shape), axis % len(shape)
        for operation in reversed(group.converter.operations):
            rank, place = _before(operation, rank, place, parameter)
        for tensor in group.tensors:
            found = self._shapes[tensor]
            if len(found) != rank or found[place] != shape[axis]:
                raise NotFollowed(f"{tensor} of shape {list(found)} does not fit {parameter}")
        return tuple(Stored(tensor, place) for tensor in group.tensors)

    def made_from(self, tensor: str) -> tuple[str, ...]:
        """The parameters that a stored tensor becomes (part of)."""
        return self._made_from.get(tensor, ())

    def missing(self, model: nn.Module) -> list[str]:
        """Parameters that the model has and nothing stored gives; tied ones count as stored."""
        covered = self._direct.keys() | self._group_of.keys()
        patterns = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
        named = list(model.named_parameters(remove_duplicate=False))
        given = {id(parameter) for name, parameter in named if name in covered}
        starred = any("*" in target for target in self._group_of)
        return [
            name
            for name, parameter in named
            if id(parameter) not in given
            and not starred
            and not any(re.search(pattern, name) for pattern in patterns)
        ]

    def misshapen(self) -> Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Stored tensors of another shape than the parameter they are: name, stored, wanted."""
        for name, stored in self._direct.items():
            wanted = tuple(self._state[name].shape)
            if self._shapes[stored] != wanted:
                yield stored, self._shapes[stored], wanted

    def misfits(self) -> Iterator[str]:
        """What is wrong, in words, with stored tensors that make up a parameter (or several)
        together: an axis of another length than the parameter's, or too few or too many numbers."""
        for group in self._groups.values():
            if any(type(one).__name__ not in _SIZE_KEEPING for one in group.converter.operations):
                continue
            targets = [target for target in group.targets if target in self._state]
            yield from self._wrong_axes(group, targets)
            wanted = sum(self._state[target].numel() for target in targets)
            found = sum(math.prod(self._shapes[tensor]) for tensor in group.tensors)
            if found != wanted:
                yield (
                    f"{targets[0]} is made of {len(group.tensors)} stored tensors (first "
                    f"{group.tensors[0]}), which hold {found} numbers, not {wanted}"
                )

    def _wrong_axes(self, group: _Group, targets: Iterable[str]) -> Iterator[str]:
        for target in targets:
            shape = tuple(self._state[target].shape)
            for axis, length in enumerate(shape):
                rank, place = len(shape), axis
                try:
                    for operation in reversed(group.converter.operations):
                        rank, place = _before(operation, rank, place, target)
                except NotFollowed:
                    continue  # an axis along which they are put together
                for tensor in group.tensors:
                    found = self._shapes[tensor]
                    if len(found) != rank or found[place] != length:
                        yield f"{tensor} has shape {list(found)}: {target} wants {list(shape)}"


def _before(operation: Any, rank: int, axis: int, parameter: str) -> tuple[int, int]:
    """Rank and axis of an operation's input, from those of its output."""
    kind = type(operation).__name__
    where = getattr(operation, "dim", None)
    if kind == "Transpose" and not operation.check_dims:
        first, second = operation.dim0 % rank, operation.dim1 % rank
        return rank, {first: second, second: first}.get(axis, axis)
    if kind == "MergeModulelist" and where % rank != axis:  # one of them had an axis less
        return rank - 1, axis - (axis > where % rank)
    if kind == "SplitModulelist":
        return rank + 1, axis + (axis >= where % (rank + 1))
    if kind in ("Concatenate", "Chunk", "Split", "Interleave") and where % rank != axis:
        return rank, axis
    raise NotFollowed(f"{parameter} is stored in a layout that is not followed ({operation})")
