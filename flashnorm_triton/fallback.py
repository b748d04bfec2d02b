"""What keeps a forward alive where a kernel cannot run: the reason, told once with its remedy.

No forward fails because a kernel does: no Triton, a GPU too old for it, a compiler that fails, a
driver that refuses a launch. What runs instead computes the same; the user reads one warning a
reason, not one a layer. Running out of memory is the caller's affair, and stays an error.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton import runtime

_PARTICULAR = re.compile(r"\S*[/\d]\S*")
_told: set[str] = set()


def has_kernels(x: Tensor) -> bool:
    """Whether x lies where kernels may run: what an operation asks before it chooses a plan."""
    return x.is_cuda


def unavailable(x: Tensor) -> str | None:
    """Why no kernel can run on x's GPU, with the remedy; None if kernels can."""
    return runtime.triton_unavailable() or runtime.too_old(x.get_device())


def warn_once(reason: str, message: str, stacklevel: int = 2) -> None:
    """Warn with ``message`` unless ``reason`` was told before; ``forget`` begins anew.

    Sizes and the names of temporary files do not make another reason.
    """
    kind = _PARTICULAR.sub("", reason)
    if kind not in _told:
        _told.add(kind)
        warnings.warn(f"flashnorm_triton: {message}", RuntimeWarning, stacklevel=stacklevel + 1)


def forget() -> None:
    """Tell every reason again."""
    _told.clear()


def reason_of(error: Exception) -> str:
    """An error in a line: its type, the last line of its message, and the remedy where known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__
    remedy = _remedy(error)
    return f"{said}; {remedy}" if remedy else said


def _remedy(error: Exception) -> str | None:
    damaged = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, EOFError))
    if damaged or "device kernel image is invalid" in str(error):
        return f"a file of Triton's cache is damaged: delete {_cache_folder()}"
    if isinstance(error, OSError):
        return (
            f"Triton's cache {_cache_folder()} must be writable, with room left: set "
            "TRITON_CACHE_DIR to another folder"
        )
    return None


def _cache_folder() -> str:
    try:
        from triton import knobs

        return str(knobs.cache.dir)
    except ImportError:
        return "(TRITON_CACHE_DIR)"


def first_call(
    what: str,
    prepare: Callable[[], Callable[..., Any]],
    instead: Callable[..., Any],
    *arguments: Any,
) -> tuple[Any, Callable[..., Any]]:
    """The result of a first call, and what to call from now on.

    That is what ``prepare`` makes, or ``instead`` where making or calling it fails; ``what`` names
    it in the warning. Raises torch.OutOfMemoryError, and what ``instead`` raises.
    """
    try:
        run = prepare()
        return run(*arguments), run
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's errors share no base class
        reason = reason_of(error)
    result = instead(*arguments)
    warn_once(reason, f"{what} failed ({reason}); running plain torch instead", stacklevel=4)
    return result, instead
