"""Saved models: folding them shard by shard, checking the result, handing it on.

The names are loaded on first use: the command line imports this package to list its commands.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "FoldResult": "flashnorm_triton.checkpoints.folding",
    "Verification": "flashnorm_triton.checkpoints.verifying",
    "fold_checkpoint": "flashnorm_triton.checkpoints.folding",
    "verify_checkpoint": "flashnorm_triton.checkpoints.verifying",
}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
