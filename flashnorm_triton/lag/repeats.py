"""How much a text repeats itself: what the eye notices of a lagging model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Repeats:
    """Of a text of tokens. ``distinct``: n -> different n-grams over all n-grams (1: none occurs
    twice); ``longest_run``: most times in a row that one block of up to 64 tokens stands, in
    tokens covered by it beyond its first occurrence; ``doubled``: share of tokens equal to the one
    before them (a lag of one step says things twice)."""

    distinct: dict[int, float]
    longest_run: int
    doubled: float

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        return {**asdict(self), "distinct": {str(n): rate for n, rate in self.distinct.items()}}


def repeats(texts: Sequence[Sequence[int]], sizes: Sequence[int] = (1, 2, 4, 8)) -> Repeats:
    """The figures of texts that do not run on into one another; the longest run of them all."""
    distinct = {}
    for n in sizes:
        grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
        distinct[n] = len(set(grams)) / len(grams) if grams else 1.0
    pairs = sum(max(len(text) - 1, 0) for text in texts)
    doubled = sum(a == b for text in texts for a, b in zip(text, text[1:], strict=False))
    runs = [_longest_run(text) for text in texts]
    return Repeats(distinct, max(runs, default=0), doubled / pairs if pairs else 0.0)


def _longest_run(text: Sequence[int], longest_period: int = 64) -> int:
    """The most tokens in a row that each equal the token one period before, over all periods."""
    best = 0
    for period in range(1, min(longest_period, len(text) - 1) + 1):
        run = 0
        for now, before in zip(text[period:], text, strict=False):
            run = run + 1 if now == before else 0
            best = max(best, run)
    return best
