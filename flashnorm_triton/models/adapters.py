"""Fused linears refuse adapters (LoRA and its kin): what they are given is not a normed input.

An adapter computes from its linear's input beside the linear. A fused linear's input is the packed
output of the whole site, or the row before its norm: an adapter put on it would compute from that,
and say nothing. PEFT asks every linear for its size before it wraps it; these answer with an error,
so nothing has been wrapped yet. Adapters that are there before patching are no matter: their norms
run alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class AskedBy:
    """A module attribute that answers everyone but a package that would wrap the module."""

    def __init__(self, package: str = "peft.tuners") -> None:
        self.package = package

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        if not torch.compiler.is_compiling():
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking.startswith(self.package):
                raise RuntimeError(
                    f"an adapter cannot be put on a linear that is fused with its norm "
                    f"({module.site.report.norm}): call revert() on the handle, add the adapter, "
                    "then patch again"
                )
        parameters = vars(module)["_parameters"]
        return parameters[self.name] if self.name in parameters else vars(module)[self.name]

    def __set__(self, module: Any, value: Any) -> None:
        if self.name in vars(module)["_parameters"]:
            module.register_parameter(self.name, value)
        else:
            vars(module)[self.name] = value
