"""Tiny random models of real families, with random gains and biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 97
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"original_max_position_embeddings": 256},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> nn.Module:
    """A causal language model of ``family`` with 2 layers, in evaluation mode on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {} if family == "gpt2" else _SIZES
    settings = {"vocab_size": VOCABULARY, **sizes, **_EXTRA[family], **overrides}
    config = AutoConfig.for_model(family, **settings)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    torch.random.set_rng_state(state)
    return model.to(dtype).eval()


def randomise(model: nn.Module) -> None:
    """Random gains and biases, far from ones and zeros, and weights large enough to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.copy_(0.3 + torch.rand_like(parameter))
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            elif "embed" in name:
                parameter.normal_(0, 1.0)
            else:
                parameter.normal_(0, 0.12)


def token_ids(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, length), none of them padding."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=draw)
