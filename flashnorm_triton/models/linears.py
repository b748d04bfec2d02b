"""What kind of linear a module is: found by its class, or by running the class on a stand-in.

A plain linear is a ``torch.nn.Linear``, or a subclass whose own forward gives the same answer.
``transformers.pytorch_utils.Conv1D`` is a linear with its weight transposed. Whatever else has the
sizes of a linear (quantized, LoRA, sharded, ...) is foreign: it is named, never taken apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR, CONV1D, FOREIGN = "linear", "conv1d", "foreign"
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_TOLERANCE = 1e-4
# What every module keeps for itself: its tables of parameters, children and hooks.
MODULE_STATE = frozenset(vars(nn.Module()))


def linear_kind(module: nn.Module) -> str | None:
    """ "linear", "conv1d", "foreign", or None for a module that is no linear at all."""
    kind = type(module)
    if kind is nn.Linear:
        return LINEAR if _has_own_weight(module) else FOREIGN
    if (kind.__module__, kind.__name__) == _CONV1D:
        return CONV1D if _has_own_weight(module) else FOREIGN
    if not all(isinstance(getattr(module, n, None), int) for n in ("in_features", "out_features")):
        return None
    if not isinstance(module, nn.Linear) or not _has_own_weight(module) or module._buffers:
        return FOREIGN
    # With a plain weight and a forward of its own (a router that also chooses): look into it.
    return LINEAR if _is_plain(module) else None


def _has_own_weight(module: nn.Module) -> bool:
    """Whether the weight is a plain floating parameter, and the module carries nothing else."""
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return False
    return set(module._parameters) <= {"weight", "bias"} and not module._modules


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(in_features K, out_features N) of a linear of any kind."""
    if hasattr(module, "nx"):
        return module.nx, module.nf
    return module.in_features, module.out_features


def _is_plain(module: nn.Linear) -> bool:
    if type(module).forward is nn.Linear.forward:
        return True
    return _answers_as_linear(module)


def _answers_as_linear(module: nn.Linear) -> bool:
    """Whether the class, run on a stand-in with random weights, computes x Wᵀ + c."""
    draw = torch.Generator(device="cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu", dtype=torch.float32)

    stand_in: Any = stand_in_for(module)
    stand_in.in_features, stand_in.out_features = 7, 5
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        stand_in._parameters["weight"] = nn.Parameter(random(5, 7), requires_grad=False)
        if stand_in._parameters.get("bias") is not None:
            stand_in._parameters["bias"] = nn.Parameter(random(5), requires_grad=False)
        x = random(2, 3, 7)
        try:
            with torch.autocast("cpu", enabled=False):
                answer = type(module).forward(stand_in, x.clone())
        except Exception:
            return False  # it wants other inputs or state: not a plain linear
        if not isinstance(answer, Tensor) or answer.shape != (2, 3, 5):
            return False
        expected = F.linear(x, stand_in._parameters["weight"], stand_in._parameters.get("bias"))
        return bool((answer - expected).abs().amax() <= _TOLERANCE * expected.abs().amax())


def stand_in_for(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, without hooks, children, buffers or weights."""
    stand_in = type(module).__new__(type(module))
    stand_in.__dict__.update(vars(module))
    stand_in.__dict__.update(nn.Module().__dict__)
    stand_in.training = False
    stand_in._parameters = dict(module._parameters)
    return stand_in
