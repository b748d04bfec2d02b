"""Tiny random models whose attention normalises again what its linears give."""

from __future__ import annotations

from typing import Any

import torch
from conftest import HAS_GPU
from tiny_models import randomise
from torch import Tensor, nn

DEVICE = "cuda" if HAS_GPU else "cpu"
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 64},
    # Layer 1 has one projection for k and v, layers 2 and 3 read the keys of layers before them.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 97,
        "sliding_window": 64,
    },
    "olmoe": _EXPERTS,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "q_lora_rank": 24,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "hc_mult": 2,
    },
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def cancel_model(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    embedding: float = 1.0,
    **overrides: Any,
) -> nn.Module:
    """A causal language model in evaluation mode, on the GPU where there is one.

    ``embedding`` scales its embeddings, and so the rows that the first pre-norm sees.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_SIZES, **_SETTINGS[family], **overrides}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model = model.float()
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(embedding)
    torch.random.set_rng_state(state)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the others know no float64
    return model.to(DEVICE, dtype).eval()


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    """The model's logits (batch, length, vocabulary)."""
    return model(ids.to(DEVICE), **options).logits


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative Frobenius distance from the float64 result."""
    return float((actual.double() - exact).norm() / exact.norm())
