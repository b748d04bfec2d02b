"""Copies of what passes the boundaries of modules, in every mode of a decode step.

A hook cannot be called by a replayed graph, so taps do not collect: they copy into memory of a
fixed address, and the copies are captured (or compiled) with the step. A copy is also what keeps a
tap from changing what it watches: a kept reference would keep the allocator from reusing memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


class Tap:
    """The last rows that went into (or came out of) one module: ``last`` (B, K), its own memory.

    Made by the prefill, the first and always eager call, of whose rows it takes the last ones.
    """

    def __init__(self, module: nn.Module, inputs: bool, batch: int) -> None:
        self.last: Tensor | None = None
        self._batch = batch
        if inputs:
            self._hook = module.register_forward_pre_hook(self._before, with_kwargs=True)
        else:
            self._hook = module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take(_first(args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(output[0] if isinstance(output, tuple) else output)

    def _take(self, value: Tensor) -> None:
        rows = value.reshape(self._batch, -1, value.shape[-1])[:, -1]
        if self.last is None:
            self.last = torch.empty_like(rows, memory_format=torch.contiguous_format)
            torch._dynamo.mark_static_address(self.last)
        self.last.copy_(rows)

    def remove(self) -> None:
        self._hook.remove()


class Taps:
    """Taps on one model by (module path, whether its input), and the steps of a chunk."""

    def __init__(self, model: nn.Module, places: list[tuple[str, bool]], batch: int, chunk: int):
        self._chunk = chunk
        self.by_place = {
            (path, inputs): Tap(model.get_submodule(path), inputs, batch)
            for path, inputs in dict.fromkeys(places)
        }
        self.kept: dict[tuple[str, bool], Tensor] = {}

    def seen(self, place: tuple[str, bool]) -> bool:
        """Whether the model's own code calls that module."""
        return self.by_place[place].last is not None

    def keep(self, step: int) -> None:
        """Store what was tapped last as number ``step`` of the chunk (T, B, K)."""
        if not self.kept:
            self.kept = {
                place: tap.last.new_empty(self._chunk, *tap.last.shape)
                for place, tap in self.by_place.items()
                if tap.last is not None
            }
        if self.kept:
            slots = [kept[step] for kept in self.kept.values()]
            torch._foreach_copy_(slots, [self.by_place[place].last for place in self.kept])

    def remove(self) -> None:
        """Take every hook off the model."""
        for tap in self.by_place.values():
            tap.remove()


@contextmanager
def inputs_of(model: nn.Module, paths: list[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What goes into the modules at ``paths`` during the block: path -> one tensor a call."""
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}

    def watch(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: seen[path].append(_first(args, kwargs))

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(watch(path), with_kwargs=True)
        for path in paths
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
