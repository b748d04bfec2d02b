"""A layer that does anything else than a block is not taken for one; the report says why."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from block_models import FAMILIES, block_model, cache_name, logits
from tiny_models import tiny_model, token_ids
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

import flashnorm_triton as fn
from flashnorm_triton.models.block import proof, site
from flashnorm_triton.models.block.layer import Runner


class ScaledOutput(LlamaDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return super().forward(x, **kwargs) * 1.001


class InPlace(LlamaDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return super().forward(x.mul_(1.25), **kwargs)


class Longer(LlamaDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        y = super().forward(x, **kwargs)
        return y if x.shape[1] == 1 else 1.5 * y


class OtherMask(LlamaDecoderLayer):
    def forward(self, x: Any, *, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = None if attention_mask is None else attention_mask * 2
        return super().forward(x, attention_mask=mask, **kwargs)


class OtherPositions(LlamaDecoderLayer):
    def forward(self, x: Any, *, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(x, position_ids=position_ids + 1, **kwargs)


class FarPositions(LlamaDecoderLayer):
    def forward(self, x: Any, *, position_ids: Any = None, **kwargs: Any) -> Any:
        far = 1 + (position_ids.max() > 1000).to(x)
        return super().forward(x * far, position_ids=position_ids, **kwargs)


class TurnedBack(LlamaDecoderLayer):
    def forward(self, x: Any, *, position_embeddings: Any = None, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return super().forward(x, position_embeddings=(cos, -sin), **kwargs)


class AsksItsCache(LlamaDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length() > 10**6:
            x = x * 2
        return super().forward(x, **kwargs)


class AsksTheImplementation(LlamaDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        if self.self_attn.config._attn_implementation == "flash_attention_2":
            x = x * 2
        return super().forward(x, **kwargs)


class TwoResiduals(LlamaAttention):
    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(hidden_states, **kwargs)
        return output + 1e-3 * output.flip(-1), weights


class Twice(LlamaAttention):
    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        super().forward(hidden_states, **kwargs)
        return super().forward(hidden_states, **kwargs)


class Clamped(LlamaMLP):
    def forward(self, x: Any) -> Any:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner.clamp(-5000, 5000))


class UngatedPart(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (1 + self.up_proj(x)))


class GateSecond(LlamaMLP):
    def forward(self, x: Any) -> Any:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


FAULTS = {
    ScaledOutput: "after its last linear|residual",
    InPlace: "reads? the sum|in place",
    Longer: "another length|after its last linear|residual",
    OtherMask: "mask",
    OtherPositions: "position_ids, a Tensor",
    FarPositions: "read the sum|residual",
    TurnedBack: "turned in a way of its own",
    AsksItsCache: "asks the cache for get_seq_length",
    AsksTheImplementation: "asks for the attention implementation",
    TwoResiduals: "residual is not its input",
    Twice: "in their order|attention interface once",
    Clamped: "activation",
    UngatedPart: "activation",
    GateSecond: "gate comes second",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_another_layer_is_no_block(fault: type[nn.Module]) -> None:
    """The second layer is the faulty one: that the first is a block must not speak for it."""
    model = block_model("llama")
    layer = model.model.layers[1]
    for part in (layer, layer.self_attn, layer.mlp):
        if issubclass(fault, type(part)):
            part.__class__ = fault
    sound, faulty = fn.audit(model).blocks
    assert sound.level == "block", sound.reason
    assert faulty.level == "norm" and faulty.launches_saved == 0 and faulty.spec is None
    assert any(told in faulty.reason for told in _fragments(fault)), faulty.reason


def _fragments(fault: type[nn.Module]) -> list[str]:
    return FAULTS[fault].replace("reads?", "read").split("|")


def test_weights_and_hooks_that_a_block_would_pass_by() -> None:
    def reason(change: Any) -> str:
        model = block_model("llama")
        change(model.model.layers[1])
        return fn.audit(model).blocks[1].reason

    def parameter(layer: nn.Module) -> None:
        layer.extra = nn.Parameter(torch.ones(1))

    def buffer(layer: nn.Module) -> None:
        layer.mlp.register_buffer("scale", torch.ones(1))

    def hook(layer: nn.Module) -> None:
        layer.self_attn.o_proj.register_forward_hook(lambda *args: None)

    def forward(layer: nn.Module) -> None:
        layer.mlp.act_fn.forward = layer.mlp.act_fn.forward

    assert "weights or buffers of its own" in reason(parameter)
    assert "mlp (LlamaMLP) has weights or buffers" in reason(buffer)
    assert "o_proj has a hook" in reason(hook)
    assert "act_fn was replaced on the instance" in reason(forward)


def test_without_a_cache_it_must_do_the_same() -> None:
    class Uncached(LlamaDecoderLayer):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            cached = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
            return super().forward(x if cached else 3 * x, **kwargs)

    model = block_model("llama")
    model.model.layers[1].__class__ = Uncached
    assert fn.audit(model).blocks[1].level == "norm"


def test_a_block_that_computes_otherwise_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is of formulas: whatever runs them is tried on each kind of layer."""
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, x, kwargs: run(self, x, kwargs) * 1.002)
    model = block_model("gemma2")
    stock = logits(model, token_ids())
    handle = fn.patch(model)
    assert all("off by" in block.reason for block in handle.report.blocks)
    assert all(block.level == "norm" for block in handle.report.blocks)
    torch.testing.assert_close(logits(model, token_ids()), stock, rtol=1e-4, atol=1e-4)
    assert not hasattr(model.model.layers[0], "runner")


