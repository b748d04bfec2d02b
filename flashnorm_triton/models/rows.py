"""Declarative rows: what the data flow of one forward cannot tell.

Rows match module and consumer names by shape, not model types. Each says why in its reason, which
the report repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


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
