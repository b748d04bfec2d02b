"""Tiny configurations of the families that a fold is tested on, and what it has to find in each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny_models import VOCABULARY, randomise
from torch import nn

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_LATENT,
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1},
}


class Family(NamedTuple):
    """``folds`` norms fold into ``weights`` stored tensors; ``bias``: what becomes of the norms'
    biases, in the order of the folds; ``bare``: the config takes none of the common sizes."""

    extra: dict[str, Any]
    folds: int
    weights: int
    bias: str = ""
    bare: bool = False


FAMILIES: dict[str, Family] = {
    # RMS norms, plain and packed; a head that is not tied takes the final norm
    "llama": Family({"attention_bias": True, "mlp_bias": True}, 5, 11),
    "qwen3": Family({}, 5, 11),
    "phi3": Family({"original_max_position_embeddings": 256}, 5, 5),
    "glm": Family({}, 5, 9),
    "glm4": Family({}, 5, 9),
    "helium": Family({}, 5, 11),
    "granite": Family({}, 5, 11),
    "seed_oss": Family({}, 5, 11),
    "smollm3": Family({}, 4, 10),
    "arcee": Family({}, 5, 9),
    "apertus": Family({}, 5, 9),
    "bitnet": Family({}, 9, 15),
    "olmo2": Family({}, 1, 1),
    "exaone4": Family({}, 1, 1),
    # 1 + w (Gemma 1 to 3), w (3n, 4), post-norms that feed an add
    "gemma": Family({}, 4, 10),
    "gemma2": Family({"sliding_window": 64}, 4, 10),
    "gemma3_text": Family({"sliding_window": 64}, 4, 10),
    "gemma3n_text": Family(
        {
            **{"sliding_window": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
            **{"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
            "altup_num_inputs": 2,
        },
        4,
        6,
    ),
    "gemma4_text": Family(
        {
            **{"sliding_window": 64, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
            **{"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
        },
        4,
        10,
    ),
    # LayerNorm: Conv1D, parallel blocks, biases that move or are divided by the gain
    "gpt2": Family(
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}, 4, 4, "moved " * 4, bare=True
    ),
    "gpt_neox": Family({}, 5, 5, "moved " * 4 + "divided"),
    "opt": Family({"word_embed_proj_dim": 64, "ffn_dim": 112}, 4, 8, "moved " * 4),
    "starcoder2": Family({}, 4, 8, "moved " * 4),
    "phi": Family({}, 3, 9, "moved moved divided"),
    "stablelm": Family({}, 5, 11, "divided " * 5),
    "nemotron": Family({}, 5, 9, "divided " * 5),
    "cohere": Family({}, 2, 10),
    # experts, stored one by one or merged, with routers and shared experts
    "mixtral": Family(_LOCAL_MOE, 5, 25),
    "phimoe": Family(_LOCAL_MOE, 5, 25, "divided " * 5),
    "qwen2_moe": Family({**_MOE, "shared_expert_intermediate_size": 40}, 5, 31),
    "qwen3_moe": Family(_MOE, 5, 25),
    "olmoe": Family({"num_experts": 4, "num_experts_per_tok": 2}, 5, 25),
    "gpt_oss": Family({**_LOCAL_MOE, "sliding_window": 64}, 5, 11),
    # latent attention
    "deepseek_v2": Family(_DEEPSEEK, 7, 20),
    "deepseek_v3": Family(_DEEPSEEK, 7, 20),
    "minicpm3": Family(_LATENT, 6, 10),
    # hybrids
    "lfm2": Family({}, 4, 10),
    "falcon_h1": Family(
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}, 5, 13
    ),
    "qwen3_next": Family(
        {
            **_MOE,
            **{"shared_expert_intermediate_size": 40, "linear_num_value_heads": 4},
            **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
            "layer_types": ["linear_attention", "full_attention"],
        },
        5,
        30,
    ),
    # encoder and decoder (dropout keeps the final norms)
    "t5": Family(
        {
            **{"d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4},
            "decoder_start_token_id": 0,
        },
        10,
        18,
        bare=True,
    ),
}


def build(name: str) -> nn.Module:
    """The family's model with random weights, float32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = FAMILIES[name]
    sizes = {} if family.bare else _SIZES
    config = AutoConfig.for_model(name, **{**_TOKENS, **sizes, **family.extra})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    randomise(model)
    return model.eval()


@torch.no_grad()
def logits64(folder: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of what stock transformers loads from a folder, computed in float64."""
    import json

    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    model.config._experts_implementation = "eager"  # the grouped matmul has no float64
    extra = {"decoder_input_ids": ids.flip(-1)} if model.config.is_encoder_decoder else {}
    return model.eval()(input_ids=ids, use_cache=False, **extra).logits
