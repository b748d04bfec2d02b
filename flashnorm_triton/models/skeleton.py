"""A model's modules without its weights: from a config, or from a model type's default config.

Everything is built on torch's meta device: classes and shapes, no memory. Which of transformers'
classes is taken follows from the config's own ``architectures``, else from transformers' mappings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# What is looked up for a config without ``architectures``, in this order (of a config with encoder
# and decoder, the sequence to sequence model first).
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "depth", "attention_layers"),
)


def model_types() -> list[str]:
    """Every model type that the installed transformers has a config for."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def default_config(model_type: str, layers: int | None = None) -> Any:
    """The default config of a model type; ``layers`` cuts the depth of it and of its parts.

    Where the config cannot be built at that depth, it keeps the depth it has.

    Raises ValueError for a type that transformers does not know or cannot build without arguments.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        near = [name for name in model_types() if model_type[:4] in name]
        hint = f"near it: {', '.join(near[:8])}" if near else "see transformers.CONFIG_MAPPING"
        raise ValueError(f"transformers has no model type {model_type!r} ({hint})")
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise ValueError(f"the default config of {model_type} cannot be built: {error}") from error
    return config if layers is None else _shallow(config, layers)


def _shallow(config: Any, layers: int) -> Any:
    """The same config with fewer layers, but with every kind of layer that it names."""
    wanted = _layer_kinds(config)
    for depth in (layers, 2 * layers, 4 * layers, 8 * layers):
        try:
            cut = type(config)(**_cut(config, depth))
        except Exception:
            continue  # the config does not hold together at this depth
        if _layer_kinds(cut) == wanted:
            return cut
    return config


def _layer_kinds(config: Any) -> set[str]:
    kinds = {
        f"{name}.{kind}"
        for name in ("layer_types", "layers_block_type", "mlp_layer_types")
        for kind in getattr(config, name, None) or ()
    }
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None:
            kinds |= {f"{name}.{kind}" for kind in _layer_kinds(part)}
    return kinds


def _cut(config: Any, layers: int) -> dict[str, Any]:
    """The arguments that build the same config with at most ``layers`` layers in every part."""
    cut: dict[str, Any] = {}
    for name in _DEPTHS:
        depth = getattr(config, name, None)
        if isinstance(depth, int) and depth > layers:
            cut[name] = layers
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            inner = _cut(part, layers)
            if inner:
                cut[name] = {"model_type": part.model_type, **inner}
    return cut


def from_type(model_type: str, layers: int | None = None) -> nn.Module:
    """The model of a type's default config, on the meta device, cut to ``layers`` where that holds.

    Raises ValueError for what transformers does not know or cannot build from defaults.
    """
    config = default_config(model_type, layers)
    try:
        return build(config)
    except ValueError:
        whole = default_config(model_type)
        if layers is None or whole.to_dict() == config.to_dict():
            raise
        return build(whole)


def shallow(config: Any, layers: int) -> Any:
    """A config as given, with at most ``layers`` layers; its lists of one entry a layer go along.

    Where the config cannot be built at that depth, it is given back as it is.
    """
    try:
        return type(config).from_dict(_cut_lists(config.to_dict(), layers))
    except Exception:
        return config


def _cut_lists(values: dict[str, Any], layers: int) -> dict[str, Any]:
    depths = {d for n in _DEPTHS if isinstance(d := values.get(n), int) and d > layers}
    cut: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _cut_lists(value, layers)
        elif isinstance(value, list) and len(value) in depths:
            value = value[:layers]
        elif name in _DEPTHS and value in depths:
            value = layers
        cut[name] = value
    return cut


def build(config: Any) -> nn.Module:
    """The model of a config, on the meta device.

    Raises ValueError where transformers has no class for the config, or its class cannot be built.
    """
    import transformers

    kinds: list[Any] = []
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            kinds.append(getattr(transformers, name))
    both = getattr(config, "is_encoder_decoder", False)
    for name in sorted(_MAPPINGS, key=lambda name: both and "SEQ" not in name):
        mapping = getattr(transformers, name, None)
        if mapping is not None and type(config) in mapping:
            kind = mapping[type(config)]
            kinds.append(kind[0] if isinstance(kind, (tuple, list)) else kind)
    if not kinds:
        raise ValueError(f"transformers has no model class for a {type(config).__name__}")
    failures = []
    for kind in dict.fromkeys(kinds):
        try:
            with torch.device("meta"):
                return kind._from_config(config).eval()
        except Exception as error:
            failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
    raise ValueError(f"{type(config).__name__} gives no model: {failures[0]}")
