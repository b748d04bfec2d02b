"""Models whose layers run as blocks compute, and generate, what the stock ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_models import FAMILIES, block_model, exact_logits, greedy, logits, padded_ids
from numerics import assert_as_near
from tiny_models import token_ids

import flashnorm_triton as fn
from flashnorm_triton.models.block.layer import Block, Runner

FLOOR = 3e-8


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each forward that a layer has run as a block."""
    lengths: list[int] = []
    run = Runner.run

    def counted(self: Runner, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        lengths.append(x.shape[1])
        return run(self, x, kwargs)

    monkeypatch.setattr(Runner, "run", counted)
    return lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, device: torch.device, runs: list[int]) -> None:
    model = block_model(family).to(device)
    draws = [token_ids(seed=seed).to(device) for seed in range(3)]
    stock, exact = [logits(model, x) for x in draws], [exact_logits(model, x) for x in draws]
    prompts = padded_ids(3).to(device)
    tokens = greedy(model, prompts)
    kinds = [type(module) for module in model.modules()]
    handle = fn.patch(model, level="block")
    assert [block.level for block in handle.report.blocks] == ["block"] * 2
    assert handle.report.launches_saved_by_blocks >= 2 * 8
    runs.clear()
    ours = [logits(model, x) for x in draws]
    assert runs == [11] * 6
    assert_as_near(ours, stock, exact, FLOOR)
    assert torch.equal(greedy(model, prompts), tokens)
    assert torch.equal(greedy(model, prompts, cache_implementation="static"), tokens)
    assert runs[6:].count(1) == 2 * 2 * 23, "every step of both, in both layers"
    handle.revert()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(logits(model, draws[0]), stock[0])
    assert not any(isinstance(module, Block) for module in model.modules())


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_heads_and_batches(
    family: str, fold: bool, heads: int, device: torch.device, runs: list[int]
) -> None:
    model = block_model(family, num_key_value_heads=heads).to(device)
    tokens = [greedy(model, padded_ids(batch, 9, batch).to(device), 9) for batch in (1, 2, 4)]
    fn.patch(model, fold=fold, level="block")
    runs.clear()
    for batch, expected in zip((1, 2, 4), tokens, strict=True):
        assert torch.equal(greedy(model, padded_ids(batch, 9, batch).to(device), 9), expected)
    assert len(runs) == 3 * 2 * 9


@pytest.mark.parametrize("family", ["qwen2", "granite"])
@pytest.mark.parametrize("attention", ["eager", "mine"])
def test_attention_is_the_models_own(attention: str, family: str, runs: list[int]) -> None:
    """Chosen before patching, after it, and between two calls; the user's own function too."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mine(module: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((args[3], sorted(kwargs.items(), key=str)))
        output, weights = sdpa_attention_forward(module, *args, **kwargs)
        return output * 1.25, weights

    given: list[Any] = []
    AttentionInterface.register("mine", mine)
    model = block_model(family)
    model.set_attn_implementation(attention)
    stock, stock_given = logits(model, token_ids()), list(given)
    model.set_attn_implementation("sdpa")
    fn.patch(model, level="block")
    logits(model, token_ids())
    model.set_attn_implementation(attention)
    runs.clear()
    given.clear()
    torch.testing.assert_close(logits(model, token_ids()), stock, rtol=1e-4, atol=1e-4)
    assert len(runs) == 2 and str(given) == str(stock_given)


def test_any_prompt_length_and_a_prompt_in_parts(runs: list[int]) -> None:
    model = block_model("mistral")
    ids = token_ids(2, 40)
    stock = {length: logits(model, ids[:, :length]) for length in (1, 2, 7, 33, 40)}
    fn.patch(model, level="block")
    for length, expected in stock.items():
        torch.testing.assert_close(logits(model, ids[:, :length]), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        first = model(ids[:, :33], use_cache=True)
        cache = first.get("cache") if "cache" in first else first.past_key_values
        name = "cache" if "cache" in first else "past_key_values"
        rest = model(ids[:, 33:], **{name: cache}).logits
    torch.testing.assert_close(rest, stock[40][:, 33:], rtol=1e-4, atol=1e-4)
    assert len(runs) >= 2 * 7


def test_two_thousand_tokens_are_those_of_the_stock_model(runs: list[int]) -> None:
    model = block_model("llama", num_hidden_layers=1, max_position_embeddings=4096)
    ids = token_ids(1, 5)
    tokens = greedy(model, ids, 2048)
    fn.patch(model, level="block")
    runs.clear()
    assert torch.equal(greedy(model, ids, 2048), tokens)
    assert len(runs) == 2048 and len(set(tokens[0, -64:].tolist())) > 1


def test_the_shipped_model_generates_the_same_to_its_last_position(runs: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    from flashnorm_triton.demo_model import FOLDER

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    room, last = model.config.max_position_embeddings, 48
    ids = torch.randint(3, model.config.vocab_size, (1, room - last))
    tokens = greedy(model, ids, last)
    fn.patch(model, level="block")
    runs.clear()
    assert torch.equal(greedy(model, ids, last), tokens)
    assert len(runs) == last * model.config.num_hidden_layers
