"""No registered operation hands out its operands' memory, or writes to what it does not declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashnorm_triton import attention, block_ops, ops

WRITTEN = ("key_cache", "value_cache")


def _linears(rows: int, k: int, n: int) -> Iterator[dict[str, Any]]:
    """norm_linear and linear with all that may be absent absent, and with all of it."""
    x, weight, vector = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    yield {"x": x, "weight": weight, "bias": None, "residual": None}
    yield {"x": x, "weight": weight, "bias": vector, "residual": torch.randn(rows, n)}


def _rotary(tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
    """One row of packed heads, of one head each too: everything is contiguous where it lies."""
    for heads, d in (((2, 1), 4), ((1, 1), 2)):
        qkv = torch.randn(1, tokens, (heads[0] + 2 * heads[1]) * d)
        places = [torch.zeros(1, heads[1], 5, d) for _ in WRITTEN] if more else ()
        for rotary, eps in ((0, None), (d, None), (2, 1e-3), (0, 1e-3)):
            cos, sin = torch.randn(2, 1, tokens, rotary) if rotary else (None, None)
            angles = {"cos": cos, "sin": sin, **dict(zip(WRITTEN, places, strict=False))}
            yield {"qkv": qkv, "heads": heads, "head_dim": d, "eps": eps, **angles, **more}


def _grouped(d: int) -> Iterator[dict[str, Any]]:
    """One key, of which attention is the value; and heads too wide to be rows."""
    for length in (1, 3):
        k, v = torch.randn(2, 1, 1, length, d)
        q, mask = torch.randn(1, 2, 1, d), torch.zeros(1, 1, 1, length)
        yield {"q": q, "k": k, "v": v, "mask": mask, "scale": 1.0}


def _cases() -> dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]]:
    """By registered name: the function that calls it, and the calls that tempt it."""
    sizes = (1, 1, 1), (1, 4, 4), (0, 4, 4), (3, 4, 2)
    linears = [case for size in sizes for case in _linears(*size)]
    rows = [torch.randn(m, k) for m, k in ((1, 1), (1, 4), (0, 4), (3, 4))]
    norms = [{"x": x, "eps": 1e-3, "gain": g} for x in rows for g in (None, torch.ones(x.shape[1]))]
    activations = [{"activation": "relu"}, {"activation": "silu", "gated": True}]
    normed = [{**c, "eps": 1e-3, **a} for c in linears[2:4] for a in activations if not (
        a.get("gated") and c["residual"] is not None)]  # fmt: skip
    return {
        "norm_linear": (ops.norm_linear, [*normed, *({**c, "eps": 1e-3} for c in linears)]),
        "rms_norm": (ops.rms_norm, norms),
        "linear": (block_ops.linear, linears),
        "add_rms_norm": (
            block_ops.add_rms_norm, [{**c, "residual": torch.randn_like(c["x"])} for c in norms]
        ),
        "rotary_heads": (block_ops.rotary_heads, [*_rotary(1), *_rotary(2)]),
        "rotary_heads_cached": (
            block_ops.rotary_heads, list(_rotary(1, cache_position=torch.tensor([2])))
        ),
        "grouped_attention": (
            attention.grouped_attention, [*_grouped(4), *_grouped(attention._WIDEST_AS_ROWS + 8)]
        ),
    }  # fmt: skip


CASES = _cases()


class Seen(TorchDispatchMode):
    """Sends public functions to what is registered; notes which operations they were."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashnorm":
            self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["eager", "registered", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_tensors_of_their_own(name: str, way: str, device: torch.device) -> None:
    function, cases = CASES[name]
    seen = Seen()
    for case in cases:
        case = {k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in case.items()}
        given = {k: v for k, v in case.items() if isinstance(v, Tensor)}
        if way == "gradients":
            if name == "rotary_heads_cached":
                continue  # refused: caches are written without autograd
            next(iter(given.values())).requires_grad_()
        before = {k: v.detach().clone() for k, v in given.items()}
        for _ in range(2):  # the first call of a kind, and one that was kept
            if way == "registered":
                with seen, torch.no_grad():
                    made = function(**case)
            else:
                made = function(**case)
            made = [made] if isinstance(made, Tensor) else list(made)
            if name == "rotary_heads_cached":
                assert made[1] is case["key_cache"] and made[2] is case["value_cache"]
                del made[1:]
            for index, result in enumerate(made):
                others = [*given.values(), *made[:index]]
                assert not any(torch._C._is_alias_of(result, other) for other in others), case
            for key, tensor in given.items():
                written = name == "rotary_heads_cached" and key in WRITTEN
                assert written != torch.equal(tensor, before[key]), key
    if way == "registered":
        assert seen.names == {name}


def test_every_registered_operation_is_tried() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert {n.split("::")[1] for n in names if n.startswith("flashnorm::")} == set(CASES)
