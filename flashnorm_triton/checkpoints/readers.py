"""The parameters through which a module reads a norm's output, and their input axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flashnorm_triton.checkpoints.names import NotFollowed

_EXPERT_INPUTS = ("gate_up_proj", "gate_proj", "up_proj")
_EXPERT_REST = ("down_proj",)


@dataclass(frozen=True)
class Reader:
    """A parameter, the axis of length K that meets the norm's output, and its linear bias."""

    parameter: str
    axis: int
    bias: str | None = None


def readers(path: str, module: nn.Module, kind: str, size: int) -> tuple[Reader, ...]:
    """What a consumer of ``kind`` (as the audit names it) reads a norm of length ``size`` with.

    Raises NotFollowed for a module whose parameters are not all understood.
    """
    if kind in ("linear", "conv1d"):
        biased = module._parameters.get("bias") is not None
        axis = 1 if kind == "linear" else 0
        found = [Reader(f"{path}.weight", axis, f"{path}.bias" if biased else None)]
    elif kind == "router":
        found = [Reader(f"{path}.weight", 1)]
    elif kind == "experts":
        found = _experts(path, module, size)
    else:
        raise NotFollowed(f"{path} is no kind of module that a gain can be folded into ({kind})")
    for reader in found:
        name = reader.parameter.rpartition(".")[2]
        parameter = module._parameters.get(name)
        if parameter is None or parameter.shape[reader.axis] != size:
            raise NotFollowed(f"{reader.parameter} has no input axis of {size}")
    return tuple(found)


def _experts(path: str, module: nn.Module, size: int) -> list[Reader]:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    known = {*_EXPERT_INPUTS, *_EXPERT_REST}
    strange = [name for name in parameters if name.removesuffix("_bias") not in known]
    if strange:
        raise NotFollowed(f"{path} has a parameter that is not understood: {strange[0]}")
    axis = 1 if getattr(module, "is_transposed", False) else 2
    found = [Reader(f"{path}.{name}", axis) for name in _EXPERT_INPUTS if name in parameters]
    if not found or any(parameters[name].dim() != 3 for name in parameters if "bias" not in name):
        raise NotFollowed(f"{path} has no expert weights that are understood")
    return found
