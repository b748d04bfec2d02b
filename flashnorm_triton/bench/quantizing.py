"""Weight-only quantization of a model's linears, by whichever library the machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

KINDS = ("none", "int8", "int4")
GROUP = 128
"""Inputs that share a scale of int4 by torchao."""


class Unavailable(RuntimeError):
    """No library here quantizes so; the message says why, of each."""


def quantize(model: nn.Module, kind: str) -> str | None:
    """Quantize the weights of every linear but the head, in place; the library that did it.

    "int8" has a scale a row, "int4" one a group; "none" leaves the model. Raises ValueError for
    another kind, ``Unavailable`` where no library serves, naming what each lacks.
    """
    if kind not in KINDS:
        raise ValueError(f"quantization {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if kind == "none":
        return None
    reasons = []
    for name, way in _LIBRARIES.items():
        if importlib.util.find_spec(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            way(model, kind)
        except Exception as error:
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        left = [path for path, linear in linears(model) if not _is_other(linear)]
        if not left:
            return name
        # A library may pass over, in silence, what its kernels do not take.
        reasons.append(f"{name} left {len(left)} linears as they were, {left[0]} the first")
        if len(left) < len(linears(model)):
            break  # half done: no other library may go on from here
    raise Unavailable(f"no weight-only {kind}: {'; '.join(reasons)}")


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linears that are quantized: all but the language model's head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _is_other(linear: nn.Linear) -> bool:
    return type(linear) is not nn.Linear or type(linear.weight.data) is not torch.Tensor


def _torchao(model: nn.Module, kind: str) -> None:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    chosen = {path for path, _ in linears(model)}
    if kind == "int8":
        config: Any = Int8WeightOnlyConfig()
    else:
        # The form whose matmul is torch's own.
        config = Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    quantize_(model, config, filter_fn=lambda module, path: path in chosen)


def _bitsandbytes(model: nn.Module, kind: str) -> None:
    import bitsandbytes as bnb

    for path, linear in linears(model):
        size, device = (linear.in_features, linear.out_features), linear.weight.device
        weight = linear.weight.data.cpu()
        with torch.device("meta"):
            if kind == "int8":
                made: Any = bnb.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
            else:
                dtype = linear.weight.dtype
                made = bnb.nn.Linear4bit(*size, bias=False, compute_dtype=dtype, quant_type="nf4")
        if kind == "int8":
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        made.bias = linear.bias
        holder, _, key = path.rpartition(".")
        model.get_submodule(holder)._modules[key] = made.to(device).eval()


_LIBRARIES: dict[str, Callable[[nn.Module, str], None]] = {
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
}
