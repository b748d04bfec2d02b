"""What the audit finds in each family: which norm is read by what, and how it is fused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from flashnorm_triton.models import SiteReport, audit
from flashnorm_triton.models.skeleton import build, default_config

_QKV = "packed q_proj k_proj v_proj"
_GATE_UP = "packed gate_proj up_proj"
_PRE = "input_layernorm"
_POST = "post_attention_layernorm"
_LLAMA = {_PRE: {_QKV}, _POST: {_GATE_UP}}
_GEMMA2 = {_PRE: {_QKV}, "pre_feedforward_layernorm": {_GATE_UP}}
_PACKED_MLP = {_PRE: {_QKV}, _POST: {"packed gate_up_proj"}}
_MOE = {_PRE: {_QKV}, _POST: {"experts gate experts"}}
_ROUTED = {_PRE: {_QKV}, _POST: {"experts router experts"}}
_PARALLEL = {_PRE: {"packed q_proj k_proj v_proj gate_proj up_proj"}}
_SHARED = "experts gate_proj up_proj gate experts shared_expert_gate"
_AND_SHARED = "experts gate experts gate_proj up_proj"
_MLA = {"q_a_layernorm": {"packed q_b_proj"}, _PRE: {"packed q_a_proj kv_a_proj_with_mqa"}}
_UP = {_PRE: {_QKV}, _POST: {"packed up_proj"}}

# Model type -> name of the norm (digits starred) -> the ways in which its sites are fused. Norms
# that are not named are not fused: the final norm, norms that feed an addition, norms of heads.
FAMILIES: dict[str, dict[str, set[str]]] = {
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gemma4_text": _GEMMA2,
    # The first norm's output is also added in laurel: it stays.
    "gemma3n_text": {
        "pre_feedforward_layernorm": {_GATE_UP},
        "router_norm": {"packed modality_router"},
    },
    "phi3": {_PRE: {"packed qkv_proj"}, _POST: {"packed gate_up_proj"}},
    "arcee": _UP,
    "apertus": {"attention_layernorm": {_QKV}, "feedforward_layernorm": {"packed up_proj"}},
    "bitnet": {
        **_LLAMA,
        "attn_sub_norm": {"packed o_proj"},
        "ffn_sub_norm": {"packed down_proj"},
    },
    "qwen3_next": {_PRE: {"packed in_proj_qkvz in_proj_ba", _QKV}, _POST: {_SHARED}},
    "qwen3_5_moe_text": {
        _PRE: {"packed in_proj_qkv in_proj_z in_proj_b in_proj_a", _QKV},
        _POST: {_SHARED},
    },
    "qwen2_moe": {_PRE: {_QKV}, _POST: {_SHARED}},
    "deepseek_v2": {**_MLA, _POST: {_AND_SHARED}},
    "mistral4": {**_MLA, _POST: {_AND_SHARED}},
    "glm4_moe_lite": {**_MLA, _POST: {_AND_SHARED, _GATE_UP}},
    "falcon_h1": {
        _PRE: {"packed in_proj q_proj k_proj v_proj"},
        "pre_ff_layernorm": {"packed up_proj gate_proj"},
    },
    "lfm2": {"operator_norm": {_QKV}, "ffn_norm": {"packed w1 w3"}},
    "bamba": {_PRE: {"packed in_proj"}, "pre_ff_layernorm": {_GATE_UP}},
    "jamba": {
        _PRE: {"packed in_proj", _QKV},
        "pre_ff_layernorm": {"experts router experts", _GATE_UP},
    },
    "t5": {"layer_norm": {"packed q k v", "packed q", "packed wi"}},
    "gpt2": {"ln_*": {"packed c_attn", "packed c_fc"}},
    "gpt_neox": {_PRE: {"packed query_key_value"}, _POST: {"packed dense_h_to_4h"}},
    "opt": {"self_attn_layer_norm": {_QKV}, "final_layer_norm": {"packed fc1"}},
    "starcoder2": {_PRE: {_QKV}, _POST: {"packed c_fc"}},
    "siglip": {"layer_norm*": {_QKV, "packed fc1"}, "layernorm": {"packed fc1"}},
    "modernbert": {"mlp_norm": {"packed Wi"}, "attn_norm": {"packed Wqkv"}},
    "nanochat": {_PRE: {_QKV}, _POST: {"packed fc1"}},
    "falcon": {_PRE: {"packed query_key_value dense_h_to_4h"}},
    "phi": {_PRE: {"packed q_proj k_proj v_proj fc1"}},
    # The code of its experts depends on data: a declarative row speaks for it.
    "jetmoe": {
        _PRE: {"experts layer input_linear kv_proj"},
        _POST: {"experts layer input_linear"},
    },
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "minimax", "bert"), {}),
    **dict.fromkeys(("glm", "glm4"), _PACKED_MLP),
    **dict.fromkeys(("cohere", "cohere2"), _PARALLEL),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), _MOE),
    "phimoe": {_PRE: {_QKV}},  # LayerNorms: before experts they stay
    **dict.fromkeys(("gpt_oss", "granitemoe"), _ROUTED),
    **dict.fromkeys(("deepseek_v3", "minicpm3"), {**_MLA, _POST: {_GATE_UP}}),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "stablelm", "olmo"), _LLAMA),
    "nemotron": _UP,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    # Defaults that transformers itself cannot run, or that hold no cache-sharing layer.
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "nemotron": {"num_key_value_heads": 8},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 1},
}
TRAITS = {
    "llama": ("rms", "w", 1e-6),
    "gemma": ("rms", "1+w", 1e-6),
    "nanochat": ("rms", "none", 1e-6),
    "nemotron": ("layer", "1+w", 1e-5),
    "olmo": ("layer", "none", 1e-5),
    "gpt2": ("layer", "w", 1e-5),
    "cohere": ("layer", "w", 1e-5),
    "phimoe": ("layer", "w", 1e-5),
}


def _model(family: str) -> nn.Module:
    from transformers import CONFIG_MAPPING

    if family not in _SETTINGS:
        return build(default_config(family, 2))
    return build(CONFIG_MAPPING[family](**{"num_hidden_layers": 2, **_SETTINGS[family]}))


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_of_a_family(family: str) -> None:
    report = audit(_model(family))
    found: dict[str, set[str]] = {}
    for site in report.sites:
        assert site.reason and len(site.consumers) == len(site.consumer_kinds)
        assert bool(site.form) == (site.decision == "fuse" or "one launch in torch" in site.reason)
        if site.decision == "fuse":
            name = re.sub(r"\d+", "*", site.norm).rpartition(".")[2]
            readers = " ".join(consumer.rpartition(".")[2] for consumer in site.consumers)
            found.setdefault(name, set()).add(f"{site.form} {readers}")
            assert site.launches_saved >= 1 or site.kind == "layer"
    assert found == FAMILIES[family]
    if family in TRAITS:
        kind, convention, eps = TRAITS[family]
        for site in report.fused:
            assert (site.kind, site.convention) == (kind, convention)
            assert site.eps == pytest.approx(eps)


@pytest.mark.parametrize(
    "family, kinds",
    {
        "gpt2": {"conv1d"},
        "qwen2_moe": {"linear", "router", "experts"},
        "gpt_oss": {"linear", "router", "experts"},
        "falcon": {"linear"},
    }.items(),
)
def test_kinds_of_readers(family: str, kinds: set[str]) -> None:
    report = audit(_model(family))
    assert {kind for site in report.fused for kind in site.consumer_kinds} == kinds


def test_normed_latent_of_mla_is_never_fused() -> None:
    sites = audit(_model("deepseek_v3")).sites
    latents = [site for site in sites if site.norm.endswith("kv_a_layernorm")]
    assert latents and all(site.decision != "fuse" for site in latents)

    class Latent(nn.Module):
        """MLA whose expanded keys are cached, as older releases have it."""

        def __init__(self) -> None:
            super().__init__()
            self.kv_a_layernorm = nn.RMSNorm(24, eps=1e-5)
            self.kv_b_proj = nn.Linear(24, 40, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kv_b_proj(self.kv_a_layernorm(x))

    (site,) = audit(Latent(), example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.decision == "norm_only" and "compressed cache" in site.reason


@pytest.mark.parametrize("family, tied", [("llama", False), ("gemma", True), ("gpt2", True)])
def test_head_as_a_site(family: str, tied: bool) -> None:
    final = audit(_model(family), head=True).sites[-1]
    assert final.consumers == ("lm_head",)
    assert (final.decision, final.form, final.foldable) == ("fuse", "passthrough", not tied)
    assert ("gain is applied in the kernel" in final.reason) == tied
    final = audit(_model(family)).sites[-1]
    assert final.decision == ("keep" if final.kind == "layer" else "norm_only")
    assert "head=True" in final.reason and final.form == ""


@pytest.mark.parametrize("family, norm", [("t5", "encoder.final_layer_norm"), ("pegasus", "")])
def test_cross_attention_reads_the_encoders_final_norm(family: str, norm: str) -> None:
    from transformers import CONFIG_MAPPING

    norm = norm or "model.encoder.layer_norm"
    configs = [default_config(family, 2)]
    if family == "t5":  # with dropout between the norm and its readers in training, and without
        configs.append(CONFIG_MAPPING["t5"](num_layers=2, dropout_rate=0.0))
    for config in configs:
        model = build(config)
        for head in (False, True):
            site = next(s for s in audit(model, head=head).sites if s.norm == norm)
            assert site.decision == ("norm_only" if site.kind == "rms" else "keep")
            assert len(site.consumers) == 4 and all("decoder" in name for name in site.consumers)
    assert "handed to the decoder as encoder_outputs" in site.reason


def test_final_norm_of_a_model_with_dropout_before_its_head() -> None:
    from transformers import CONFIG_MAPPING

    def final(**settings: Any) -> SiteReport:
        config = CONFIG_MAPPING["t5"](num_layers=2, **settings)
        return audit(build(config), head=True).sites[-1]

    assert final().decision == "norm_only" and "read by dropout" in final().reason
    assert final(dropout_rate=0.0).decision == "norm_only"  # a scalar before the tied head
    free = final(dropout_rate=0.0, tie_word_embeddings=False, scale_decoder_outputs=False)
    assert (free.decision, free.outputs) == ("fuse", ("decoder_hidden_states",)), free.reason


def test_tied_head_that_returns_nothing_else() -> None:
    site = next(s for s in audit(_model("modernbert"), head=True).sites if s.norm == "head.norm")
    assert (site.form, site.foldable, site.consumers) == ("passthrough", False, ("decoder",))
    assert audit(_model("modernbert")).sites[-1].decision == "keep"


def test_head_is_no_site_where_more_than_hidden_states_is_returned() -> None:
    model = _model("siglip")
    final = next(
        s for s in audit(model, head=True).sites if s.norm == "text_model.final_layer_norm"
    )
    assert final.decision == "keep" and "head=True" not in final.reason


class DyT(nn.Module):
    """tanh(alpha * x) * w + b, in a norm's place."""

    def __init__(self, size: int, skew: float = 0.0) -> None:
        super().__init__()
        self.alpha, self.skew = nn.Parameter(torch.tensor([0.7])), skew
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.alpha * x + self.skew) * self.weight + self.bias


