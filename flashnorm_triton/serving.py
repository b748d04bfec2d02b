"""Patching inside a serving engine that loads Hugging Face modules and drives them by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from flashnorm_triton.models import PatchHandle, patch
from flashnorm_triton.models.report import AuditReport


class PatchAfterLoad:
    """Wraps an engine's own loader, so that every model that it loads comes out patched.

    An engine that runs layers by hand (``layer.input_layernorm(h)``, then
    ``layer.self_attn.q_proj(...)``) keeps working: after the patch the norm's module hands its
    linears what they need, module by module, and each returns what the stock module returned.

    Args:
        load: the engine's loader; whatever its arguments, it returns a torch module with its
            weights in place, or an object that holds one as its attribute ``attribute``.
        attribute: where in what ``load`` returns the module is; None: it is the module.
        options: keyword arguments of :func:`flashnorm_triton.patch`.

    ``handles`` are those of the models loaded so far, in order; :meth:`revert` undoes them all.
    """

    def __init__(
        self,
        load: Callable[..., Any],
        *,
        attribute: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._load = load
        self._attribute = attribute
        self._options = dict(options or {})
        self.handles: list[PatchHandle] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the engine's loader returns, patched.

        Raises TypeError when that holds no torch module, and whatever the loader or ``patch``
        raises; then the engine gets nothing, rather than a model that is half patched.
        """
        loaded = self._load(*args, **kwargs)
        model = loaded if self._attribute is None else getattr(loaded, self._attribute)
        if not isinstance(model, nn.Module):
            where = "" if self._attribute is None else f" in its attribute {self._attribute!r}"
            raise TypeError(f"the loader returned no torch module{where}: {type(model).__name__}")
        self.handles.append(patch(model, **self._options))
        return loaded

    def reports(self) -> list[AuditReport]:
        """What was done to each model."""
        return [handle.report for handle in self.handles]

    def revert(self) -> None:
        """Give every loaded model its stock modules back."""
        for handle in self.handles:
            handle.revert()
        self.handles.clear()
