"""What a module's place needs: attributes of the module before, and the hooks of accelerate.

``device_map`` puts a hook on every module. Where the weights stay on the module's own device, all
that the hook does is move inputs there: such a hook goes on with the module that is put in. A hook
that fetches weights for each call (offloading to the CPU or a disk) cannot: there is nothing to
fold, and nothing that would be fetched for the new module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashnorm_triton.models.linears import MODULE_STATE

HOOK = "_hf_hook"
# What accelerate.hooks.add_hook_to_module sets on a module.
HOOK_ATTRIBUTES = (HOOK, "_old_forward", "forward")


def only_moves_inputs(module: nn.Module) -> bool:
    """Whether ``module`` has an accelerate hook, and all that it does is to move inputs.

    A hook of another kind, one that offloads, or one whose weights are elsewhere does more.
    """
    hook = getattr(module, HOOK, None)
    kind = type(hook)
    if (kind.__module__, kind.__name__) != ("accelerate.hooks", "AlignDevicesHook"):
        return False
    if hook.offload or hook.io_same_device or hook.execution_device is None:
        return False
    device = torch.empty(0, device=hook.execution_device).device
    return all(tensor.device == device for tensor in module.parameters(recurse=False))


def own_attributes(stock: nn.Module) -> dict[str, Any]:
    """What a module's class, or whoever built the model, set on it: the code around it may ask.

    For the module in its place; without what torch and accelerate keep there.
    """
    left = MODULE_STATE | {*HOOK_ATTRIBUTES}
    return {name: value for name, value in vars(stock).items() if name not in left}


def carry_hook(stock: nn.Module, replacement: nn.Module) -> None:
    """Give ``replacement`` the accelerate hook of the module it stands in for, if that has one."""
    hook = getattr(stock, HOOK, None)
    if hook is None:
        return
    from accelerate.hooks import add_hook_to_module

    add_hook_to_module(replacement, hook)
