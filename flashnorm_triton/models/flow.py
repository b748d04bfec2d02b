"""Following every norm's output to whatever reads it.

:class:`Follower` sees each torch function that a module's Python code calls and each module call.
The tensor a norm returns is tagged; the tag passes through operations that keep its last dimension
whole, and anything else that touches it is written down: a plain linear as a consumer, all the rest
as an obstacle, with the operation and the module it stands in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

_METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
    )
} | {
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_contiguous,
    Tensor.is_inference,
    Tensor.ndimension,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_grad_enabled,
}

_VIEWS = {
    getattr(owner, name)
    for owner in (Tensor, torch)
    for name in (
        "view",
        "reshape",
        "contiguous",
        "clone",
        "detach",
        "to",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "swapaxes",
        "flatten",
        "unflatten",
        "expand",
        "__getitem__",
        "narrow",
        "select",
        "index_select",
        "alias",
    )
    if hasattr(owner, name)
}
_SHAPE = Tensor.shape.__get__


class LastDim(int):
    """The last size of a tagged tensor, as an int that tells when it is computed with."""

    flow: Flow

    def _used(self) -> int:
        self.flow.obstruct("the size of its output's last dimension is computed with")
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


class _Shape(tuple):
    """What a tagged tensor's ``shape`` returns: a tuple whose last entry is a LastDim."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            return part
        return _Shape(part) if any(isinstance(n, LastDim) for n in part) else torch.Size(part)

    def numel(self) -> int:
        self[-1]._used()
        return torch.Size(int(n) for n in self).numel()


@dataclass
class Flow:
    """Where one norm's output went. ``readers`` are the modules that were handed it."""

    norm: str
    calls: int = 0
    operations: int = 0
    consumers: dict[str, int] = field(default_factory=dict)
    obstacles: dict[str, None] = field(default_factory=dict)
    readers: dict[str, None] = field(default_factory=dict)
    call_sets: set[frozenset[str]] = field(default_factory=set)

    def obstruct(self, reason: str) -> None:
        """Write down, once, why this norm cannot be fused."""
        self.obstacles.setdefault(reason)


@dataclass
class Tag:
    """One call of a norm: its flow and the linears that have read this very output."""

    flow: Flow
    consumers: set[str] = field(default_factory=set)


