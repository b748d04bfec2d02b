"""Patching a model type: every model of it that is loaded from now on comes out patched.

Two class methods of transformers make a model with its weights in place: ``from_pretrained`` and
``_from_config`` (behind ``from_config``). They are overridden on the one class that all models of
the type derive from (``LlamaPreTrainedModel``) and on nothing else: the override calls the method
it hides and patches what that returned, so ``dtype``, ``device_map``, quantization and sharded
folders are transformers' affair as ever. ``PreTrainedModel``, the auto classes, other types, model
constructors and forwards stay untouched, which hooking any of those would not allow.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from flashnorm_triton.models.installers import sites_of
from flashnorm_triton.models.patcher import patch

_METHODS = ("from_pretrained", "_from_config")
_lock = threading.RLock()
_options: dict[str, dict[str, Any]] = {}  # model type -> options of patch
_types_on: dict[type, set[str]] = {}  # overridden class -> the model types it is overridden for


def patch_class(model_type: str, **patch_options: Any) -> None:
    """Make every later ``from_pretrained`` / ``from_config`` of ``model_type`` return it patched.

    In any thread, through an auto class or the type's own classes, with any head, subclasses
    included; models that exist already are left as they are. (Load one model at a time:
    transformers' own loading is not safe in two threads at once.) ``patch_options`` are those of
    ``patch``; calling again with others changes them for later loads, with the same ones nothing.

    A model that cannot be patched is returned as it was loaded, with a RuntimeWarning that says
    why. Models without weights (on the meta device) and parts that a larger model of another type
    builds for itself are not patched: patch the whole, once it is loaded.

    Raises ValueError for a type that transformers does not have, naming the nearest, TypeError for
    an option that ``patch`` does not have.
    """
    known = set(inspect.signature(patch).parameters) - {"model"}
    for name in patch_options:
        if name not in known:
            raise TypeError(
                f"patch_class got an option {name!r}; patch has {', '.join(sorted(known))}"
            )
    bases = _bases_of(model_type)
    with _lock:
        _options[model_type] = dict(patch_options)
        for base in bases:
            if base not in _types_on:
                for name in _METHODS:
                    setattr(base, name, _override(base, name))
            _types_on.setdefault(base, set()).add(model_type)


def unpatch_class(model_type: str) -> None:
    """Undo ``patch_class``: later loads of ``model_type`` are stock again, its classes as before.

    Models that came out patched stay so. A type that is not patched is left alone. Raises
    ValueError for a type that transformers does not have.
    """
    with _lock:
        if _options.pop(model_type, None) is None:
            _config_class(model_type)
        for base in [base for base, types in _types_on.items() if model_type in types]:
            _types_on[base].discard(model_type)
            if not _types_on[base]:
                del _types_on[base]
                for name in _METHODS:
                    _put_back(base, name)


def _config_class(model_type: str) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str):
        raise TypeError(
            f"a model type is a string such as 'llama', not {type(model_type).__name__}; it is in "
            "a model's config.model_type"
        )
    names = list(CONFIG_MAPPING.keys())
    if model_type not in names:
        near = difflib.get_close_matches(model_type.lower(), names, n=4, cutoff=0.5)
        meant = f"did you mean {' or '.join(map(repr, near))}" if near else "see config.model_type"
        raise ValueError(f"transformers has no model type {model_type!r}: {meant}?")
    return CONFIG_MAPPING[model_type]


def _bases_of(model_type: str) -> set[type]:
    """The topmost classes, below PreTrainedModel, that the models of a type derive from."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    config = _config_class(model_type)
    classes: set[type] = set()
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and config in mapping.keys():  # noqa: SIM118
            found = mapping[config]
            classes.update(found if isinstance(found, tuple) else (found,))
    lines = [[k for k in c.__mro__ if issubclass(k, PreTrainedModel)] for c in classes]
    bases = {line[-2] for line in lines if len(line) > 1}
    if not bases:
        raise ValueError(
            f"transformers has no model class for the model type {model_type!r} alone: it is a "
            "part of others; patch those, or patch(model) after loading"
        )
    return bases


def _override(base: type, name: str) -> classmethod:
    own = vars(base).get(name)

    @functools.wraps(getattr(base, name).__func__)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        if own is not None:
            result = own.__get__(None, cls)(*args, **kwargs)
        else:
            result = getattr(super(base, cls), name)(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, nn.Module) and not _is_being_built_in(sys._getframe(1)):
            _patch_loaded(model, quiet=name == "_from_config")
        return result

    load.__flashnorm_hidden__ = own
    return classmethod(load)


def _put_back(base: type, name: str) -> None:
    override = vars(base)[name]
    own = override.__func__.__flashnorm_hidden__
    if own is None:
        delattr(base, name)
    else:
        setattr(base, name, own)


def _patch_loaded(model: nn.Module, quiet: bool) -> None:
    config = getattr(model, "config", None)
    options: Mapping[str, Any] | None = _options.get(getattr(config, "model_type", None))
    if options is None or sites_of(model):
        return
    if quiet and all(parameter.is_meta for parameter in model.parameters()):
        return  # a skeleton: its weights come later, and would not be folded
    try:
        patch(model, **options)
    except Exception as error:
        warnings.warn(
            f"{type(model).__name__} was loaded, but could not be patched: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_being_built_in(frame: Any) -> bool:
    """Whether this load is a step in the constructor of a larger model, which goes on to change it.

    Constructors tie weights, draw new ones and are followed by loading: not on patched parts.
    """
    from transformers import PreTrainedModel

    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(
            frame.f_locals.get("self"), PreTrainedModel
        ):
            return True
        frame = frame.f_back
    return False
