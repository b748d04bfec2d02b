"""What torch's Inductor is told of the package's operations before it meets them in a graph.

Up to torch 2.12 Inductor writes a line of its log for each operation that it meets for the first
time and has no lowering for, and spells out the operation's arguments even when nobody reads the
log. The text of a call holds the texts of the calls that made its arguments. In a graph of blocks
a layer's input is used twice by either half, so an operation met first after n layers, the last
norm of a model, costs 4ⁿ texts: with 16 layers the compiler never ends. An operation that it has
been given a lowering for, the very one that it would make itself, is written no line about.
"""

from __future__ import annotations

import sys

import torch
from torch._library.utils import get_layout_constraint_tag

OPERATIONS = (
    "norm_linear",
    "rms_norm",
    "linear",
    "add_rms_norm",
    "rotary_heads",
    "rotary_heads_cached",
    "grouped_attention",
)
_SPELLS_OUT = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)
_told: set[str] = set()


def announce() -> None:
    """Tell Inductor of the operations, if it is loaded and needs it; for their fake kernels.

    Whatever is lowered has been traced before with fake tensors, when Inductor is loaded already.
    """
    lowering = sys.modules.get("torch._inductor.lowering") if _SPELLS_OUT else None
    # While it is being imported it has no names yet.
    if lowering is None or not hasattr(lowering, "make_fallback"):
        return
    for name in OPERATIONS:
        # The module that registers an operation may not have been imported.
        if name in _told or not hasattr(torch.ops.flashnorm, name):
            continue
        _told.add(name)
        operation = getattr(torch.ops.flashnorm, name).default
        if operation not in lowering.lowerings:
            tag = get_layout_constraint_tag(operation)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(operation, layout_constraint=constraint)
