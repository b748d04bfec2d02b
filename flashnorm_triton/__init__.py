"""FlashNorm for transformers: RMSNorm folded into, deferred past and fused with the next linear.

The public names are loaded on first use, so that ``import flashnorm_triton`` is quick and works
on a machine with no GPU, no CUDA and no Triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "norm_linear": "flashnorm_triton.ops",
    "rms_norm": "flashnorm_triton.ops",
    "patch": "flashnorm_triton.models",
    "patched": "flashnorm_triton.models",
    "audit": "flashnorm_triton.models",
    "fold_checkpoint": "flashnorm_triton.checkpoints",
    "patch_class": "flashnorm_triton.models.class_level",
    "unpatch_class": "flashnorm_triton.models.class_level",
    "verify_checkpoint": "flashnorm_triton.checkpoints",
    "AutoFlashNormForCausalLM": "flashnorm_triton.auto",
    "tune": "flashnorm_triton.tuning.run",
    "find_lag": "flashnorm_triton.lag",
    "LagReport": "flashnorm_triton.lag",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