@pytest.mark.parametrize("skew, kind", [(0.0, "dyt"), (0.1, "other")])
def test_dyt_is_recognised_by_what_it_computes(skew: float, kind: str) -> None:
    model = nn.Sequential(DyT(24, skew), nn.Linear(24, 40))
    (site,) = audit(model, example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.kind == kind and site.eps is None
    assert site.decision == ("fuse" if kind == "dyt" else "keep")
    # alpha * x and tanh stay; the skew's sum, the gain's product and the bias's sum go.
    assert site.launches_saved == (3 if kind == "dyt" else 0)


class ScaledLinear(nn.Linear):
    """A linear whose forward does more than a linear's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input @ self.weight.T) * 1.5


def test_linear_that_computes_something_else_is_no_plain_linear() -> None:
    model = nn.Sequential(nn.RMSNorm(24, eps=1e-5), ScaledLinear(24, 40, bias=False))
    (site,) = audit(model, example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.consumer_kinds == ("router",) and site.form == "experts"


def test_config_that_takes_no_attention_but_its_own() -> None:
    """Whether its layers are blocks cannot be found out then; its norms are audited anyway."""
    try:
        model = build(default_config("hrm_text", 1))
    except ValueError:
        pytest.skip("this release of transformers has no hrm_text")
    report = audit(model)
    assert all(block.level == "norm" for block in report.blocks) and report.blocks
    assert "takes no other attention" in report.blocks[0].reason
