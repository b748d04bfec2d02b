"""Models with a part for images: the part is traced by itself, and runs with the language model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_table import _DECODER as DECODER
from family_table import _IMAGE as IMAGE
from family_table import Family, build
from numerics import assert_as_near
from torch import Tensor, nn

import flashnorm_triton as fn

IMAGE_TOKEN, PATCHES = 90, 4
FLOOR = 3e-8
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**DECODER, "sliding_window": 64},
        "vision_config": {**IMAGE, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": PATCHES,
        "image_token_id": IMAGE_TOKEN,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "llava": {
        "text_config": {**DECODER, "model_type": "llama"},
        "vision_config": {**IMAGE, "model_type": "clip_vision_model", "projection_dim": 64},
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": PATCHES,
    },
}


def _inputs(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 89, (2, 12), generator=draw)
    ids[:, 2 : 2 + PATCHES] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 16, 16, generator=draw)
    return {"input_ids": ids, "pixel_values": pixels}


@torch.no_grad()
def _draws(model: nn.Module) -> list[Tensor]:
    like = next(model.parameters())
    outputs = []
    for seed in range(3):
        inputs = {k: v.to(like) if v.is_floating_point() else v for k, v in _inputs(seed).items()}
        outputs.append(model(**inputs).logits)
    return outputs


@pytest.mark.parametrize("name", TOWERS)
def test_tower_and_language_model(name: str) -> None:
    try:
        model = build(Family(name, 0, TOWERS[name], task="ImageTextToText"))
    except LookupError:
        pytest.skip(f"this release of transformers has no {name}")
    stock, exact = _draws(model), _draws(copy.deepcopy(model).double())
    modules = dict(model.named_modules())
    handle = fn.patch(model)
    fused = [site for site in handle.report.fused if "vision_tower" in site.norm]
    assert len(fused) >= 4 and all("by itself" in site.reason for site in fused)
    assert len(handle.report.fused) == len(fused) + 4
    ours = _draws(model)
    assert not torch.equal(ours[0], stock[0])
    assert_as_near(ours, stock, exact, FLOOR)
    handle.revert()
    assert {n: id(m) for n, m in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    assert all(map(torch.equal, _draws(model), stock))


@pytest.mark.parametrize("name", TOWERS)
def test_the_tower_counts(name: str) -> None:
    """A control: a gain of the tower that is folded wrongly is seen in the logits."""
    model = build(Family(name, 0, TOWERS[name], task="ImageTextToText"))
    before = _draws(model)[0]
    tower = next(m for n, m in model.named_modules() if n.endswith("vision_tower.encoder"))
    with torch.no_grad():
        tower.layers[0].layer_norm1.weight.mul_(1.01)
    assert (_draws(model)[0] - before).norm() > 1e-4 * before.norm()
