"""Marks around the parts of a model for the length of a profile: what launches what.

Hooks open and close ranges of the profiler around modules; the rotary embedding, a function, and
the cache's update are wrapped. A layer that runs as a block gets none, inside or out: with a hook
inside it would be the layer's own code again (docs/blocks.md); its launches tell themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flashnorm_triton.bench.launch_groups import MARK
from flashnorm_triton.models.auditor import audit

_ROTARY = "apply_rotary_pos_emb"


def norm_paths(model: nn.Module) -> tuple[str, ...]:
    """Where the norms of a stock model are, from its modules alone (a meta model has them too)."""
    return tuple(site.norm for site in audit(model).sites)


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """The layers that run as blocks."""
    return tuple(path for path, module in model.named_modules() if "block" in vars(module))


def kind_of(module: nn.Module) -> str | None:
    """What kind of mark a module that is no norm gets; None for none."""
    name = type(module).__name__
    if isinstance(module, nn.Linear) or "Linear" in name:
        return "matmul"
    if "Rotary" in name:
        return "rotary"
    if type(module).__module__.startswith(("transformers.activations", "torch.nn.modules.act")):
        return "activation"
    if name.endswith("Attention"):
        return "attention"
    if name.endswith("MLP"):
        return "mlp"
    return "layer" if name.endswith(("DecoderLayer", "Block")) else None


@contextmanager
def marked(model: nn.Module, norms: tuple[str, ...], cache: Any = None) -> Iterator[None]:
    """Within the block each part of ``model`` runs in a range of the profiler named for it.

    ``norms``: their paths (``norm_paths`` of the model before it was patched). ``cache``: whose
    ``update`` is marked. Everything is as it was afterwards, exceptions included.
    """
    blocks = block_paths(model)
    handles = []
    restore: list[Callable[[], None]] = []
    opened: list[Any] = []

    def open_range(kind: str, path: str) -> None:
        opened.append(torch.profiler.record_function(f"{MARK}|{kind}|{path}"))
        opened[-1].__enter__()

    def close_range() -> None:
        opened.pop().__exit__(None, None, None)

    def wrapped(call: Callable[..., Any], kind: str, path: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def marked_call(*args: Any, **kwargs: Any) -> Any:
            open_range(kind, path)
            try:
                return call(*args, **kwargs)
            finally:
                close_range()

        return marked_call

    try:
        for path, module in model.named_modules():
            if any(path == block or path.startswith(f"{block}.") for block in blocks):
                continue
            kind = "norm" if path in norms else kind_of(module)
            if kind is not None:
                before = functools.partial(_before, open_range, kind, path)
                handles.append(module.register_forward_pre_hook(before))
                handles.append(module.register_forward_hook(lambda *_: close_range()))
        for space in {type(module).__module__ for module in model.modules()}:
            values = vars(sys.modules[space])
            if callable(values.get(_ROTARY)):
                restore.append(functools.partial(values.__setitem__, _ROTARY, values[_ROTARY]))
                values[_ROTARY] = wrapped(values[_ROTARY], "rotary", space)
        if cache is not None:
            cache.update = wrapped(cache.update, "cache", "update")
            restore.append(functools.partial(delattr, cache, "update"))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for put_back in restore:
            put_back()
        while opened:  # a forward that failed half-way
            close_range()


def _before(open_range: Callable[[str, str], None], kind: str, path: str, *_: Any) -> None:
    open_range(kind, path)


@contextmanager
def timed(model: nn.Module, norms: tuple[str, ...]) -> Iterator[list[tuple[Any, Any]]]:
    """CUDA events before and after every call of a norm, as the paper's table of the decode step
    has them: what lies between is the launches' gaps too."""
    pairs: list[tuple[Any, Any]] = []

    def before(*_: Any) -> None:
        pairs.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        pairs[-1][0].record()

    def after(*_: Any) -> None:
        pairs[-1][1].record()

    handles = []
    for path in norms:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    try:
        yield pairs
    finally:
        for handle in handles:
            handle.remove()
