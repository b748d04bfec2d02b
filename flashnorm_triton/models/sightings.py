"""What is written down while norm outputs are followed: one :class:`Flow` a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PACKED, PASSTHROUGH = "packed", "passthrough"
_BOTH = (PACKED, PASSTHROUGH)


@dataclass
class Flow:
    """Where one norm's output went.

    ``consumers`` maps each module whose weights read it to its kind; ``scaled`` names those that
    read it times a number. ``obstacles`` maps each reason to the forms of fusing that it forbids;
    ``returned`` maps how the output also leaves a module to the name it has there; ``outputs`` are
    the names it has in what the whole model returns ("" for none). ``unlike`` says why no other
    norm could be called in its place. ``readers`` are the modules that were handed it,
    ``call_sets`` the sets of consumers of its calls.
    """

    norm: str
    calls: int = 0
    operations: int = 0
    consumers: dict[str, str] = field(default_factory=dict)
    scaled: dict[str, None] = field(default_factory=dict)
    obstacles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    returned: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    unlike: str | None = None
    readers: dict[str, None] = field(default_factory=dict)
    call_sets: set[frozenset[str]] = field(default_factory=set)

    def obstruct(self, reason: str, *forms: str) -> None:
        """Write down, once, why this norm cannot be fused (in these forms; none given: in any)."""
        self.obstacles[reason] = tuple(set(self.obstacles.get(reason, ())) | set(forms or _BOTH))

    def against(self, *forms: str) -> list[str]:
        """The obstacles that forbid all of ``forms``; those that forbid everything come first."""
        found = [
            reason for reason, forbidden in self.obstacles.items() if set(forms) <= set(forbidden)
        ]
        return sorted(found, key=lambda reason: len(self.obstacles[reason]) < len(_BOTH))

    def size(self) -> tuple[int, ...]:
        """How much is written down: it changes with every addition."""
        tables = (self.consumers, self.scaled, self.obstacles, self.returned, self.outputs)
        tables += (self.readers,)
        forms = sum(map(len, self.obstacles.values()))
        return (self.calls, self.operations, forms, self.unlike is None, *map(len, tables))

    def of_another(self, moved: Callable[[str], str], told: Callable[[str], str]) -> Flow:
        """The same of a norm in another layer: ``moved`` gives the names there, ``told`` texts."""
        return Flow(
            moved(self.norm),
            self.calls,
            self.operations,
            {moved(name): kind for name, kind in self.consumers.items()},
            {moved(name): None for name in self.scaled},
            {told(reason): forms for reason, forms in self.obstacles.items()},
            {told(how): key for how, key in self.returned.items()},
            dict(self.outputs),
            None if self.unlike is None else told(self.unlike),
            {moved(name): None for name in self.readers},
            {frozenset(map(moved, names)) for names in self.call_sets},
        )


@dataclass
class Tag:
    """One call of a norm: its flow and the modules that have read this very output.

    ``source`` is the norm's input; ``written`` says what has changed it since.
    """

    flow: Flow
    source: Tensor | None = None
    consumers: set[str] = field(default_factory=set)
    written: str | None = None
    scaled: bool = False

    def after_scaling(self) -> Tag:
        """The tag of this output times a number."""
        return Tag(self.flow, self.source, self.consumers, self.written, scaled=True)


class LastDim(int):
    """The last size of a tagged tensor, as an int that tells when it is computed with."""

    flow: Flow

    def _used(self) -> int:
        self.flow.obstruct("the size of its output's last dimension is computed with", PACKED)
        return int(self)


def _watch(name: str) -> None:
    plain = getattr(int, name)
    setattr(LastDim, name, lambda self, *other: plain(self._used(), *other))


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow"),
    *("neg", "float", "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool"),
):
    _watch(f"__{_name}__")


class Shape(tuple):
    """What a tagged tensor's ``shape`` returns: a tuple whose last entry is a LastDim."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            return part
        return Shape(part) if any(isinstance(n, LastDim) for n in part) else torch.Size(part)

    def numel(self) -> int:
        """The product of the sizes, as of a ``torch.Size``."""
        self[-1]._used()
        return torch.Size(int(n) for n in self).numel()
