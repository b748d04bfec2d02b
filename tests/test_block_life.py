"""A block in the life of a model: what it gives way to, what it goes along with, what undoes it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_models import block_model, cache_name, greedy, logits, padded_ids
from tiny_models import token_ids
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

import flashnorm_triton as fn
from flashnorm_triton.models.block import caches
from flashnorm_triton.models.block.layer import Block, Runner


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    run = Runner.run

    def counted(self: Runner, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        lengths.append(x.shape[1])
        return run(self, x, kwargs)

    monkeypatch.setattr(Runner, "run", counted)
    return lengths


def _close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _wrap(module: nn.Module) -> nn.Module:
    return nn.Sequential(module)


def _exchange(layer: nn.Module) -> None:
    layer.self_attn.o_proj = _wrap(layer.self_attn.o_proj)


def _hook(layer: nn.Module) -> None:
    layer.mlp.act_fn.register_forward_hook(lambda module, args, output: output * 1.5)


def _pre_hook(layer: nn.Module) -> None:
    layer.self_attn.register_forward_pre_hook(lambda module, args: None)


def _forward(layer: nn.Module) -> None:
    layer.self_attn.o_proj.forward = layer.self_attn.o_proj.forward


def _activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = nn.Tanh()


CHANGES = (_exchange, _hook, _pre_hook, _forward, _activation)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_inside_is_obeyed(change: Callable[[nn.Module], None], runs: list[int]) -> None:
    """Whatever is put inside a patched layer is run, by the layer's own code."""
    model, ids = block_model("llama"), token_ids()
    stock = copy.deepcopy(model)
    change(stock.model.layers[1])
    expected = logits(stock, ids)
    fn.patch(model, level="block")
    change(model.model.layers[1])
    runs.clear()
    _close(logits(model, ids), expected)
    assert len(runs) == 1, "the other layer is a block still"