def test_a_layer_that_adds_little_to_its_input_is_tried_fairly() -> None:
    """In bfloat16 the sum is rounded more coarsely than what is added."""
    model = block_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(0.001)
                linear.bias.mul_(0.001)
    fn.patch(model.bfloat16(), level="block")
    assert all(hasattr(layer, "runner") for layer in model.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_from_its_config_alone(family: str) -> None:
    from flashnorm_triton.models.skeleton import from_type

    report = fn.audit(from_type(family, 2))
    assert report.blocks and all(block.level == "block" for block in report.blocks)
    assert "layers run as whole blocks" in report.summary()


def test_what_a_report_says() -> None:
    model = tiny_model("llama")
    report = fn.audit(model)
    assert [b.layer for b in report.blocks] == ["model.layers.0", "model.layers.1"]
    told = json.loads(report.to_json())
    assert told["layers"][0]["level"] == "block" and told["layers"][0]["launches_saved"] == 13
    assert told["launches_saved_by_blocks"] == 26
    assert "2 of 2 layers run as whole blocks, 26 launches fewer again" in report.summary()
    from rich.console import Console

    console = Console(width=220)
    with console.capture() as capture:
        console.print(report.table())
    assert "model.layers.*: the whole layer (2)" in capture.get()
    assert fn.patch(model, level="norm").report.blocks[0].reason == "patched with level='norm'"


def test_levels() -> None:
    model = block_model("llama")
    with pytest.raises(ValueError, match="level is 'layer'; it must be one of auto, norm, block"):
        fn.patch(model, level="layer")
    other = tiny_model("gpt2")
    with pytest.raises(ValueError, match="level='block' asks for whole layers"):
        fn.patch(other, level="block")
    assert fn.patch(other).changed
    handle = fn.patch(block_model("qwen3"), cancel="exact")
    assert all("is not fused with its linears (partial)" in b.reason for b in handle.report.blocks)


def test_nothing_of_the_model_is_touched_by_the_proof() -> None:
    model = block_model("gemma3_text")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config, state = model.config.to_dict(), torch.random.get_rng_state()
    fn.audit(model)
    assert model.config.to_dict() == config and cache_name(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, module in model.named_modules():
        assert vars(module) == before[name]
    assert site._TOLERANCES[torch.float32] < 2e-3 < proof._RUNS[2][3]
