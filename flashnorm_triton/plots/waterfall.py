"""A decode step before and after: launches and microseconds, by what the kernels do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashnorm_triton.plots import bars, style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError

Record = Mapping[str, Any]
GROUPS = (
    "norm", "matmul", "attention", "rotary", "activation", "residual", "cache", "copy", "other",
)  # fmt: skip
SAVED = "#0f7b6c"
SMALL = 0.01
"""Changes by less than this part of the larger step are drawn as one, "rest"."""


def figure(sources: Sequence[Source]) -> Figure:
    """A row a source, model, mode, quantization and patched variant: from the stock step's kernels,
    by what each group of kernels saves (green) or adds (red), down to the patched step's; in
    microseconds of kernel time and in launches. Small changes are drawn together.

    Raises ``ResultsError`` when no stock step was profiled beside a patched one.
    """
    pairs = []
    for source, label in zip(sources, labels(sources), strict=True):
        alike: dict[tuple[Any, ...], dict[str, Record]] = {}
        for r in source.measured:
            key = (r["model"], r["mode"], r.get("quantization", "none"), r["batch"], r["dtype"])
            alike.setdefault(key, {})[r["variant"]] = r
        for key, found in alike.items():
            stock = found.pop("stock", None)
            pairs += [(label, key, stock, patched) for patched in found.values() if stock]
    if not pairs:
        raise ResultsError("no stock step was profiled beside a patched one")
    made, axes = style.new(1.95 * len(pairs) + 1.0, len(pairs), 2)
    for (left, right), (label, key, stock, patched) in zip(axes, pairs, strict=True):
        model, mode, quantization, batch, dtype = key
        told = [model, dtype, mode, f"batch {batch}"]
        told += [quantization] if quantization != "none" else []
        told += [label] if len(sources) > 1 else []
        left.set_title(", ".join(told))
        _steps(left, stock, patched, "us", "µs of kernels")
        _steps(right, stock, patched, "launches", "launches")
        took = f"{stock['ms']:.3g} → {patched['ms']:.3g} ms a step"
        right.set_title(took, loc="right", color=style.FAINT)
    style.title(made, "one decode step, from stock to patched: what each group of kernels changes")
    handles = [
        Patch(color=bars.VARIANTS[name][1], label=bars.VARIANTS[name][0])
        for name in ("stock", *dict.fromkeys(patched["variant"] for *_, patched in pairs))
    ]
    handles += [Patch(color=SAVED, label="saved"), Patch(color=style.LOSS, label="added")]
    style.foot(made, sources, handles)
    return made


def changes(stock: Record, patched: Record, unit: str) -> dict[str, float]:
    """group -> patched less stock, of "us" or "launches", for every group that one of them has."""
    before, after = (_by_group(record, unit) for record in (stock, patched))
    known = [*GROUPS, *(set(before) | set(after)) - set(GROUPS)]
    return {
        group: after.get(group, 0) - before.get(group, 0)
        for group in known
        if group in before or group in after
    }


def _by_group(record: Record, unit: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in record["groups"]:
        found[row["group"]] = found.get(row["group"], 0) + row[unit]
    return found


def _steps(ax: Axes, stock: Record, patched: Record, unit: str, label: str) -> None:
    whole = sum(_by_group(stock, unit).values())
    every = changes(stock, patched, unit)
    end = whole + sum(every.values())
    moved = {g: delta for g, delta in every.items() if abs(delta) >= SMALL * max(whole, end)}
    rest = sum(delta for group, delta in every.items() if group not in moved)
    if rest:
        moved["rest"] = rest
    heights = [("stock", 0.0, whole, bars.VARIANTS["stock"][1])]
    at = whole
    for group, delta in moved.items():
        heights.append((group, at, delta, SAVED if delta < 0 else style.LOSS))
        at += delta
    variant = patched["variant"]
    heights.append(("patched", 0.0, end, bars.VARIANTS.get(variant, ("", style.OURS))[1]))
    top = max(start + max(size, 0) for _, start, size, _ in heights)
    for x, (_, start, size, color) in enumerate(heights):
        ax.bar(x, size, 0.72, bottom=start, color=color)
        total = x in (0, len(heights) - 1)
        said = f"{size:,.0f}" if total else f"{size:+,.0f}".replace("-", "−")
        over = max(start, start + size)
        ax.text(x, over + 0.015 * top, said, ha="center", va="bottom", fontsize=style.TINY)
        if x < len(heights) - 1:
            joint = start + size
            ax.plot([x + 0.36, x + 0.64], [joint, joint], color=style.FAINT, linewidth=0.7)
    names = [name for name, *_ in heights]
    ax.set_xticks(range(len(names)), names, fontsize=style.TINY, rotation=28, ha="right",
                  rotation_mode="anchor")  # fmt: skip
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, max(len(names), 5) - 0.3)
    ax.set_ylim(0, 1.13 * top)
    ax.set_ylabel(label)
    ax.grid(axis="y", color=style.GRID, linewidth=0.6)


def totals(sources: Sequence[Source]) -> Figure:
    """Where only whole steps were timed: each contender's launches beside its milliseconds, and the
    least time that its bytes need at the measured copy rate.

    Raises ``ResultsError`` when no contender's launches were counted.
    """
    panels = {
        key: [(at, r) for at, r in rows if not r.get("error") and r.get("launches")]
        for key, rows in bars.panels_of(sources, ("model", "batch", "tokens", "dtype")).items()
    }
    panels = {key: rows for key, rows in panels.items() if rows}
    if not panels:
        raise ResultsError("no contender's launches were counted")
    heights = [len(rows) for rows in panels.values()]
    made, axes = style.new(
        0.26 * sum(heights) + 0.55 * len(panels) + 1.15, len(panels), 2, sharey="row",
        height_ratios=[height + 0.6 for height in heights],
    )  # fmt: skip
    told = labels(sources)
    for (left, right), (key, rows) in zip(axes, panels.items(), strict=True):
        model, batch, tokens, dtype = key
        left.set_title(f"{model}, {dtype}, batch {batch}, {tokens} tokens")
        for y, (at, r) in enumerate(rows):
            for ax, value, said in (
                (left, r["launches"], f" {r['launches']:,}"),
                (right, r["ms"], f" {r['ms']:.2f}"),
            ):
                color = bars.VARIANTS.get(r["variant"], ("", style.OURS))[1]
                ax.barh(y, value, 0.7, color=color, edgecolor="white",
                        hatch=bars.HATCHES[at % len(bars.HATCHES)])  # fmt: skip
                ax.text(value, y, said, va="center", fontsize=style.SMALL)
            if r.get("floor_ms"):
                right.plot([r["floor_ms"]] * 2, [y - 0.42, y + 0.42], color=style.INK, lw=1.2)
        names = [
            f"{r['variant']}  {r['mode']}" + (f"  {told[at]}" if len(sources) > 1 else "")
            for at, r in rows
        ]
        left.set_yticks(range(len(rows)), names)
        left.set_ylim(len(rows) - 0.4, -0.6)
        for ax in (left, right):
            ax.tick_params(axis="y", length=0)
            ax.set_xlim(0, 1.16 * max(ax.get_xlim()[1], 1e-9) / 1.05)
            ax.grid(axis="x", color=style.GRID, linewidth=0.6)
    axes[-1][0].set_xlabel("kernel launches")
    axes[-1][1].set_xlabel("ms of GPU time (line: bytes / copy rate)")
    task = bars.TASKS.get(sources[0].name, sources[0].name)
    style.title(made, f"{task}: launches and time")
    style.foot(made, sources, bars.legend(sources, panels), columns=4)
    return made
