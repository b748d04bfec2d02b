"""The audit of real families: what is fused, what is kept and why, and that nothing is touched."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FUSED_FAMILIES, tiny_model
from torch import nn

from flashnorm_triton.models import AuditReport, SiteReport, audit
from flashnorm_triton.models.norms import NormReader
from flashnorm_triton.models.worth import nothing_gained

QKV = ("q_proj", "k_proj", "v_proj")
SITES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"input_layernorm": QKV, "post_attention_layernorm": ("gate_proj", "up_proj")},
    "phi3": {"input_layernorm": ("qkv_proj",), "post_attention_layernorm": ("gate_up_proj",)},
    "gemma2": {"input_layernorm": QKV, "pre_feedforward_layernorm": ("gate_proj", "up_proj")},
    "mixtral": {"input_layernorm": QKV, "post_attention_layernorm": ("gate", "experts")},
    "olmo2": {},
    "gpt2": {"ln_1": ("c_attn",), "ln_2": ("c_fc",)},
}
SITES["gemma3_text"] = SITES["gemma2"]
for _family in ("mistral", "qwen2", "qwen3", "gemma"):
    SITES[_family] = SITES["llama"]
KEPT: dict[str, dict[str, str]] = {
    "gemma2": {"post_attention_layernorm": "read by add in model.layers.0 (Gemma2DecoderLayer)"},
    "gemma3_text": {"post_feedforward_layernorm": "read by add", "self_attn.q_norm": "read by mul"},
    "olmo2": {"post_attention_layernorm": "read by add", "self_attn.q_norm": "last dimension"},
    "qwen3": {"self_attn.q_norm": "read by mul in model.layers.0.self_attn"},
}


def _by_norm(report: AuditReport) -> dict[str, Any]:
    return {site.norm: site for site in report.sites}


@pytest.mark.parametrize("family", SITES)
def test_sites_and_reasons(family: str) -> None:
    report = audit(tiny_model(family))
    sites = _by_norm(report)
    fused = {}
    for site in report.fused:
        prefix, _, norm = site.norm.rpartition(".")
        fused.setdefault(norm, set()).add(tuple(c.rpartition(".")[2] for c in site.consumers))
        assert all(consumer.startswith(prefix) for consumer in site.consumers)
    assert fused == {norm: {names} for norm, names in SITES[family].items()}
    assert len(report.fused) == 2 * len(SITES[family])
    for norm, reason in KEPT.get(family, {}).items():
        assert sites[f"model.layers.0.{norm}"].decision == "keep"
        assert reason in sites[f"model.layers.0.{norm}"].reason


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_final_norm_runs_alone_as_the_model_returns_it(family: str) -> None:
    final = _by_norm(audit(tiny_model(family)))["model.norm"]
    assert (final.decision, final.form) == ("norm_only", "")
    assert final.consumers == ("lm_head",) and final.launches_saved >= 5
    assert final.returned_as == ("last_hidden_state", "hidden_states")
    assert "returned as last_hidden_state by model" in final.reason
    assert "head=True" in final.reason


def test_conventions_and_eps_are_read_from_class_and_instance() -> None:
    model = tiny_model("gemma", rms_norm_eps=3e-5)
    model.model.layers[1].input_layernorm.eps = 7e-4
    sites = _by_norm(audit(model))
    assert sites["model.layers.0.input_layernorm"].convention == "1+w"
    assert sites["model.layers.0.input_layernorm"].eps == 3e-5
    assert sites["model.layers.1.input_layernorm"].eps == 7e-4
    llama = _by_norm(audit(tiny_model("llama", rms_norm_eps=2e-5)))
    assert llama["model.layers.0.input_layernorm"].convention == "w"
    assert llama["model.layers.0.input_layernorm"].eps == 2e-5


class _Shifted(nn.Module):
    """An RMS norm whose gain is 2 + w: none of the conventions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class _EpsOutside(_Shifted):
    """eps added to the root, not under it: another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


def test_only_exact_formulas_are_recognised() -> None:
    read = NormReader().read
    assert read(nn.RMSNorm(32, eps=1e-5)).kind == "rms"
    assert read(nn.RMSNorm(32, eps=1e-5, elementwise_affine=False)).convention == "none"
    assert read(nn.LayerNorm(32)).kind == "layer"
    for module in (_Shifted(), _EpsOutside(), nn.RMSNorm(32), nn.GroupNorm(4, 32)):
        assert read(module).kind == "other", type(module)


def test_values_of_the_gain_do_not_matter() -> None:
    one, zero = tiny_model("gemma"), tiny_model("llama")
    for model, value in ((one, 1.0), (zero, 0.0)):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.constant_(parameter, value)
    assert {site.convention for site in audit(one).sites} == {"1+w"}
    assert {site.convention for site in audit(zero).sites} == {"w"}


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    return {
        "values": {k: (id(v), v._version, v.clone()) for k, v in model.named_parameters()},
        "buffers": {k: (id(v), v._version) for k, v in model.named_buffers()},
        "modules": {k: (id(m), sorted(vars(m)), m.training) for k, m in model.named_modules()},
        "hooks": {k: len(m._forward_hooks) for k, m in model.named_modules()},
        "config": model.config.to_json_string(),
        "attention": model.config._attn_implementation,
        "grads": {k: v.grad for k, v in model.named_parameters()},
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(_equal, a, b))
    return a == b


@pytest.mark.parametrize("training", [False, True])
def test_audit_changes_nothing(training: bool) -> None:
    model = tiny_model("qwen2", attention_dropout=0.3).train(training)
    model.gradient_checkpointing_enable()
    before, random = _fingerprint(model), torch.random.get_rng_state()
    first = audit(model)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert _equal(_fingerprint(model), before)
    assert audit(model) == first and len(first.fused) == 4


def test_audit_under_modes() -> None:
    model = tiny_model("llama")
    expected = audit(model)
    with torch.inference_mode():
        assert audit(model) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert audit(model) == expected
    with torch.device("meta"):
        assert audit(model) == expected


def test_large_meta_model_in_seconds() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    start = time.process_time()
    report = audit(model)
    assert time.process_time() - start < 10
    assert len(report.fused) == 160 and not report.kept
    assert report.sites[-1].decision == "norm_only"
    assert all(parameter.is_meta for parameter in model.parameters())


def test_longrope_and_base_models_are_followed() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = tiny_model("phi3", rope_parameters={**scaling, "rope_theta": 1e4, "factor": 4.0})
    assert len(audit(model).fused) == 4
    assert len(audit(tiny_model("llama").model).fused) == 4


def test_json_summary_and_table() -> None:
    from rich.console import Console

    report = audit(tiny_model("llama"))
    data = json.loads(report.to_json())
    assert set(data["sites"][0]) == {
        "norm", "norm_class", "kind", "convention", "eps", "consumers", "decision", "reason",
    }  # fmt: skip
    assert data["sites"][0]["consumers"] == [f"model.layers.0.self_attn.{name}" for name in QKV]
    # float32: pow, mean, add, rsqrt, mul, mul are six kernels; then one launch for three or two.
    assert report.launches_saved == 2 * (6 + 3 - 1) + 2 * (6 + 2 - 1) + (6 - 1)
    assert "5 norms, 4 fused, 1 as one launch each, 0 kept; 35 kernel" in report.summary()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    text = console.export_text()
    assert "model.layers.*.input_layernorm (2)" in text and "q_proj, k_proj, v_proj" in text


def test_wrong_argument() -> None:
    with pytest.raises(TypeError, match="needs a torch.nn.Module, not dict"):
        audit({})


@pytest.mark.parametrize(
    "kind, form, consumers, changes, words",
    [
        ("rms", "packed", "ll", {}, None),
        ("layer", "experts", "r", {}, "one launch in torch already"),
        ("dyt", "experts", "r", {}, "a norm of kind 'dyt' before experts"),
        ("rms", "experts", "r", {}, None),
        ("dyt", "passthrough", "ll", {}, "each of its 2 linears would compute the tanh anew"),
        ("dyt", "passthrough", "l", {}, None),
        ("dyt", "passthrough", "l", {"foldable": False}, "without a fold its linear computes"),
        ("layer", "passthrough", "c", {}, None),
        ("layer", "passthrough", "c", {"foldable": False}, "a Conv1D's weight lies the wrong way"),
        ("rms", "passthrough", "c", {"convention": "none"}, "a Conv1D's weight lies the wrong way"),
        ("layer", "passthrough", "l", {"foldable": False}, None),
    ],
)
def test_where_nothing_is_gained(
    kind: str, form: str, consumers: str, changes: dict[str, Any], words: str | None
) -> None:
    kinds = {"l": "linear", "c": "conv1d", "r": "router"}
    site = SiteReport(
        "norm", "Norm", kind, "w", 1e-6, tuple(consumers), "fuse", "",
        consumer_kinds=tuple(kinds[letter] for letter in consumers), form=form,
    )  # fmt: skip
    told = nothing_gained(replace(site, **changes))
    assert told is None if words is None else told is not None and words in told
