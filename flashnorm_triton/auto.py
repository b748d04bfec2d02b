"""AutoFlashNormForCausalLM: stock loading, then the patch; it also loads strict checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashnorm_triton.checkpoints.source import RECORD

# What decides which files from_pretrained reads, of a hub model as well.
_PLACE = ("revision", "cache_dir", "token", "subfolder", "local_files_only", "force_download")


class AutoFlashNormForCausalLM:
    """``AutoModelForCausalLM`` whose models come out patched. Not to be instantiated."""

    def __init__(self) -> None:
        raise OSError("AutoFlashNormForCausalLM has no instances: call from_pretrained")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        patch_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a causal language model with transformers and patch it (FlashNorm).

        Everything is as in ``AutoModelForCausalLM.from_pretrained``, ``output_loading_info``
        included. ``patch_options`` are keyword arguments of :func:`flashnorm_triton.patch`;
        ``fn.patch(model)`` of the result gives its handle. A checkpoint that was folded with
        ``strict=True`` has no tensors for its folded norms: they are set to their identity.

        Raises ValueError when more is missing than the fold left out, and what transformers raises.
        """
        from flashnorm_triton.models import patch

        loaded = load(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        patch(model, **(patch_options or {}))
        return loaded


def load(name: str | Path, *args: Any, auto_class: Any = None, **kwargs: Any) -> Any:
    """What ``from_pretrained`` of ``auto_class`` (None: AutoModelForCausalLM) gives, stock modules,
    with the norms that a strict fold left out set to their identity.

    Raises ValueError when more is missing than the fold left out.
    """
    if auto_class is None:
        from transformers import AutoModelForCausalLM as auto_class
    record = fold_record(name, **{key: kwargs[key] for key in _PLACE if key in kwargs})
    if record is None or not record["removed"]:
        return auto_class.from_pretrained(name, *args, **kwargs)
    wanted = kwargs.pop("output_loading_info", False)
    with _quiet():
        model, info = auto_class.from_pretrained(name, *args, output_loading_info=True, **kwargs)
    restored = _set_identities(model, record)
    missing = sorted(set(info["missing_keys"]) - restored)
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} tensors that its fold did not leave out, first "
            f"{missing[0]}: fold it again, or download it again"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        warnings.warn(f"{name} holds tensors that were not used: {unexpected[:3]}", stacklevel=2)
    if not wanted:
        return model
    return model, {**info, "missing_keys": type(info["missing_keys"])()}


def fold_record(name: str | Path, **place: Any) -> dict[str, Any] | None:
    """The flashnorm.json of a folder or hub model; None for one that was not folded."""
    folder = Path(name)
    if folder.is_dir():
        found = folder / place.get("subfolder", "") / RECORD
        return json.loads(found.read_text(encoding="utf-8")) if found.is_file() else None
    from transformers.utils import cached_file

    try:
        cached = cached_file(
            str(name),
            RECORD,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **place,
        )
    except OSError:
        return None  # no such model: from_pretrained says so better
    return json.loads(Path(cached).read_text(encoding="utf-8")) if cached else None


@torch.no_grad()
def _set_identities(model: nn.Module, record: Mapping[str, Any]) -> set[str]:
    """Ones (zeros for the 1+w convention) into every norm that was left out; their parameters."""
    restored = set()
    removed = set(record["removed"])
    for fold in record["folds"]:
        values = {"weight": 0.0 if fold["convention"] == "1+w" else 1.0, "bias": 0.0}
        for key, stored in (("weight", fold["gain"]), ("bias", fold["norm_bias"])):
            if stored in removed:
                parameter = model.get_submodule(fold["norm"])._parameters[key]
                parameter.fill_(values[key])
                restored.add(f"{fold['norm']}.{key}")
    return restored


@contextmanager
def _quiet() -> Iterator[None]:
    """No report of missing tensors: here some are meant to be missing."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
