"""Decoders of known models' shapes with random weights and random gains.

A fresh model's gains are ones and would hide a gain that is lost; its weights do not matter to
time. ``tiny`` is for trials of the scripts.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

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


def config_of(name: str) -> Any:
    """The config of a named shape."""
    kind, fields = _SHAPES[name]
    extra = {} if kind == "Gemma3TextConfig" else {"rope_parameters": dict(_ROPE)}
    return getattr(transformers, kind)(**fields, **extra, **_COMMON, max_position_embeddings=8192)


def make(name: str, device: str, seed: int = 0) -> Any:
    """A bf16 model of a named shape: the same weights for the same seed, in whatever process."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    for path, parameter in model.named_parameters():
        if path.endswith("norm.weight"):
            noise = 0.3 * torch.randn_like(parameter, dtype=torch.float32)
            parameter.data.add_(noise.to(parameter.dtype))
    return model.eval().requires_grad_(False)


def step_bytes(model: Any, batch: int, context: int) -> int:
    """Least bytes a decode step reads: every weight once (a tied head is the embedding) and the
    keys and values of ``context`` places for each of ``batch`` sequences."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    if not config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()  # a few rows of it alone
    places = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return weights + batch * context * places * model.dtype.itemsize
