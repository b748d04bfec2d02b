"""Small inputs for a model that nobody has given an example for: from its signature and config.

Several guesses are offered, likeliest first; whoever runs the model takes the first that works.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.integers import real

# Sizes no hidden size is likely to equal, so that a transposed tensor cannot pass for a plain one.
BATCH, LENGTH = 2, 7
_PARTS = ("vision_config", "audio_config", "image_config", "encoder", "backbone_config")


def accepted_arguments(model: nn.Module) -> set[str]:
    """The names that the model's forward takes; a wrapper's, also those of what it wraps."""
    takes = set(inspect.signature(type(model).forward).parameters)
    if "input_ids" not in takes and "kwargs" in takes:
        for module in model.modules():
            inner = set(inspect.signature(type(module).forward).parameters)
            if "input_ids" in inner:
                return takes | inner
    return takes


def guesses(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments to try, one set after another. To be called under a fake tensor mode.

    Raises TypeError when the model takes nothing that can be made up.
    """
    takes = accepted_arguments(model)
    parameters = inspect.signature(type(model).forward).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    main = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    texts = [name for name in ("input_ids", "decoder_input_ids") if name in takes]
    wanted = [[*texts, *required]]
    if isinstance(main, str) and main in takes:
        wanted.append([main, *required, *texts[1:]])
    wanted += [[*texts, *required, name] for name in _MAKERS if name in takes]
    wanted.append([*texts, *(name for name in _MAKERS if name in takes)])
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    offered = False
    for names in {tuple(dict.fromkeys(names)): None for names in wanted if names}:
        if not all(name in _TOKENS or name in _MAKERS for name in names):
            continue
        layouts = max((len(_MAKERS[name](config)) for name in names if name in _MAKERS), default=1)
        for index in range(layouts):
            inputs: dict[str, Tensor] = {}
            for name in names:
                if name in _TOKENS:
                    inputs[name] = torch.zeros(BATCH, LENGTH, dtype=torch.long)
                else:
                    made = _MAKERS[name](config)
                    tensor = made[min(index, len(made) - 1)]
                    if tensor.is_floating_point() and floats:
                        tensor = tensor.to(floats[0])
                    inputs[name] = tensor
            offered = True
            yield inputs
    if not offered:
        raise TypeError(
            f"{type(model).__name__}.forward takes no input_ids: pass "
            "example_inputs=, a dict of keyword arguments or a tuple of positional ones"
        )


def _number(config: Any, *names: str, default: int) -> int:
    """A size that a config, or the part of it that speaks of images or sound, gives."""
    for part in (config, *(getattr(config, name, None) for name in _PARTS)):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _pixels(config: Any) -> list[Tensor]:
    side = _number(config, "image_size", "image_resolution", "input_size", default=224)
    channels = _number(config, "num_channels", "in_channels", "in_chans", default=3)
    patch = _number(config, "patch_size", default=16)
    time = _number(config, "temporal_patch_size", default=1)
    patches = torch.empty(_grid_side(config) ** 2, channels * time * patch * patch)
    images = torch.empty(BATCH, channels, side, side)
    videos = torch.empty(BATCH, _number(config, "num_frames", default=4), channels, side, side)
    large = torch.empty(BATCH, channels, 384, 384)
    return [images, patches, videos, large, patches[None].expand(BATCH, -1, -1)]


def _hidden(config: Any) -> list[Tensor]:
    size = _number(config, "hidden_size", "d_model", "embed_dim", default=64)
    return [torch.empty(BATCH, 16, size), _pixels(config)[1]]


def _features(config: Any) -> list[Tensor]:
    mels = _number(
        config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80
    )
    frames = 2 * _number(config, "max_source_positions", default=64)
    return [torch.empty(BATCH, mels, frames), torch.empty(BATCH, 128, mels)]


def _sound(config: Any) -> list[Tensor]:
    mels = _number(config, "num_mel_bins", default=128)
    frames = _number(config, "max_length", default=1024)
    return [
        torch.empty(BATCH, 16000),
        torch.empty(BATCH, frames, mels),
        torch.empty(BATCH, 1, 16000),
    ]


def _grid(config: Any) -> list[Tensor]:
    side = _grid_side(config)
    return [real(lambda: torch.tensor([[1, side, side]]))]


def _grid_side(config: Any) -> int:
    """Patches in a row of an image: two places after merging."""
    return 2 * _number(config, "spatial_merge_size", default=2)


_TOKENS = ("input_ids", "decoder_input_ids")
_MAKERS = {
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _sound,
    "audio_values": _sound,
    "hidden_states": _hidden,
    "inputs_embeds": _hidden,
    "encoder_hidden_states": _hidden,
    "query_embeds": _hidden,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "bbox": lambda config: [torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)],
    "qformer_input_ids": lambda config: [torch.zeros(BATCH, LENGTH, dtype=torch.long)],
}
