"""generate with a patched model: every cache, attention and way of decoding that is here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from tiny_models import VOCABULARY, randomise, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.installers import sites_of


def _t5() -> nn.Module:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(
        "t5", vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=112, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    randomise(model)
    return model.eval()


def _decoder(family: str) -> Callable[[], nn.Module]:
    return lambda: tiny_model(family, eos_token_id=None)


MODELS = {**{name: _decoder(name) for name in ("llama", "gemma2", "mixtral", "gpt2")}, "t5": _t5}
PROMPT = 11


def _left_padded(ids: Tensor) -> dict[str, Tensor]:
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3], mask[1, :3] = 0, 0
    return {"inputs": padded, "attention_mask": mask}


def _helper(model: nn.Module) -> nn.Module:
    return tiny_model(model.config.model_type, num_hidden_layers=1, eos_token_id=None)


# name -> (arguments of generate, rows of the prompt, what must be there)
WAYS: dict[str, tuple[dict[str, Any], int, str]] = {
    "dynamic": ({"cache_implementation": "dynamic"}, 2, ""),
    "static": ({"cache_implementation": "static"}, 2, ""),
    "offloaded": ({"cache_implementation": "offloaded"}, 2, "gpu"),
    "offloaded_static": ({"cache_implementation": "offloaded_static"}, 2, "gpu"),
    "quantized": (
        {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "q_group_size": 16}},
        2,
        "optimum",
    ),
    "no cache": ({"use_cache": False}, 2, ""),
    "prefill in chunks": ({"prefill_chunk_size": 4}, 2, ""),
    "beams": ({"num_beams": 3}, 2, ""),
    "beams, static": ({"num_beams": 2, "cache_implementation": "static"}, 2, ""),
    "sampling": ({"do_sample": True, "temperature": 0.7, "top_k": 9}, 2, ""),
    "assisted": ({"assistant_model": _helper}, 1, ""),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2}, 1, ""),
    "left padding": ({"padded": True}, 2, ""),
    "left padding, static": ({"padded": True, "cache_implementation": "static"}, 2, ""),
}
NEEDS_A_DECODER = ("assisted", "prompt lookup", "left padding", "left padding, static",
                   "prefill in chunks")  # fmt: skip


def _generate(model: nn.Module, way: str, ids: Tensor) -> Tensor:
    arguments, rows, _ = WAYS[way]
    options = {"do_sample": False, "disable_compile": True, "max_new_tokens": 8, **arguments}
    inputs: dict[str, Any] = {"inputs": ids[:rows]}
    inputs["attention_mask"] = torch.ones_like(inputs["inputs"])
    if options.pop("padded", False):
        inputs = _left_padded(ids)
    if "assistant_model" in options:
        options["assistant_model"] = _helper(model).to(ids.device)
    torch.manual_seed(11)
    return model.generate(**inputs, **options)


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _skip_unless(needed: str) -> None:
    if needed == "gpu" and not HAS_GPU:
        pytest.skip("needs a GPU: torch has no other device to offload from")
    if needed == "optimum" and not _has("optimum-quanto"):
        pytest.skip("quantized caches need optimum-quanto")


@pytest.mark.parametrize("family", MODELS)
def test_every_way_of_decoding_gives_the_same_tokens(family: str, device: torch.device) -> None:
    """fold=True, then fold=False on the same model, against stock: all that runs everywhere."""
    model, ids = MODELS[family]().to(device), token_ids(2, PROMPT).to(device)
    ways = [way for way, (_, _, needed) in WAYS.items() if not needed]
    if family == "t5":
        ways = [way for way in ways if way not in NEEDS_A_DECODER]
    expected = {way: _generate(model, way, ids) for way in ways}
    for fold in (True, False):
        with fn.patched(model, fold=fold):
            assert sites_of(model) or (family == "gpt2" and not fold)
            for way, tokens in expected.items():
                assert torch.equal(_generate(model, way, ids), tokens), (way, fold)
    for way in ways[:3]:
        assert torch.equal(_generate(model, way, ids), expected[way]), f"{way}, reverted"


@pytest.mark.parametrize("way", [way for way, (_, _, needed) in WAYS.items() if needed])
def test_caches_that_need_more(way: str, device: torch.device) -> None:
    _skip_unless(WAYS[way][2])
    model, ids = tiny_model("llama").to(device), token_ids(2, PROMPT).to(device)
    expected = _generate(model, way, ids)
    if way == "offloaded" and not torch.equal(expected, _generate(model, "dynamic", ids)):
        # Seen on a busy GPU with transformers 5.17: its copies run on a stream of their own.
        pytest.skip("the stock model's own tokens change with this cache here")
    with fn.patched(model):
        assert torch.equal(_generate(model, way, ids), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_attention_implementations(attention: str, device: torch.device) -> None:
    if attention == "flex_attention" and not HAS_GPU:
        pytest.skip("flex_attention is compiled, for minutes on a CPU")
    dtype = torch.bfloat16 if attention == "flash_attention_2" else torch.float32
    model, ids = tiny_model("llama", dtype).to(device), token_ids(2, PROMPT).to(device)
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        pytest.skip(f"{attention} is not here: {str(error)[:80]}")
    with torch.no_grad():
        stock = model(ids).logits
    tokens = _generate(model, "dynamic", ids)
    with fn.patched(model):
        with torch.no_grad():
            ours = model(ids).logits
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
        if dtype == torch.float32:
            assert torch.equal(_generate(model, "dynamic", ids), tokens)
        # Switched while patched: what is asked of the config is what runs.
        model.set_attn_implementation("eager")
        with torch.no_grad():
            again = model(ids).logits
        torch.testing.assert_close(again, stock, rtol=10 * tolerance, atol=10 * tolerance)


def test_cache_objects_made_by_hand(device: torch.device) -> None:
    from transformers import DynamicCache, StaticCache

    model, ids = tiny_model("gemma2").to(device), token_ids(2, PROMPT).to(device)
    made = (
        lambda: DynamicCache(config=model.config),
        lambda: StaticCache(config=model.config, max_cache_len=32),
    )

    @torch.no_grad()
    def logits(make: Callable[[], Any]) -> Tensor:
        cache, steps = make(), []
        for start, stop in ((0, 6), (6, 7), (7, PROMPT)):
            result = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            steps.append(result.logits)
        return torch.cat(steps, 1)

    with torch.no_grad():
        whole = model(ids).logits
    with fn.patched(model):
        for make in made:
            torch.testing.assert_close(logits(make), whole, rtol=1e-3, atol=1e-3)
