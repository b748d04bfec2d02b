"""Whole models as bars: GPU time of a decode step or a prompt, tokens a second of ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
Rows = Sequence[tuple[int, Record]]
VARIANTS = {
    "stock": ("stock", style.STOCK),
    "norm": ("patched, norms", "#5aa2e6"),
    "block": ("patched, whole blocks", style.OURS),
    "patched": ("patched", style.OURS),
}
HATCHES = ("", "///", "...", "xxx", "\\\\\\")
TASKS = {"decode": "one decode step", "prefill": "one prompt"}


def steps(sources: Sequence[Source]) -> Figure:
    """Milliseconds of GPU time, a panel for each model, batch and number of tokens, a bar for each
    variant, mode and source, with its 20–80 % band; the ratios to stock in the same mode and to the
    fastest stock, in red where stock is faster.

    What failed or gave other logits has no bar, and says so. Raises ``ResultsError`` when nothing
    was measured.
    """
    if not any(source.measured for source in sources):
        raise ResultsError("no record has a time: every contender failed or disagreed")
    panels = panels_of(sources, ("model", "batch", "tokens", "dtype"))
    made, axes = _stack(panels)
    for ax, ((model, batch, tokens, dtype), rows) in zip(axes, panels.items(), strict=True):
        _panel(
            ax,
            sources,
            rows,
            "ms",
            lambda r: f"{r['ms']:.{2 if r['ms'] < 10 else 1}f} ms",
            _ratios_of_step,
        )
        ax.set_title(f"{model}, {dtype}, batch {batch}, {tokens} tokens")
    axes[-1].set_xlabel("milliseconds of GPU time (less is better)")
    task = TASKS.get(sources[0].name, sources[0].name)
    style.title(made, f"{task}: stock and patched")
    style.foot(made, sources, legend(sources, panels), columns=4)
    return made


def generate(sources: Sequence[Source]) -> Figure:
    """Tokens a second, a panel a model and call, a bar for each mode, variant and source, with its
    20–80 % band and its ratio to stock in the same mode.

    A variant that failed or disagreed has no bar, and says so. Raises ``ResultsError`` when there
    is nothing to draw.
    """
    if not any(source.measured for source in sources):
        raise ResultsError("no record has a speed: every model failed or disagreed")
    whole = panels_of(sources, ("model", "batch", "prompt", "new_tokens", "dtype"))
    # A record that failed may know its model alone.
    panels = {key: rows for key, rows in whole.items() if any(not r.get("error") for _, r in rows)}
    for key, rows in whole.items():
        if key not in panels:
            home = next((k for k in panels if k[0] == key[0]), next(iter(panels)))
            panels[home] = _ordered([*panels[home], *rows])
    made, axes = _stack(panels)
    for ax, ((model, batch, prompt, new, dtype), rows) in zip(axes, panels.items(), strict=True):
        _panel(
            ax, sources, rows, "tokens_per_s", lambda r: f"{r['tokens_per_s']:.0f} tok/s",
            lambda r, _: {r["mode"]: r["speedup"]} if r.get("speedup") else {},
        )  # fmt: skip
        call = f", batch {batch}, {prompt} + {new} tokens" if prompt else ""
        ax.set_title(", ".join(part for part in (model, dtype) if part) + call)
    axes[-1].set_xlabel("tokens a second (more is better)")
    style.title(made, "generate: stock and patched, random weights")
    style.foot(made, sources, legend(sources, panels), columns=4)
    return made


def panels_of(sources: Sequence[Source], keys: Sequence[str]) -> dict[tuple[Any, ...], Rows]:
    """(number of the source, record) of everything that is alike in ``keys``."""
    found: dict[tuple[Any, ...], list[tuple[int, Record]]] = {}
    for number, source in enumerate(sources):
        for record in source.records:
            found.setdefault(tuple(record.get(key, "") for key in keys), []).append(
                (number, record)
            )
    return {key: _ordered(rows) for key, rows in found.items()}


def _ordered(rows: Rows) -> Rows:
    """By contender as they come first, the sources of a contender beside each other."""
    contenders = list(dict.fromkeys((r["mode"], r["variant"]) for _, r in rows))
    return sorted(rows, key=lambda row: contenders.index((row[1]["mode"], row[1]["variant"])))


def _stack(panels: Mapping[tuple[Any, ...], Rows]) -> tuple[Figure, list[Axes]]:
    heights = [len(rows) for rows in panels.values()]
    made, axes = style.new(
        0.28 * sum(heights) + 0.5 * len(panels) + 1.15, len(panels), 1,
        height_ratios=[height + 0.6 for height in heights],
    )  # fmt: skip
    return made, list(axes.ravel())


def _panel(
    ax: Axes,
    sources: Sequence[Source],
    rows: Rows,
    value: str,
    said: Callable[[Record], str],
    ratios: Callable[[Record, Rows], Mapping[str, float]],
) -> None:
    most = max((r[value] for _, r in rows if not r.get("error")), default=1.0)
    told = labels(sources)
    for y, (number, record) in enumerate(rows):
        if record.get("error"):
            ax.text(0, y, f" not reported: {_short(record['error'])}", color=style.LOSS,
                    va="center", fontsize=style.SMALL)  # fmt: skip
            continue
        width = record[value]
        bar = ax.barh(y, width, 0.7, color=VARIANTS.get(record["variant"], ("", style.OURS))[1])
        bar[0].set_hatch(HATCHES[number % len(HATCHES)])
        bar[0].set_edgecolor("white")
        low, high = _band(record, value)
        ax.plot([low, high], [y, y], color=style.INK, linewidth=1.2, solid_capstyle="butt")
        launched = f", {record['launches']} kernels" if record.get("launches") else ""
        last = ax.text(
            min(max(width, high), 1.25 * most) + 0.01 * most, y, said(record) + launched,
            va="center", fontsize=style.SMALL, bbox=style.PLATE,
        )  # fmt: skip
        for against, ratio in ratios(record, [row for row in rows if row[0] == number]).items():
            last = ax.annotate(
                f"{ratio:.2f}x stock {against}", (1, 0.5), xycoords=last, xytext=(7, 0),
                textcoords="offset points", va="center", fontsize=style.SMALL,
                color=style.LOSS if ratio < 1 else style.OURS, bbox=style.PLATE,
            )  # fmt: skip
    alone = len(sources) == 1
    names = [f"{r['variant']}  {r['mode']}" + ("" if alone else f"  {told[at]}") for at, r in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, (1.9 if alone else 2.5) * most)
    ax.grid(axis="x", color=style.GRID, linewidth=0.6)


def _band(record: Record, value: str) -> tuple[float, float]:
    """The 20–80 % band of a value, which is milliseconds or something a second."""
    at, q20, q80 = record["ms"], record.get("ms_q20"), record.get("ms_q80")
    if not q20 or not q80:
        return record[value], record[value]
    if value == "ms":
        return q20, q80
    return record[value] * at / q80, record[value] * at / q20


def _ratios_of_step(record: Record, rows: Rows) -> dict[str, float]:
    """To stock in the same mode, where it was timed, and to the fastest stock."""
    stock = [r for _, r in rows if r["variant"] == "stock" and not r.get("error")]
    fastest = min(stock, key=lambda r: r["ms"], default=None)
    wanted = [record["mode"], *([fastest["mode"]] if fastest else [])]
    found = record.get("speedups") or {}
    shown = {mode: found[mode] for mode in dict.fromkeys(wanted) if mode in found}
    return shown or dict(found)


def _short(error: str, most: int = 60) -> str:
    line = error.splitlines()[0]
    return line if len(line) <= most else line[: most - 1] + "…"


def legend(sources: Sequence[Source], panels: Mapping[tuple[Any, ...], Rows]) -> list[Patch]:
    """A patch a variant that is there, and a hatch a source where there are several."""
    there = {r["variant"] for rows in panels.values() for _, r in rows}
    handles = [Patch(color=color, label=label) for name, (label, color) in VARIANTS.items()
               if name in there]  # fmt: skip
    if len(sources) > 1:
        handles += [
            Patch(facecolor=style.STOCK, edgecolor="white", hatch=HATCHES[at % len(HATCHES)],
                  label=label)
            for at, label in enumerate(labels(sources))
        ]  # fmt: skip
    return handles
