"""Models with a part for images: the part is traced by itself, and runs with the language model."""

from __future__ import annotations

import copy
import inspect
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
# Towers that read off ``grid_thw`` how many patches there are and where windows and frames end.
GRID_IMAGE = {"depth": 2, "num_heads": 4, "patch_size": 8, "intermediate_size": 96}
GRID_TEXT = {
    **DECODER,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
WINDOWED = {"hidden_size": 64, "out_hidden_size": 64, "window_size": 32}
GRIDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {**WINDOWED, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        **WINDOWED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
for _name, _vision in GRIDS.items():
    TOWERS[_name] = {
        "text_config": GRID_TEXT,
        "vision_config": {**GRID_IMAGE, **_vision},
        "image_token_id": IMAGE_TOKEN,
        **{f"{token}_token_id": 91 + i for i, token in enumerate(("video", "vision_start"))},
        "vision_end_token_id": 93,
    }


def _inputs(seed: int, grids: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 89, (2, 12), generator=draw)
    if grids:
        # Merged two by two: two and four places, of which one is in a window of its own.
        ids[0, 2:4], ids[1, 2:6] = IMAGE_TOKEN, IMAGE_TOKEN
        grid = torch.tensor([[1, 2, 4], [1, 2, 8]])
        patches = torch.randn(8 + 16, 3 * 2 * 8 * 8, generator=draw)
        kinds = (ids == IMAGE_TOKEN).int()
        return {
            "input_ids": ids, "pixel_values": patches, "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        }  # fmt: skip
    ids[:, 2 : 2 + PATCHES] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 16, 16, generator=draw)
    return {"input_ids": ids, "pixel_values": pixels}


@torch.no_grad()
def _draws(model: nn.Module) -> list[Tensor]:
    like = next(model.parameters())
    outputs = []
    for seed in range(3):
        given = _inputs(seed, model.config.model_type in GRIDS)
        if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
            given.pop("mm_token_type_ids", None)
        inputs = {k: v.to(like) if v.is_floating_point() else v for k, v in given.items()}
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
    fused = [s for s in handle.report.fused if "vision_tower" in s.norm or "visual" in s.norm]
    assert len(fused) >= 4 and all("by itself" in site.reason for site in fused)
    assert len(handle.report.fused) == len(fused) + 4
    assert not [site for site in handle.report.sites if "could not be" in site.reason]
    text = [block.level for block in handle.report.blocks if "language_model" in block.layer]
    assert text == ["block"] * 2
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
    norm = next(m for n, m in model.named_modules() if n.endswith((".layer_norm1", ".norm1")))
    with torch.no_grad():
        norm.weight.mul_(1.01)
    assert (_draws(model)[0] - before).norm() > 1e-4 * before.norm()


def test_a_grid_that_is_given_counts() -> None:
    """With the user's own patches and grid the whole model is followed, tower included."""
    model = build(Family("qwen2_5_vl", 0, TOWERS["qwen2_5_vl"], task="ImageTextToText"))
    given = _inputs(0, grids=True)
    before = {name: tensor.clone() for name, tensor in given.items()}
    alone, whole = fn.audit(model), fn.audit(model, example_inputs=given)
    assert {s.norm for s in whole.fused} == {s.norm for s in alone.fused}
    assert not any("by itself" in site.reason for site in whole.sites)
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())
    given["pixel_values"] = given["pixel_values"][:-1]  # a control: the grid says one more
    assert not fn.audit(model, example_inputs=given).fused
