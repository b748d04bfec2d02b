"""Saved tiny models for the tests of folding, and how two of them are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn


def saved(
    path: Path, family: str = "llama", shard: str = "60KB", dtype: Any = torch.float32, **sizes: Any
) -> Path:
    """A tiny random model of ``family``, written to ``path`` in shards of about that size."""
    tiny_model(family, dtype, **sizes).save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text('{"version": "1.0", "note": "byte for byte"}\n')
    return path


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, read by the safetensors library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def layout(folder: Path) -> dict[str, Any]:
    """File, dtype, shape and metadata of every tensor of a folder."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = (file.name, part.get_dtype(), tuple(part.get_shape()))
            found[file.name] = opened.metadata()
    return found


def record(folder: Path) -> dict[str, Any]:
    """The content of flashnorm.json."""
    return json.loads((folder / "flashnorm.json").read_text())


def load(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """What stock transformers loads, every tensor of it and no other."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    """Logits (B, T, V) in float64."""
    return model(token_ids(4, 24) if ids is None else ids, use_cache=False).logits.double()


def relative(got: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius distance."""
    return float((got - wanted).norm() / wanted.norm())
