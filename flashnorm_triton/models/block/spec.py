"""What is known of a layer that has been proven to be a decoder block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NormUse:
    """An RMS norm inside a block: its path, eps and how its class uses the gain."""

    path: str
    eps: float
    convention: str


@dataclass(frozen=True)
class AttentionSpec:
    """norm -> q, k, v -> [norms of the heads] -> rotary -> cache -> attention -> output.

    Paths are relative to the layer. ``rope`` is one of ``tables.ROPES`` or None; ``growth`` the
    numbers of ``tables.growth`` that queries are multiplied with, or None; ``constants`` are
    the keyword arguments that the attention function is always given, ``owned`` those that are
    parameters of the module that calls it (their names in it beside them), ``passes`` the layer's
    arguments that it is handed under their own names; ``post`` the norm of what the half adds, and
    ``scale`` the number that is multiplied with it. ``update_kwargs``: the cache's update is also
    given the passed arguments, under this name, but for the ``withheld`` ones, and
    ``update_constants`` among them.
    """

    norm: str
    q_norm: NormUse | None
    k_norm: NormUse | None
    heads: int
    kv_heads: int
    head_dim: int
    rope: str | None
    growth: tuple[float, float] | None
    attention: str
    layer_index: int | None
    constants: tuple[tuple[str, Any], ...]
    owned: tuple[tuple[str, str], ...]
    passes: tuple[str, ...]
    update_kwargs: str | None
    withheld: tuple[str, ...]
    update_constants: tuple[tuple[str, Any], ...]
    output: str
    post: NormUse | None
    scale: float


@dataclass(frozen=True)
class MlpSpec:
    """norm -> gate, up -> activation(gate) * up -> down; without a gate: activation(up) -> down."""

    norm: str
    activation: str | None
    gated: bool
    down: str
    post: NormUse | None
    scale: float


@dataclass(frozen=True)
class RestSpec:
    """norm -> a module of the layer's own, called as it is (a mixture of experts) -> the sum.

    ``in_tuple``: what is added is the first of what the module returns.
    """

    norm: str
    module: str
    in_tuple: bool
    post: NormUse | None
    scale: float


@dataclass(frozen=True)
class BlockSpec:
    """A layer: the names of the arguments it is called with, and its two halves.

    ``rotary`` is the width of the tables (cos, sin) that it is given as ``angles``.
    """

    cache: str | None
    mask: str | None
    angles: str | None
    rotary: int
    attention: AttentionSpec
    mlp: MlpSpec | RestSpec

    @property
    def packed(self) -> tuple[str, ...]:
        """The norms that emit the packed outputs of their linears, relative to the layer."""
        norms = self.attention.norm, self.mlp.norm
        return norms if isinstance(self.mlp, MlpSpec) else norms[:1]