def test_training_gradients_and_autocast_go_through_the_layers_own_code(runs: list[int]) -> None:
    model, ids = block_model("qwen3"), token_ids()
    stock = copy.deepcopy(model)
    fn.patch(model, fold=False, level="block")
    runs.clear()
    for mode in (False, True):
        for each in (stock, model):
            each.train(mode).zero_grad()
            each(ids, labels=ids).loss.backward()
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            _close(one.grad, other.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits(model.eval(), ids)
    assert not runs
    model.requires_grad_(False)
    _close(model(ids).logits, logits(stock.eval(), ids))
    assert len(runs) == 2, "without anything that learns, no_grad makes no difference"
    model.requires_grad_(True)
    model.gradient_checkpointing_enable()
    for mode in (True, False):
        model.train(mode)(ids, labels=ids).loss.backward()
    assert len(runs) == 2


def test_recorded_outputs(runs: list[int]) -> None:
    model, ids = block_model("gemma3_text"), token_ids()
    model.set_attn_implementation("eager")
    asked = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        stock = model(ids, **asked)
        fn.patch(model, level="block")
        runs.clear()
        ours = model(ids, **asked)
        assert not runs and len(ours.attentions) == 2
        for one, other in zip(ours.attentions, stock.attentions, strict=True):
            _close(one, other)
        model.config.output_attentions = True  # not an argument: known by who records
        assert len(model(ids).attentions) == 2 and not runs
        model.config.output_attentions = False
        states = model(ids, output_hidden_states=True).hidden_states
    assert len(runs) == 2, "transformers' own hooks, once there, only see what is asked for"
    for one, other in zip(states, stock.hidden_states, strict=True):
        _close(one, other)


def test_copies_and_files(runs: list[int]) -> None:
    model, ids = block_model("gemma2"), token_ids()
    stock, kind = logits(model, ids), type(model.model.layers[0])
    fn.patch(model, level="block")
    ours = logits(model, ids)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        layer = other.model.layers[0]
        assert isinstance(layer, Block) and isinstance(layer, kind)
        assert type(layer).__name__ == kind.__name__
        runs.clear()
        assert torch.equal(logits(other, ids), ours)
        assert len(runs) == 2
        layer.mlp.act_fn.register_forward_hook(lambda *args: None)
        logits(other, ids)
        assert len(runs) == 3, "a copy looks at its own modules"
        fn.models.PatchHandle(other, fn.audit(other), True).revert()
        assert type(layer) is kind and torch.equal(logits(other, ids), stock)
    runs.clear()
    logits(model, ids)
    assert len(runs) == 2, "what was done to the copies is nothing to the model"


def test_state_goes_on(runs: list[int]) -> None:
    """Names, loading other weights, other dtypes, another attention, then back."""
    model, other = block_model("qwen2"), block_model("qwen2", seed=1)
    ids, names = token_ids(), list(model.state_dict())
    before = [id(module) for module in model.modules()]
    handle = fn.patch(model, level="block")
    assert list(model.state_dict()) == names
    model.load_state_dict(other.state_dict())
    _close(logits(model, ids), logits(other, ids))
    model.double()
    _close(logits(model, ids), logits(copy.deepcopy(other).double(), ids))
    assert len(runs) == 2 + 2 + 2, "tried, then run in both dtypes"
    handle.revert()
    assert [id(module) for module in model.modules()] == before
    assert not hasattr(model.model.layers[0], "runner")
    handle.revert()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_static_cache_is_written_by_the_launch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first (nothing is there yet) and where a window runs over, the cache's own update."""
    updates: list[tuple[type, int]] = []
    for kind in (StaticLayer, StaticSlidingWindowLayer):
        update = kind.update

        def noted(self: Any, k: Tensor, v: Tensor, *args: Any, _: Any = update, **kw: Any) -> Any:
            updates.append((type(self), k.shape[2]))
            return _(self, k, v, *args, **kw)

        monkeypatch.setattr(kind, "update", noted)
    window = {"sliding_window": 10} if family == "gemma3_text" else {}
    model, ids = block_model(family, **window), token_ids(2, 14)
    stock = StaticCache(config=model.config, max_cache_len=20)
    ours = StaticCache(config=model.config, max_cache_len=20)
    pieces = [ids[:, :4], ids[:, 4:5], ids[:, 5:8], *ids[:, 8:].split(1, 1)]
    with torch.no_grad():
        expected = [model(x, **{cache_name(model): stock}).logits for x in pieces]
        fn.patch(model, level="block")
        updates.clear()
        for x, y in zip(pieces, expected, strict=True):
            _close(model(x, **{cache_name(model): ours}).logits, y)
    for one, other in zip(ours.layers, stock.layers, strict=True):
        assert int(one.get_seq_length()) == int(other.get_seq_length()) == 14
        _close(one.keys, other.keys)
        _close(one.values, other.values)
    full = [(StaticLayer, 4)] * (2 if family == "llama" else 1)
    sliding = [u for u in updates if u[0] is StaticSlidingWindowLayer]
    assert [u for u in updates if u[0] is StaticLayer] == full
    assert len(sliding) == (0 if family == "llama" else 1 + 4), sliding


def test_other_caches_are_updated_by_themselves(runs: list[int]) -> None:
    class Mine(DynamicCache):
        calls = 0

        def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return super().update(k, v, *args, **kwargs)

    class MyLayer(StaticLayer):
        def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(2 * k, v, *args, **kwargs)

    model, ids = block_model("llama"), token_ids()
    name = cache_name(model)
    mine, static = Mine(config=model.config), StaticCache(config=model.config, max_cache_len=20)
    static.layers = [MyLayer(20) for _ in static.layers]
    again = copy.deepcopy(static)
    with torch.no_grad():
        expected = [model(x, **{name: static}).logits for x in ids.split([8, 3], 1)]
        fn.patch(model, level="block")
        runs.clear()
        for x, y in zip(ids.split([8, 3], 1), expected, strict=True):
            _close(model(x, **{name: again}).logits, y)
        model(ids, **{name: mine})
    assert Mine.calls == 2 and len(runs) == 6


@pytest.mark.parametrize("family", ["llama", "ministral3"])
def test_a_cache_is_told_what_the_layer_tells_it(family: str) -> None:
    class Telling(DynamicCache):
        def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            told.append([args, {n: sorted(d) for n, d in kwargs.items() if isinstance(d, dict)}])
            return super().update(k, v, *args, **kwargs)

    told: list[Any] = []
    model, name = block_model(family), cache_name(block_model(family))
    with torch.no_grad():
        model(token_ids(), **{name: Telling(config=model.config)})
        stock, told[:] = list(told), []
        fn.patch(model, level="block")
        model(token_ids(), **{name: Telling(config=model.config)})
    assert told == stock and len(told) == 2


def test_a_release_that_counts_otherwise_keeps_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    assert caches.written_kinds() == (StaticLayer, StaticSlidingWindowLayer)
    update = StaticLayer.update

    def counts_twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        self.cumulative_length.add_(1)
        return result

    monkeypatch.setattr(StaticLayer, "update", counts_twice)
    assert caches.written_kinds.__wrapped__() == (StaticSlidingWindowLayer,)


@pytest.mark.parametrize("family", ["gemma3_text", "glm", "ministral3"])
def test_compiled_in_one_graph(family: str) -> None:
    """The whole model, static cache, decoding; an exchange inside is seen after compilation too."""
    window = {"sliding_window": 64} if family == "gemma3_text" else {}
    model, ids, steps = block_model(family, **window), padded_ids(1, 8), 9 if window else 4
    tokens = greedy(model, ids, steps)[:, 8:]
    fn.patch(model, level="block")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=32)}
    with torch.no_grad():
        made = [model(ids, **cache).logits[:, -1:].argmax(-1)]
        for _ in range(steps - 1):
            made.append(compiled(made[-1], **cache).logits[:, -1:].argmax(-1))
        assert torch.equal(torch.cat(made, 1), tokens)
        if not window:
            return
        before = compiled(made[-1]).logits
        model.model.layers[0].mlp.act_fn = nn.Tanh()
        assert not torch.allclose(compiled(made[-1]).logits, before, rtol=1e-3)


def test_an_adapter_put_on_later_is_obeyed(runs: list[int]) -> None:
    peft = pytest.importorskip("peft")
    model, ids = block_model("llama"), token_ids()
    fn.patch(model, level="block")
    plain = logits(model, ids)
    lora = peft.LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).eval()
    runs.clear()
    assert not torch.allclose(logits(adapted, ids), plain, rtol=1e-3) and not runs
    _close(logits(adapted.merge_and_unload(), ids), logits(adapted, ids))
