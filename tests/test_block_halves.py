"""Layers of which the attention half alone is a block: the rest is called as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_models import block_model, cache_name, greedy, logits, padded_ids
from tiny_models import token_ids
from torch import Tensor, nn
from transformers import AttentionInterface, StaticCache
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import flashnorm_triton as fn
from flashnorm_triton.models.block.layer import Runner


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each forward of which a layer has run the first half as a block."""
    lengths: list[int] = []
    half = Runner.first_half

    def counted(self: Runner, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        lengths.append(x.shape[1])
        return half(self, x, kwargs)

    monkeypatch.setattr(Runner, "first_half", counted)
    return lengths


def _first(layer: MixtralDecoderLayer, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return x + layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]


class OtherInput(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        x = _first(self, x, kwargs)
        return x + self.mlp(1.001 * self.post_attention_layernorm(x))


class OtherSum(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        first = _first(self, x, kwargs)
        return x + self.mlp(self.post_attention_layernorm(first))


class NormOfInput(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return _first(self, x, kwargs) + self.mlp(self.post_attention_layernorm(x))


class Twice(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        x = _first(self, x, kwargs)
        normed = self.post_attention_layernorm(x)
        return x + self.mlp(normed) + self.mlp(normed)


class UsesMore(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        x = _first(self, x, kwargs)
        made = self.mlp(self.post_attention_layernorm(x))
        return x + made[0] + made[1].mean()


class NormedAgain(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.post_attention_layernorm(super().forward(x, **kwargs))


class Ignored(MixtralDecoderLayer):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        _first(self, x, kwargs)
        return x + self.mlp(self.post_attention_layernorm(x))


FAULTS = {
    NormedAgain: "more than a block after",
    Ignored: "residual",
    OtherInput: "not one rest of what comes before",
    OtherSum: "residual is not its input",
    NormOfInput: "a norm of the sum before it|residual",
    Twice: "residual|more than a block",
    UsesMore: "residual|its code fails",
}


@pytest.fixture(scope="module")
def mixtral() -> nn.Module:
    return block_model("mixtral")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_another_second_half_is_none(fault: type[nn.Module], mixtral: nn.Module) -> None:
    layer = mixtral.model.layers[1]
    layer.__class__ = fault
    sound, faulty = fn.audit(mixtral).blocks
    layer.__class__ = MixtralDecoderLayer
    assert sound.level == "block", sound.reason
    assert faulty.level == "norm" and faulty.spec is None
    assert any(told in faulty.reason for told in FAULTS[fault].split("|")), faulty.reason


def test_what_is_called_is_called(runs: list[int]) -> None:
    """Hooks and exchanges inside the experts are obeyed, and the block runs on."""
    model, ids = block_model("mixtral"), token_ids()
    with torch.no_grad():
        wanted = model(ids, output_router_logits=True)
        fn.patch(model, level="block")
        layer = model.model.layers[0]
        seen: list[Any] = []
        layer.mlp.gate.register_forward_hook(lambda *call: seen.append(call[2]))
        layer.post_attention_layernorm.register_forward_hook(lambda m, x, y: 1.5 * y)
        layer.mlp.experts.act_fn = nn.ReLU()
        runs.clear()
        ours = logits(model, ids)
        assert runs == [11, 11] and len(seen) == 1
        stock = [type(m).__mro__[2] for m in model.model.layers]
        for module, kind in zip(model.model.layers, stock, strict=True):
            module.__class__ = kind
        torch.testing.assert_close(ours, logits(model, ids), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(ours, wanted.logits, rtol=1e-3)


def test_router_logits_are_the_stock_models() -> None:
    model, ids = block_model("qwen3_moe"), token_ids()
    with torch.no_grad():
        wanted = model(ids, output_router_logits=True)
        fn.patch(model, level="block")
        ours = model(ids, output_router_logits=True)
    assert len(ours.router_logits) == len(wanted.router_logits) == 2
    for mine, theirs in zip(ours.router_logits, wanted.router_logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_another_module_in_its_place_goes_through_the_layers_own_code(runs: list[int]) -> None:
    model, ids = block_model("mixtral"), token_ids()
    fn.patch(model, level="block")
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    runs.clear()
    logits(model, ids)
    assert runs == [11], "the other layer"


def test_parameters_that_the_attention_is_given(runs: list[int]) -> None:
    """They are looked up at every call: GPT-OSS's sinks."""

    def mine(module: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["s_aux"])
        return eager_attention_forward(module, *args, **kwargs)

    given: list[Any] = []
    AttentionInterface.register("mine with sinks", mine)
    model, ids = block_model("gpt_oss"), token_ids()
    model.set_attn_implementation("mine with sinks")
    fn.patch(model, level="block")
    runs.clear()
    for value in (None, nn.Parameter(torch.randn(4), requires_grad=False)):
        attentions = [layer.self_attn for layer in model.model.layers]
        if value is not None:
            attentions[1].sinks = value
        given.clear()
        logits(model, ids)
        assert [given[i] is attentions[i].sinks for i in range(2)] == [True, True]
    assert runs == [11] * 4


def test_foreign_linears_leave_the_attention_half(runs: list[int]) -> None:
    class Foreign(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model, prompts = block_model("llama"), padded_ids(2)
    for layer in model.model.layers:
        layer.mlp.gate_proj.__class__ = Foreign
    tokens = greedy(model, prompts, 5)
    handle = fn.patch(model, level="block")
    assert [type(block.spec.mlp).__name__ for block in handle.report.blocks] == ["RestSpec"] * 2
    runs.clear()
    assert torch.equal(greedy(model, prompts, 5), tokens) and len(runs) == 2 * 5


def test_a_half_that_computes_otherwise_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Runner.first_half
    monkeypatch.setattr(Runner, "first_half", lambda self, x, kwargs: 1.2 * half(self, x, kwargs))
    model, ids = block_model("mixtral"), token_ids()
    stock = logits(model, ids)
    handle = fn.patch(model)
    assert {block.level for block in handle.report.blocks} == {"norm"}
    assert all("tried on random rows" in block.reason for block in handle.report.blocks)
    torch.testing.assert_close(logits(model, ids), stock, rtol=1e-4, atol=1e-4)


def test_compiled_in_one_graph_with_experts() -> None:
    model, ids = block_model("mixtral"), padded_ids(1, 8)
    tokens = greedy(model, ids, 4)[:, 8:]
    fn.patch(model, level="block")
    model.set_experts_implementation("batched_mm")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=32)}
    with torch.no_grad():
        made = [model(ids, **cache).logits[:, -1:].argmax(-1)]
        for _ in range(3):
            made.append(compiled(made[-1], **cache).logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(made, 1), tokens)
