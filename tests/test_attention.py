"""Attention of grouped heads over a masked cache: against float64, and in a compiled graph."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import HAS_GPU
from numerics import LIMIT, errors
from torch import Tensor
from torch.nn import functional

from flashnorm_triton import attention

BACKEND = "inductor" if HAS_GPU else "aot_eager"
SHAPES = (
    (1, 4, 2, 16, 24),
    (3, 8, 1, 32, 17),
    (2, 4, 4, 64, 40),
    (2, 6, 2, 72, 33),
    (1, 4, 2, 160, 9),
)


def _case(
    batch: int, heads: int, kv: int, width: int, length: int, device: torch.device, padded: bool
) -> tuple[Tensor, ...]:
    draw = lambda *shape: torch.randn(shape, device=device).to(torch.bfloat16)  # noqa: E731
    q = draw(batch, 1, heads, width).transpose(1, 2)
    k, v = draw(batch, kv, length, width), draw(batch, kv, length, width)
    # What is not seen would be: large keys, values from elsewhere.
    seen = torch.rand(batch if padded else 1, 1, 1, length, device=device) < 0.6
    seen[..., 2] = True
    hidden = ~seen.expand(batch, kv, 1, length).transpose(2, 3)
    k, v = torch.where(hidden, 3 * k, k), torch.where(hidden, v + 50, v)
    return q, k, v, seen


def _expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    weights = (scale * q @ k.transpose(2, 3)).masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_against_float64(shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    for padded in (False, True):
        q, k, v, seen = _case(*shape, device, padded)
        scale = 1.3 / math.sqrt(shape[3])
        mask = seen
        if kind == "added":
            mask = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)
        ours = attention.grouped_attention(q, k, v, mask, scale)
        right = _expected(q.double(), k.double(), v.double(), seen, scale)
        repeated = (t.repeat_interleave(shape[1] // shape[2], dim=1) for t in (k, v))
        stock = functional.scaled_dot_product_attention(
            q, *repeated, attn_mask=seen, scale=scale
        ).transpose(1, 2)
        assert ours.shape == right.shape and ours.is_contiguous() and ours.dtype == q.dtype
        least = errors(right.to(ours.dtype), right)
        for value, theirs, once in zip(
            errors(ours, right), errors(stock, right), least, strict=True
        ):
            # Probabilities are rounded for their product here, or are not: another kernel.
            assert value <= 2 * LIMIT * max(theirs, once)


def test_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    q, k, v, seen = _case(2, 4, 2, 64, 32, device, True)
    compiled = torch.compile(attention.grouped_attention, fullgraph=True, backend=BACKEND)
    with torch.no_grad():
        ours, right = (f(q, k, v, seen, 0.1) for f in (compiled, attention.grouped_attention))
    assert ours.stride() == right.stride()
    torch.testing.assert_close(ours, right)


def test_where_it_is_not_asked() -> None:
    q, k, v, seen = _case(2, 4, 2, 64, 32, torch.device("cpu"), False)
    assert not attention.serves(q, k, seen)  # no GPU
    assert not attention.serves(q, k, None)


@pytest.mark.gpu
def test_cudnn_takes_the_usual_shapes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_refused", set())
    for shape in ((1, 32, 8, 64, 512), (16, 32, 8, 128, 512), (1, 4, 1, 256, 512)):
        q, k, v, seen = _case(*shape, device, False)
        assert attention.serves(q, k, seen)
        attention.grouped_attention(q, k, v, seen, 0.1)
    assert not attention._refused


@torch.no_grad()
def test_a_model_takes_it_for_static_caches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked steps of a static cache, left padding and all; a growing cache is the function's."""
    transformers = pytest.importorskip("transformers")
    import flashnorm_triton as fn

    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=97, attn_implementation="sdpa",
    )  # fmt: skip
    stock = transformers.AutoModelForCausalLM.from_config(config).eval()
    patched = transformers.AutoModelForCausalLM.from_config(config).eval()
    patched.load_state_dict(stock.state_dict())
    fn.patch(patched, level="block")
    asked = []

    def serves(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
        found = mask is not None and q.shape[2] == 1 and mask.shape[-1] == k.shape[2]
        asked.append(found)
        return found

    monkeypatch.setattr(attention, "serves", serves)
    made, added = [], attention._added
    monkeypatch.setattr(attention, "_added", lambda *given: made.append(1) or added(*given))
    tokens = torch.randint(1, 97, (2, 12))
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, :3] = 0
    for static in (True, False):
        logits = []
        for model in (stock, patched):
            cache = transformers.DynamicCache(config=config)
            if static:
                cache = transformers.StaticCache(config=config, max_cache_len=16)
            steps = []
            for first, last in ((0, 8), *((n, n + 1) for n in range(8, 12))):
                out = model(
                    tokens[:, first:last], attention_mask=padding[:, :last],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
                steps.append(out.logits[:, -1])
            logits.append(torch.stack(steps))
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
        # The first call finds no cache yet to write into.
        assert asked == ([True] * 8 if static else [])
        # Both layers of a step see through the same mask, which is made into numbers once.
        assert len(made) == (4 if static else 0)
        asked.clear()
        made.clear()
