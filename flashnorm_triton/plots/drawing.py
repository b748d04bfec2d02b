"""Which figures fit which sources, and writing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from flashnorm_triton.plots import (
    bars,
    breakdown,
    ladder,
    overlap,
    paper,
    roofline,
    share,
    speedup,
    style,
    waterfall,
    winners,
)
from flashnorm_triton.plots import sources as source_files
from flashnorm_triton.plots.sources import Source
from flashnorm_triton.results import ResultsError

Draw = Callable[[Sequence[Source]], Figure]
FAMILIES: dict[str, tuple[tuple[str, Draw], ...]] = {
    "operation": (
        ("", speedup.figure),
        ("_breakdown", breakdown.figure),
        ("_winners", winners.figure),
        ("_roofline", roofline.figure),
    ),
    "table": (("_winners", winners.figure),),
    "overlap": (("", overlap.figure),),
    "step": (("", bars.steps), ("_launches", waterfall.totals)),
    "generate": (("", bars.generate),),
    "profile": (("_waterfall", waterfall.figure), ("_norm_share", share.figure)),
    "ablation": (("", ladder.figure),),
    "paper": (("", paper.figure),),
}
"""The figures of each kind of source: what follows the file's name, and what draws it."""


def figures(
    sources: Sequence[Source], say: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every family that fits sources of one kind, in the style of the project.

    A family that finds nothing to draw is told to ``say``; ``ResultsError`` when all do.
    """
    drawn, kind = 0, sources[0].kind
    reasons = []
    for suffix, family in FAMILIES[kind]:
        name = sources[0].name + suffix
        try:
            with style.use():
                figure = family(sources)
        except ResultsError as error:
            reasons.append(f"not drawn: {name}: {error}")
            continue
        drawn += 1
        yield name, figure
    if not drawn:
        raise ResultsError("\n  ".join(reasons))
    for reason in reasons:
        say(reason)


def origin(sources: Sequence[Source]) -> str:
    """What a figure was drawn from, as it is kept in its files."""
    return ", ".join(
        f"{source.path.name if source.path else source.name} sha256:{source.digest}"
        for source in sources
    )


def draw(paths: Iterable[str | Path], out: Path, say: Callable[[str], None]) -> list[Path]:
    """``flashnorm_triton.plots.draw``."""
    groups, notes = source_files.gather(paths)
    written: list[Path] = []
    for note in notes:
        say(note)
    for note in source_files.stale_notes(groups):
        say(note)
    failed = []
    for group in groups:
        try:
            for name, figure in figures(group, say):
                written += style.save(figure, out / f"{name}.svg", origin=origin(group))
        except ResultsError as error:
            failed.append(str(error))
    if not written:
        raise ResultsError("\n  ".join(failed))
    for line in failed:
        say(line)
    return written