def leaves(value: Any) -> Iterator[Any]:
    """Every non-container value inside nested lists, tuples and mappings."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def _map_leaves(value: Any, change: Any) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_map_leaves(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: _map_leaves(part, change) for key, part in value.items()}
    return change(value)


class Follower(TorchFunctionMode):
    """Watches torch functions while the double of a model runs; see the module's docstring.

    ``stack`` holds the names of the modules whose code is running, ``classes`` their class names.
    ``owners`` maps the id of a weight to the module it belongs to: a use of that weight in another
    module's code is noted in ``borrowed``.
    """

    def __init__(self, stack: list[str], classes: dict[str, str], owners: dict[int, str]) -> None:
        super().__init__()
        self.stack = stack
        self.classes = classes
        self.owners = owners
        self.borrowed: dict[str, str] = {}
        self.tags: dict[int, tuple[Tensor, Tag]] = {}
        self.quiet = False
        self.kernels = 0

    def where(self) -> str:
        """The module whose code is running, with its class, for a reader."""
        name = self.stack[-1] if self.stack else ""
        label = self.classes.get(name, "the model")
        return f"{name} ({label})" if name else label

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Follow nothing for a while, but count in ``kernels`` the tensors that are made."""
        self.quiet, self.kernels = True, 0
        try:
            yield
        finally:
            self.quiet = False

    def tag(self, tensor: Tensor, tag: Tag) -> None:
        """Follow ``tensor`` from here on. It is kept alive, so that its id stays its own."""
        self.tags[id(tensor)] = (tensor, tag)

    def tag_of(self, value: Any) -> Tag | None:
        """The tag of a value, if it is a tensor that is being followed."""
        entry = self.tags.get(id(value))
        return entry[1] if entry is not None else None

    def tags_in(self, values: Any) -> list[Tag]:
        """The tags of all followed tensors inside nested containers, each once."""
        if not self.tags:
            return []
        found = {id(tag): tag for tag in map(self.tag_of, leaves(values)) if tag is not None}
        return list(found.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            result = func(*args, **kwargs)
            self.kernels += _is_new(result, args)
            return result
        if func in _METADATA:
            return func(*args, **kwargs)
        inputs = list(leaves((args, kwargs)))
        sizes = {n.flow.norm: n.flow for n in inputs if isinstance(n, LastDim)}
        tags = self.tags_in(inputs)
        for value in inputs:
            owner = self.owners.get(id(value))
            if owner is not None and owner != self.stack[-1]:
                self.borrowed.setdefault(owner, self.where())
        if not tags:
            for flow in sizes.values():
                flow.obstruct(
                    f"the size of its output's last dimension goes into {_name(func)} in "
                    f"{self.where()}"
                )
            return _decide(func, *_map_leaves((args, kwargs), _plain))
        if len(tags) == 1 and self.tag_of(args[0] if args else None) is tags[0]:
            return self._follow(func, args, kwargs, tags[0])
        return self._obstruct(func, args, kwargs, tags)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict, tag: Tag) -> Any:
        tensor = args[0]
        plain_args, plain_kwargs = _map_leaves((args, kwargs), _plain)
        if func == _SHAPE or func is Tensor.size:
            shape = _Shape((*tensor.shape[:-1], LastDim(tensor.shape[-1])))
            tuple.__getitem__(shape, -1).flow = tag.flow
            return shape if len(args) + len(kwargs) == 1 else shape[_only(args[1:], kwargs)]
        if func not in _VIEWS:
            return self._obstruct(func, args, kwargs, [tag])
        result = func(*plain_args, **plain_kwargs)
        if not isinstance(result, Tensor) or not _keeps_last_dim(func, args, kwargs, result):
            where = self.where()
            tag.flow.obstruct(f"{_name(func)} in {where} depends on its output's last dimension")
        elif result.dtype != tensor.dtype:
            tag.flow.obstruct(f"its output is cast to {_short(result.dtype)} in {self.where()}")
        if isinstance(result, Tensor) and result.shape[-1:] == tensor.shape[-1:]:
            self.tag(result, tag)
        return result

    def _obstruct(self, func: Any, args: tuple[Any, ...], kwargs: dict, tags: list[Tag]) -> Any:
        for tag in tags:
            tag.flow.obstruct(f"its output is read by {_name(func)} in {self.where()}")
        return _decide(func, *_map_leaves((args, kwargs), _plain))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, LastDim) else value


def _decide(func: Any, args: tuple[Any, ...], kwargs: dict) -> Any:
    """Call ``func``; a truth value that depends on data there is not is taken to be False."""
    if func is Tensor.__bool__:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return False
    return func(*args, **kwargs)


def _keeps_last_dim(func: Any, args: tuple[Any, ...], kwargs: dict, result: Tensor) -> bool:
    """Whether the same call on a tensor with a longer last dimension gives a like result."""
    tensor = args[0]
    longer = tensor.shape[-1] + 5
    other = tensor.new_empty((*tensor.shape[:-1], longer))

    def swap(value: Any) -> Any:
        if value is tensor:
            return other
        return longer if isinstance(value, LastDim) else value

    try:
        swapped_args, swapped_kwargs = _map_leaves((args, kwargs), swap)
        answer = func(*swapped_args, **swapped_kwargs)
    except (RuntimeError, IndexError):
        return False
    return answer.shape == (*result.shape[:-1], longer)


def _is_new(result: Any, args: tuple[Any, ...]) -> int:
    """1 when ``result`` is a tensor with memory of its own: a kernel had to fill it."""
    if not isinstance(result, Tensor):
        return 0
    memory = result.untyped_storage()._cdata
    return int(
        all(
            value.untyped_storage()._cdata != memory
            for value in leaves(args)
            if isinstance(value, Tensor)
        )
    )


def _only(args: tuple[Any, ...], kwargs: dict) -> int:
    return int(args[0] if args else kwargs["dim"])


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"Tensor.{func.__self__.__name__}"
    return name.strip("_")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
