"""Declarative rows: what the data flow of one forward cannot tell.

Rows match names and the shapes of parameters, not model types. Each says why in its reason, which
the report repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """Norms whose path matches ``norm`` and that are read by a module matching ``consumer``."""

    norm: str
    consumer: str
    reason: str

    def matches(self, norm: str, consumers: Iterable[str]) -> bool:
        """Whether the row speaks of this norm and one of its consumers."""
        return bool(re.search(self.norm, norm)) and any(
            re.search(self.consumer, consumer) for consumer in consumers
        )


NEVER_FUSED = (
    Row(
        r"(^|\.)kv_a_(layer)?norm$",
        r"(^|\.)kv_b_proj$",
        "the normed latent is what a compressed cache holds: it is never fused into kv_b_proj",
    ),
)


@dataclass(frozen=True)
class UnseenRow:
    """A module whose code needs data that a trace has not: what its parameters say it does."""

    kind: str
    weight: str
    reason: str

    def fits(self, module: nn.Module, x: Tensor | None) -> bool:
        """Whether ``module`` has such a weight, [E, N, K], and was called with rows of length K."""
        weight = module._parameters.get(self.weight)
        return (
            x is not None
            and weight is not None
            and weight.dim() == 3
            and tuple(x.shape[-1:]) == tuple(weight.shape[-1:])
        )

    def output_shape(self, module: nn.Module, x: Tensor) -> tuple[int, ...]:
        """The shape of what the module returns for ``x``."""
        return (*x.shape[:-1], module._parameters[self.weight].shape[1])


UNSEEN = (
    UnseenRow(
        "experts",
        "weight",
        "taken to multiply its rows with its 3-D weight, as its shape says",
    ),
)
