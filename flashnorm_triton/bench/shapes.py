"""The named shapes and row counts of the benchmarks.

A shape is one norm → linear site of a published model with its consumers packed: ``qkv`` is
q | k | v, ``gate_up`` is gate | up. K is the hidden size, N the packed output features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """x (M, k) by weight (n, k), as in ``nn.Linear``."""

    case: str
    k: int
    n: int

    @property
    def label(self) -> str:
        return f"{self.k}→{self.n}"


SHAPES = (
    Shape("smollm2-135m.qkv", 576, 960),
    Shape("smollm2-135m.gate_up", 576, 3072),
    Shape("llama-3.2-1b.qkv", 2048, 3072),
    Shape("llama-3.2-1b.gate_up", 2048, 16384),
    Shape("llama-3.1-8b.qkv", 4096, 6144),
    Shape("llama-3.1-8b.gate_up", 4096, 28672),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_TOKENS = (1, 4, 16, 256)
# float16 is served by the same kernels: a part of the cells says whether it keeps the contract.
FP16_SHAPES = (SHAPES[1], SHAPES[2], SHAPES[4])
FP16_TOKENS = (1, 4, 16, 64, 512, 2048)


def parse_shapes(names: Iterable[str]) -> tuple[Shape, ...]:
    """Shapes by name (``llama-3.2-1b.qkv``), by size (``2048x3072``, or ``2048:3072`` as the tuner
    takes it, is K=2048, N=3072), or by a size with a name of its own (``mine.qkv=2048x3072``).

    Raises ValueError for a word that is neither, listing the names.
    """
    known = {shape.case: shape for shape in SHAPES}
    sizes = {f"{shape.k}x{shape.n}": shape for shape in SHAPES}
    chosen = []
    for word in names:
        own, equals, size = word.rpartition("=")
        name = (size if equals else word).replace(":", "x")
        k, times, n = name.partition("x")
        if name in known and not equals:
            chosen.append(known[name])
        elif name in sizes and not own:
            chosen.append(sizes[name])
        elif times and k.isdigit() and n.isdigit() and int(k) and int(n):
            chosen.append(Shape(own or name, int(k), int(n)))
        else:
            raise ValueError(
                f"unknown shape {word!r}: use one of {', '.join(known)}, or KxN such as 2048x3072"
            )
    return tuple(chosen)


def parse_tokens(words: Iterable[str]) -> tuple[int, ...]:
    """Row counts M from words; ValueError unless each is a positive whole number."""
    tokens = []
    for word in words:
        if not word.isdigit() or not int(word):
            raise ValueError(f"{word!r} is no number of tokens: give whole numbers from 1")
        tokens.append(int(word))
    return tuple(tokens)
