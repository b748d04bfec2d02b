"""Tiny models of the families whose layers run as blocks, with what each is special for."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from tiny_models import VOCABULARY, randomise
from torch import Tensor, nn

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
    "eos_token_id": None,
}
# Windows shorter than the texts, biases, multipliers, partial and no rotation, one layer of a kind.
_MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, **_MIXED},
    "qwen3": {"num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 11},
    "gemma3_text": _MIXED,
    "phi3": {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.5},
    "granite": {
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "ernie4_5": {"use_bias": True},
    # Half-blocks: the experts are called as they are. GPT-OSS: sinks, tables of half a width.
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, **_MIXED},
    # Queries that grow with every fourth token.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 4,
        },
    },
}
FAMILIES = tuple(SPECIAL)


def block_model(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A causal language model with random gains and biases, in evaluation mode on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SIZES, **SPECIAL[family], **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    torch.random.set_rng_state(state)
    if "num_experts_per_tok" in SPECIAL[family]:
        model.set_experts_implementation("eager")  # which knows float64
    return model.eval()


def cache_name(model: nn.Module) -> str:
    """What this release of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """(batch, length, vocabulary)."""
    return model(ids, **kwargs).logits


def exact_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The same model's in float64."""
    return logits(copy.deepcopy(model).double(), ids)


def greedy(model: nn.Module, ids: Tensor, tokens: int = 24, **kwargs: Any) -> Tensor:
    """Prompts with padding (id 0) at the left, continued greedily."""
    mask = (ids != 0).long()
    kwargs = {"disable_compile": True, **kwargs}
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **kwargs
    )


def padded_ids(batch: int, length: int = 11, seed: int = 0) -> Tensor:
    """Random prompts (batch, length) of different lengths, padded at the left."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    for row in range(1, batch):
        ids[row, : 2 * row] = 0
    return ids
