"""The families that patch is tried on: tiny configurations and the sites they must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import VOCABULARY, randomise
from torch import Tensor, nn

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_DECODER = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_ENCODER = {k: v for k, v in _DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
_GPT = {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_BART = {
    **_COMMON,
    "d_model": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "max_position_embeddings": 128,
    "decoder_start_token_id": 1,
}
_T5 = {
    **_COMMON,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
_IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
# Every name that a family may use for the same thing; configurations keep what they do not know.
_MOE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}


@dataclass(frozen=True)
class Family:
    """One model type. ``packed``, ``experts``, ``alone``: how many sites of each kind it must have.

    ``task`` says which automatic class builds it; ``inputs`` are its inputs' shapes when they are
    not token ids. ``generates`` is False where the stock model cannot, at this size.
    """

    name: str
    packed: int
    settings: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    alone: int = 0
    task: str = "CausalLM"
    inputs: dict[str, tuple[int, ...]] | None = None
    generates: bool = True

    @property
    def causal(self) -> bool:
        """Whether it is a causal language model."""
        return self.task == "CausalLM"


def _decoders(
    packed: int, *names: str, experts: int = 0, alone: int = 1, **settings: Any
) -> list[Family]:
    """``alone``: RMS norms whose output is returned too (before the head), added or multiplied."""
    return [Family(name, packed, {**_DECODER, **settings}, experts, alone) for name in names]


def _images(*names: str, alone: int = 0) -> list[Family]:
    inputs = {"pixel_values": (2, 3, 16, 16)}
    return [Family(name, 4, _IMAGE, alone=alone, task="", inputs=inputs) for name in names]


FAMILIES: list[Family] = [
    *_decoders(4, "llama", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    *_decoders(4, "mistral", "ministral", "smollm3", "seed_oss", "helium", "qwen2", "qwen3"),
    *_decoders(4, "gemma", "gemma2", "gemma3_text", "vaultgemma", sliding_window=64),
    *_decoders(4, "gemma4_text", global_head_dim=32, **_GEMMA),
    *_decoders(4, "gemma3n_text", alone=3,
               **{**_GEMMA, "laurel_rank": 8, "intermediate_size": [112, 112],
                  "activation_sparsity_pattern": [0.0, 0.0]}),
    *_decoders(4, "glm", "glm4", "arcee", "apertus", "cwm", "ernie4_5", "hunyuan_v1_dense"),
    *_decoders(4, "diffllama", "doge"),
    *_decoders(4, "nanochat"),  # its last norm is its first one too
    *_decoders(4, "granite", attention_multiplier=0.3, residual_multiplier=0.7,
               embedding_multiplier=2.0),
    *_decoders(4, "phi3", original_max_position_embeddings=128),
    *_decoders(2, "phi", "cohere", "cohere2", alone=0),
    *_decoders(8, "bitnet"),
    *_decoders(4, "lfm2", layer_types=["conv", "full_attention"]),
    *_decoders(4, "qwen3_5_text", **_DELTA),
    *_decoders(2, "qwen3_next", "qwen3_5_moe_text", experts=2, **{**_MOE, **_DELTA}),
    *_decoders(4, "olmo", "starcoder2", "stablelm", "nemotron", "persimmon", "gpt_neox", "jais2",
               alone=0),
    *_decoders(4, "opt", alone=0, ffn_dim=64, word_embed_proj_dim=64),
    *_decoders(4, "biogpt", alone=0),
    *_decoders(6, "minicpm3", "youtu", **_MLA),
    *_decoders(4, "falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16),
    *_decoders(4, "bamba", attn_layer_indices=[1], **_MAMBA),
    *_decoders(4, "zamba2", layers_block_type=["hybrid", "mamba"], num_mem_blocks=1,
               n_mamba_heads=8, mamba_headdim=16, mamba_d_state=16, adapter_rank=8),
    *_decoders(2, "nemotron_h", layers_block_type=["mamba", "attention"], mamba_num_heads=8,
               mamba_head_dim=16, ssm_state_size=16, n_groups=2),
    *_decoders(2, "mamba", "falcon_mamba", state_size=8),
    *_decoders(2, "mamba2", num_heads=8, head_dim=16, state_size=16, n_groups=2),
    *_decoders(2, "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "qwen2_moe", experts=2, **_MOE),
    *_decoders(2, "phimoe", alone=0, **_MOE),
    *_decoders(2, "llama4_text", alone=3, intermediate_size_mlp=96, **_MOE),
    *_decoders(0, "olmo2", "olmo3", "exaone4", "flex_olmo", **_MOE),
    *_decoders(2, "granitemoe", "granitemoeshared", experts=2, shared_intermediate_size=48, **_MOE),
    *_decoders(0, "jetmoe", experts=4, kv_channels=16, **_MOE),
    *_decoders(3, "glm4_moe", "dots1", experts=1, **_MOE),
    *_decoders(3, "ernie4_5_moe", experts=1, moe_layer_start_index=1, **_MOE),
    *_decoders(5, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", experts=1, **{**_MOE, **_MLA}),
    Family("mistral4", 5, {**_DECODER, **_MOE, **_MLA}, experts=1, task=""),
    *_decoders(3, "lfm2_moe", experts=1, **{**_MOE, "num_dense_layers": 1,
                                            "layer_types": ["conv", "full_attention"]}),
    *_decoders(3, "jamba", experts=1, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
               expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, **_MOE),
    Family("gpt2", 4, _GPT),
    Family("gpt_bigcode", 4, _GPT),
    Family("gptj", 2, {**_GPT, "rotary_dim": 8}),
    Family("codegen", 2, {**_GPT, "rotary_dim": 8}),
    Family("gpt_neo", 4, {**_COMMON, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
                          "attention_types": [[["global", "local"], 1]]}),
    Family("bloom", 4, {**_COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    Family("mpt", 4, {**_COMMON, "d_model": 64, "n_heads": 4, "n_layers": 2}),
    Family("falcon", 2, {**_COMMON, "hidden_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4}),
    *[Family(name, 10, _T5, alone=2, task="Seq2SeqLM") for name in ("t5", "mt5", "umt5")],
    Family("t5gemma", 10, {**_COMMON, "encoder": _DECODER, "decoder": _DECODER}, alone=2,
           task="Seq2SeqLM"),
    *[Family(name, 10, _BART, task="Seq2SeqLM")
      for name in ("pegasus", "mbart", "m2m_100", "blenderbot")],
    Family("whisper", 10, {**_BART, "num_mel_bins": 8, "max_source_positions": 16,
                           "max_target_positions": 64}, task="",
           inputs={"input_features": (2, 8, 32), "decoder_input_ids": (2, 5)}),
    Family("qwen2_audio_encoder", 4, {**_BART, "num_mel_bins": 8, "max_source_positions": 16},
           task="", inputs={"input_features": (2, 8, 32)}),
    *[Family(name, 4, _ENCODER, task="") for name in
      ("eurobert", "esm", "roberta-prelayernorm", "megatron-bert")],
    Family("clip_text_model", 4, {**_ENCODER, "eos_token_id": 2}, task=""),
    Family("modernbert", 3, {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2}, task=""),
    *_images("vit", "deit", "dinov2", "beit", "clip_vision_model", "ijepa"),
    *_images("aimv2_vision_model", alone=1),
    Family("siglip_vision_model", 5, _IMAGE, task="", inputs={"pixel_values": (2, 3, 16, 16)}),
]  # fmt: skip

# Families in which no norm is followed by a linear alone: post-norms, and norms of whole q and k.
WITHOUT_SITES: list[Family] = [
    *[
        Family(name, 0, {**_DECODER, **_MOE}, task="")
        for name in ("olmo2", "olmo3", "exaone4", "flex_olmo")
    ],
    Family("bert", 0, _ENCODER, task=""),
    Family("bart", 0, _BART, task="Seq2SeqLM"),
]


def build(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A random model of the family in evaluation mode; gains and biases are random too.

    Experts run in plain torch operations, which know float64 as well.

    Raises LookupError where this release of transformers does not know the family.
    """
    import transformers

    try:
        config = transformers.AutoConfig.for_model(family.name, **family.settings)
    except ValueError as error:
        if "Unrecognized model" in str(error):
            raise LookupError(family.name) from error
        raise
    kind = getattr(transformers, f"AutoModelFor{family.task}" if family.task else "AutoModel")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32)
    randomise(model)
    torch.random.set_rng_state(state)
    if family.experts or "num_experts" in family.settings:
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def inputs_of(family: Family, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of the family, float32 where they are not token ids."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=draw)

    if family.inputs is not None:
        return {
            name: tokens(*shape) if name.endswith("ids") else torch.randn(shape, generator=draw)
            for name, shape in family.inputs.items()
        }
    inputs = {"input_ids": tokens(2, 13)}
    if family.task == "Seq2SeqLM":
        inputs["decoder_input_ids"] = tokens(2, 6)
    return inputs
