"""Following every norm's output to whatever reads it.

:class:`Follower` sees each torch function that a module's Python code calls and each module call.
The tensor a norm returns is tagged; the tag passes through operations that keep its last dimension
whole. A product with a module's own weights makes that module a consumer; anything else that
touches the tensor is written down as an obstacle, with the operation and the module it stands in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashnorm_triton.models import integers
from flashnorm_triton.models import torch_functions as known
from flashnorm_triton.models.sightings import PACKED, PASSTHROUGH, LastDim, Shape, Tag


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
    ``owners`` maps the id of a parameter to the module it belongs to; ``leaves`` names the modules
    (linears, norms) that are not looked into: a use of their weights in another module's code is
    noted in ``borrowed``. With ``counting``, integers are computed (:mod:`integers`).
    """

    def __init__(
        self,
        stack: list[str],
        classes: dict[str, str],
        owners: dict[int, tuple[str, Tensor]],
        closed: set[str],
    ) -> None:
        super().__init__()
        self.stack = stack
        self.classes = classes
        self.owners = owners
        self.closed = closed
        self.borrowed: dict[str, str] = {}
        self.tags: dict[int, tuple[Tensor, Tag]] = {}
        self._weights: dict[int, tuple[Tensor, str, Tensor]] = {}
        self.quiet = False
        self.counting = False
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

    def forget(self) -> None:
        """Start anew: no tensor is followed."""
        self.tags.clear()
        self._weights.clear()

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

    def consume(self, tag: Tag, name: str, kind: str) -> None:
        """Write down that the module ``name`` reads this norm output with its own weights."""
        tag.consumers.add(name)
        tag.flow.consumers[name] = kind
        if tag.written is not None:
            tag.flow.obstruct(f"its input is changed in place by {tag.written}", PASSTHROUGH)
        if tag.scaled:
            tag.flow.scaled.setdefault(name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            result = func(*args, **kwargs)
            self.kernels += _is_new(result, args)
            return result
        if func in known.METADATA:
            return func(*args, **kwargs)
        inputs = list(leaves((args, kwargs)))
        sizes = {n.flow.norm: n.flow for n in inputs if isinstance(n, LastDim)}
        tags = self.tags_in(inputs)
        weights = self._weights_in(inputs)
        if known.writes_in_place(func):
            self._note_write(func, args)
        if not tags:
            for flow in sizes.values():
                flow.obstruct(
                    f"the size of its output's last dimension goes into {known.name_of(func)} in "
                    f"{self.where()}",
                    PACKED,
                )
            answer = integers.answer if self.counting else known.answer
            result = answer(func, *_map_leaves((args, kwargs), _plain))
            if weights and isinstance(result, Tensor) and func in known.WEIGHT_VIEWS:
                owner, parameter = weights[0]
                self._weights[id(result)] = (result, owner, parameter)
            return result
        if len(tags) == 1:
            if self.tag_of(args[0] if args else None) is tags[0] and not weights:
                return self._follow(func, args, kwargs, tags[0])
            if func in known.PRODUCTS and len(weights) == 1:
                return self._product(func, args, kwargs, tags[0], *weights[0])
            if func in known.SCALINGS:
                return self._follow(func, args, kwargs, tags[0])
            if func in known.MODELLED_ON and args and self.tag_of(args[0]) is None:
                return self._model(func, args, kwargs, tags[0])
        return self._obstruct(func, args, kwargs, tags)

    def _weights_in(self, inputs: list[Any]) -> list[tuple[str, Tensor]]:
        """The matrices of the model's own among the inputs, or views of them; noted if borrowed."""
        found = []
        for value in inputs:
            entry = self.owners.get(id(value))
            if entry is not None:
                owner, parameter = entry
                if owner in self.closed and owner != self.stack[-1]:
                    self.borrowed.setdefault(owner, self.where())
                if parameter.dim() > 1:
                    found.append((owner, parameter))
            elif id(value) in self._weights:
                found.append(self._weights[id(value)][1:])
        return found

    def _product(
        self, func: Any, args: tuple[Any, ...], kwargs: dict, tag: Tag, owner: str, weight: Tensor
    ) -> Any:
        """A product of the followed tensor with a weight of the module whose code is running."""
        result = known.answer(func, *_map_leaves((args, kwargs), _plain))
        here = self.stack[-1]
        if here and owner.startswith(f"{here}."):
            owner = here  # the code of a module uses the weight of its child: it is the reader
        if owner != here or owner in self.closed:
            tag.flow.obstruct(
                f"its output is read by {known.name_of(func)} with the weight of "
                f"{owner or 'the model'} in {self.where()}"
            )
            return result
        self.consume(tag, owner, "experts" if weight.dim() > 2 else "router")
        tag.flow.obstruct(
            f"its output is read by {known.name_of(func)} in {self.where()}, whose code is its own",
            PACKED,
        )
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict, tag: Tag) -> Any:
        tensor = next(value for value in args if self.tag_of(value) is tag)
        plain_args, plain_kwargs = _map_leaves((args, kwargs), _plain)
        if func == known.SHAPE or func is Tensor.size:
            shape = Shape((*tensor.shape[:-1], LastDim(tensor.shape[-1])))
            tuple.__getitem__(shape, -1).flow = tag.flow
            return shape if len(args) + len(kwargs) == 1 else shape[_only(args[1:], kwargs)]
        if func in known.LIKE:
            return self._model(func, args, kwargs, tag)
        scales = func in known.SCALINGS and known.is_scaling(args, kwargs)
        if scales and not known.writes_in_place(func):
            result = func(*plain_args, **plain_kwargs)
            tag.flow.obstruct(
                f"its output is scaled by {known.name_of(func)} in {self.where()}", PASSTHROUGH
            )
            self.tag(result, tag.after_scaling())
            return result
        if func in known.DROPOUTS and known.drops_nothing(func, plain_args, plain_kwargs):
            result = func(*plain_args, **plain_kwargs)
            self.tag(result, tag)
            return result
        if func not in known.VIEWS:
            return self._obstruct(func, args, kwargs, [tag])
        result = known.answer(func, plain_args, plain_kwargs)
        if not isinstance(result, Tensor) or result.shape[-1:] != tensor.shape[-1:]:
            tag.flow.obstruct(
                f"{known.name_of(func)} in {self.where()} depends on its output's last dimension"
            )
            return result
        if not _keeps_last_dim(func, args, kwargs, result):
            # In row-major order a last dimension of the same size is the same columns.
            forms = (PACKED,) if func in known.RESHAPES else ()
            tag.flow.obstruct(
                f"{known.name_of(func)} in {self.where()} depends on its output's last dimension",
                *forms,
            )
        elif result.dtype != tensor.dtype:
            # What is not normalised yet may be too large for float16.
            forms = () if result.dtype == torch.float16 else (PACKED,)
            tag.flow.obstruct(
                f"its output is cast to {_short(result.dtype)} in {self.where()}", *forms
            )
        self.tag(result, tag)
        return result

    def _model(self, func: Any, args: tuple[Any, ...], kwargs: dict, tag: Tag) -> Any:
        """A function that reads no more of the followed tensor than its shape and dtype."""
        tag.flow.obstruct(
            f"{known.name_of(func)} in {self.where()} makes a tensor of its output's shape", PACKED
        )
        return known.answer(func, *_map_leaves((args, kwargs), _plain))

    def _note_write(self, func: Any, args: tuple[Any, ...]) -> None:
        """A change in place of what a norm was given: its output must not be that very tensor."""
        target = args[0] if args else None
        if not isinstance(target, Tensor):
            return
        for tag in {id(tag): tag for _, tag in self.tags.values()}.values():
            if tag.written is None and share_memory(target, tag.source):
                tag.written = f"{known.name_of(func)} in {self.where()}"

    def _obstruct(self, func: Any, args: tuple[Any, ...], kwargs: dict, tags: list[Tag]) -> Any:
        for tag in tags:
            tag.flow.obstruct(f"its output is read by {known.name_of(func)} in {self.where()}")
        return known.answer(func, *_map_leaves((args, kwargs), _plain))


def share_memory(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors lie in the same memory."""
    return other is not None and torch._C._is_alias_of(one, other)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, LastDim) else value


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
        answer = known.answer(func, swapped_args, swapped_kwargs)
    except (RuntimeError, IndexError):
        return False
    return answer.shape == (*result.shape[:-1], longer)


def _is_new(result: Any, args: tuple[Any, ...]) -> int:
    """1 when ``result`` is a tensor with memory of its own: a kernel had to fill it."""
    if not isinstance(result, Tensor):
        return 0
    tensors = [value for value in leaves(args) if isinstance(value, Tensor)]
    return int(not any(share_memory(result, value) for value in tensors))


def _only(args: tuple[Any, ...], kwargs: dict) -> int:
    return int(args[0] if args else kwargs["dim"])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
