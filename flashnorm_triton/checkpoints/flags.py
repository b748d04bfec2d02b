"""The marks of a folded checkpoint: two keys of config.json, read and written.

``flashnorm_folded`` is what the FlashNorm authors' pull requests to vLLM (41431) and transformers
(45742) read: there it makes every norm on the residual stream weightless, the final one included.
``flash_norm`` is what other engines read: there the final norm keeps its weight. An engine that
trusts a mark drops tensors, so each is written only where that drops nothing but identities.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

FOLDED, FLASH = "flashnorm_folded", "flash_norm"
TAG = "weightless-rmsnorm"


def is_folded(config: Any) -> bool:
    """True when a config (a dict, or a transformers config object) says that gains are folded."""
    if isinstance(config, Mapping):
        return any(config.get(flag) is True for flag in (FOLDED, FLASH))
    return any(getattr(config, flag, None) is True for flag in (FOLDED, FLASH))


def marks(kinds: Collection[str], gained: Collection[str], final: str | None) -> tuple[str, ...]:
    """The marks that are true of a fold.

    ``kinds`` are the kinds of the folded norms, ``gained`` the norms as wide as the residual
    stream that keep a gain, ``final`` is the final norm.
    """
    if set(kinds) != {"rms"} or set(gained) - {final}:
        return ()
    return (FLASH,) if gained else (FOLDED, FLASH)
