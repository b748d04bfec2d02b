"""Decoders with random weights and random gains: of known models' shapes, or of any config.

A fresh model's gains are ones and would hide a gain that is lost; its weights do not matter to
time. ``tiny`` is for trials of the scripts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from flashnorm_triton.tuning import sites

_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
_COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("LlamaConfig", {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }),
    "llama-3.1-8b": ("LlamaConfig", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }),
    "qwen3-4b": ("Qwen3Config", {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "gemma-3-1b": ("Gemma3TextConfig", {
        "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912,
        "vocab_size": 262144, "sliding_window": 512,
    }),
    "mistral-7b": ("MistralConfig", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 32768, "sliding_window": None, "tie_word_embeddings": False,
    }),
    "tiny": ("LlamaConfig", {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 128,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
NAMES = tuple(_SHAPES)


def known(name: str) -> str:
    """``name``, where it can name a model: a shape of ``NAMES``, ``demo``, a folder with a
    config.json, or a hub id; else ValueError, as argparse wants it."""
    if name in NAMES or name == "demo":
        return name
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file() or (name.count("/") == 1 and not folder.exists()):
        return name
    raise ValueError(
        f"no model {name!r}: give one of {', '.join(NAMES)}, demo, a folder with a config.json, or "
        "a hub id such as meta-llama/Llama-3.2-1B"
    )


def label(name: str) -> str:
    """What records and pictures call the model: a folder's own name, else ``name``."""
    folder = Path(name).expanduser()
    return folder.resolve().name if name not in NAMES and folder.is_dir() else name


def config_of(name: str) -> Any:
    """The config of a named shape, or of what ``tuning.sites.config_of`` takes."""
    if name not in _SHAPES:
        return sites.config_of(name)
    kind, fields = _SHAPES[name]
    extra = {} if kind == "Gemma3TextConfig" else {"rope_parameters": dict(_ROPE)}
    return getattr(transformers, kind)(**fields, **extra, **_COMMON, max_position_embeddings=8192)


def make(name: str, device: str, seed: int = 0, dtype: str = "bfloat16") -> Any:
    """A model of ``config_of(name)``: the same weights for the same seed, in whatever process."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name), dtype=getattr(torch, dtype)
        )
    for module in model.modules():
        gain = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(gain, torch.Tensor):
            noise = 0.3 * torch.randn_like(gain, dtype=torch.float32)
            gain.data.add_(noise.to(gain.dtype))
    return model.eval().requires_grad_(False)


def step_bytes(model: Any, batch: int, context: int) -> int:
    """Least bytes a decode step reads: every weight once (a tied head is the embedding) and the
    keys and values of ``context`` places for each of ``batch`` sequences."""
    config = model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    if not config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()  # a few rows of it alone
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    places = 2 * config.num_hidden_layers * heads * width
    return weights + batch * context * places * model.dtype.itemsize
