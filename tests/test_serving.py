"""The adapter for engines: a stand-in loader that drives the layers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn

from flashnorm_triton.serving import PatchAfterLoad


class Engine:
    """Loads a model and runs its layers itself: each norm's module, then each projection."""

    def __init__(self, loader: Any) -> None:
        self.runner = loader("llama")

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        model = self.runner.model
        config = model.config
        heads, size = config.num_attention_heads, config.head_dim
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        cos, sin = model.model.rotary_emb(hidden, positions)
        for layer in model.model.layers:
            residual = hidden
            normed = layer.input_layernorm(hidden)
            attention = layer.self_attn
            q, k, v = (
                getattr(attention, f"{name}_proj")(normed)
                .view(*ids.shape, -1, size)
                .transpose(1, 2)
                for name in "qkv"
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            groups = heads // config.num_key_value_heads
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = residual + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            residual = hidden
            normed = layer.post_attention_layernorm(hidden)
            mlp = layer.mlp
            hidden = residual + mlp.down_proj(
                mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
            )
        return model.lm_head(model.model.norm(hidden))


def load_stock(family: str, seed: int = 3) -> SimpleNamespace:
    return SimpleNamespace(model=tiny_model(family, seed=seed), weights="loaded")


@pytest.mark.parametrize("options", [{}, {"fold": False}, {"head": True}])
def test_an_engine_that_runs_the_layers_by_hand(options: dict[str, Any]) -> None:
    ids = token_ids(3, 17)
    stock = Engine(load_stock)
    wanted = stock.logits(ids)
    with torch.no_grad():
        torch.testing.assert_close(wanted, stock.runner.model(ids).logits)
    loader = PatchAfterLoad(load_stock, attribute="model", options=options)
    engine = Engine(loader)
    assert engine.runner.weights == "loaded"
    (report,) = loader.reports()
    assert len(report.fused) >= 4
    patched = {type(m).__name__ for m in engine.runner.model.modules()}
    assert patched != {type(m).__name__ for m in stock.runner.model.modules()}
    torch.testing.assert_close(engine.logits(ids), wanted, rtol=1e-4, atol=1e-4)
    loader.revert()
    assert type(engine.runner.model.model.layers[0].input_layernorm).__name__ == "LlamaRMSNorm"
    assert torch.equal(engine.logits(ids), wanted) and not loader.handles


def test_loaders_that_return_no_module() -> None:
    with pytest.raises(TypeError, match="no torch module: SimpleNamespace"):
        PatchAfterLoad(load_stock)("llama")
    with pytest.raises(TypeError, match="no torch module in its attribute 'weights': str"):
        PatchAfterLoad(load_stock, attribute="weights")("llama")
    with pytest.raises(AttributeError):
        PatchAfterLoad(load_stock, attribute="none")("llama")
    model = tiny_model("llama")
    assert PatchAfterLoad(lambda: model)() is model
