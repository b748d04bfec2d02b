"""The marks of a folded checkpoint: two keys of config.json, read and written.

``flashnorm_folded`` is what the FlashNorm authors' pull requests to vLLM (41431) and transformers
(45742) read, ``flash_norm`` what other engines do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAGS = ("flashnorm_folded", "flash_norm")
TAG = "weightless-rmsnorm"


def is_folded(config: Any) -> bool:
    """True when a config (a dict, or a transformers config object) says that gains are folded."""
    if isinstance(config, Mapping):
        return any(config.get(flag) is True for flag in FLAGS)
    return any(getattr(config, flag, None) is True for flag in FLAGS)


def with_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with both marks at its end."""
    return {**config, **dict.fromkeys(FLAGS, True)}
