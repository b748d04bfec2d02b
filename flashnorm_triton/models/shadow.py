"""A weightless double of a model, and one forward pass through it.

The double has the model's own classes, attributes and configuration, but every parameter and buffer
is a fake tensor: shapes and dtypes without memory. Running it tells how data flows, whatever device
(meta included) the model is on, and leaves the model, its hooks and its caches alone.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashnorm_triton.models.examples import BATCH, accepted_arguments
from flashnorm_triton.models.integers import real

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


_logging_lock = threading.Lock()
_found_disabled: list[bool] = []  # one entry for each run that goes on


class SharedFakes(FakeTensorMode):
    """A fake tensor mode that a deep copy of one of its tensors shares.

    ``copy.deepcopy`` of a fake tensor copies the mode too, and of the mode's weak references to the
    storages of constants the bare address: each is given up once too often and memory that has been
    freed is written to, which crashes the process later, anywhere. A model's code may well copy
    tensors (a cache's layers, say). A copy with another mode could not be computed with, either.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakes:
        return self


class _Nothing:
    """Stands where the model holds something that the double must not copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return self


def make_shadow(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """The double of ``model``, in evaluation mode, hooks left out. The model is only read.

    Raises whatever copying one of the model's attributes raises.
    """
    memo: dict[int, Any] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        with fakes:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(stand_in(parameter), requires_grad=False)
        loose = [value for value in vars(module).values() if isinstance(value, Tensor)]
        for tensor in [*module._buffers.values(), *loose]:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = stand_in(tensor)
        for tensor in [*module._parameters.values(), *module._buffers.values(), *loose]:
            if isinstance(tensor, FakeTensor):  # a mode must not be copied: see SharedFakes
                memo[id(tensor.fake_mode)] = tensor.fake_mode
        for name in (*HOOK_TABLES, *HOOK_OPTIONS):
            table = getattr(module, name, None)
            if table is not None:
                memo[id(table)] = OrderedDict()
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            memo[id(hook)] = _Nothing()
    with torch.device("cpu"):
        double = copy.deepcopy(model, memo)
    for module in double.modules():
        for replaced in ("forward", "_old_forward", "_output_capturing_hooks_installed"):
            vars(module).pop(replaced, None)
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
    config = getattr(double, "config", None)
    for choice in ("_attn_implementation", "_experts_implementation"):
        # Any attention will do for following norms; the eager forms are torch operations only.
        if hasattr(config, choice):
            setattr(config, choice, "eager")
    return double.eval()


def run_once(
    shadow: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    options: Mapping[str, Any],
    visit_output: Callable[[Any], None],
    decode: bool,
) -> None:
    """Run the double over a few tokens and, for ``decode``, with its cache over one token more.

    To be called under a fake tensor mode. ``inputs`` are keyword (mapping) or positional (tuple)
    arguments, ``options`` keyword arguments beside them. ``visit_output`` is shown what each of the
    passes returned.
    """
    if not isinstance(inputs, Mapping):
        visit_output(shadow(*inputs))
        return
    result = shadow(**inputs, **options)
    visit_output(result)
    takes = accepted_arguments(shadow)
    for name in ("cache", "past_key_values"):
        if not decode or name not in takes or not isinstance(result, Mapping):
            continue
        cache = result.get(name)
        key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        if cache is not None and key in inputs:
            one_more = {**inputs, key: torch.zeros(BATCH, 1, dtype=torch.long)}
            visit_output(shadow(**one_more, **options, **{name: cache}))
            return


def options_of(shadow: nn.Module, example_inputs: Any = None) -> list[dict[str, Any]]:
    """Options to run the double with: as much as it may have to say, then less, then nothing.

    Those that ``example_inputs`` name are left to them; positional ones are all that is given.
    """
    if isinstance(example_inputs, tuple):
        return [{}]
    takes = accepted_arguments(shadow)
    choices: list[dict[str, Any]] = [
        {"use_cache": True, "output_hidden_states": True},
        {"use_cache": False, "output_hidden_states": True},
        {"use_cache": False},
        {},
    ]
    takes_all = "kwargs" in takes and hasattr(shadow, "config")
    named = set(example_inputs or ())
    kept = [
        {k: v for k, v in c.items() if (k in takes or takes_all) and k not in named}
        for c in choices
    ]
    return [choice for index, choice in enumerate(kept) if choice not in kept[:index]]


def faked(example_inputs: Any, keep: Callable[[Tensor], bool] | None = None) -> Any:
    """The example inputs with fake tensors for the real ones. Under a fake tensor mode.

    Those that ``keep`` says stay, copied to the CPU.
    """

    def stand_in(tensor: Tensor) -> Tensor:
        if keep is not None and keep(tensor):
            return real(lambda: tensor.detach().to("cpu", copy=True))
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    return torch.utils._pytree.tree_map_only(Tensor, stand_in, example_inputs)


@contextmanager
def without_logging() -> Iterator[None]:
    """Fake tensors log each failure with its traceback; here a failure is an answer.

    The logger is the process's: of several threads that trace, the last puts it back.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with _logging_lock:
        _found_disabled.append(_found_disabled[0] if _found_disabled else logger.disabled)
        logger.disabled = True
    try:
        yield
    finally:
        with _logging_lock:
            before = _found_disabled.pop()
            if not _found_disabled:
                logger.disabled = before
