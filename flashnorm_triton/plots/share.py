"""What the norms take of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashnorm_triton.plots import style
from flashnorm_triton.plots.sources import Source, labels
from flashnorm_triton.results import ResultsError


def figure(sources: Sequence[Source]) -> Figure:
    """A panel a source, model, batch and dtype; a bar a variant, mode and quantization: the share
    of the kernels' time that is spent in norms, beside how many norms a step has and how many
    launches they are.

    A contender that was not measured has no bar, and says so. Raises ``ResultsError`` when no share
    was measured.
    """
    panels: dict[tuple[str, ...], list] = {}
    for source, label in zip(sources, labels(sources), strict=True):
        for r in source.records:
            key = (label, r["model"], str(r["batch"]), r["dtype"])
            panels.setdefault(key, []).append(r)
    rated = [r for rows in panels.values() for r in rows if _share(r) is not None]
    if not rated:
        raise ResultsError("no record has the norms' share of a step")
    heights = [len(rows) for rows in panels.values()]
    made, axes = style.new(
        0.27 * sum(heights) + 0.5 * len(panels) + 1.15, len(panels), 1, sharex=True,
        height_ratios=[height + 0.6 for height in heights],
    )  # fmt: skip
    most = 100 * max(_share(r) for r in rated)
    for ax, ((label, model, batch, dtype), rows) in zip(axes.ravel(), panels.items(), strict=True):
        for y, r in enumerate(rows):
            share = _share(r)
            if share is None:
                why = str(r.get("error") or "no kernel time").splitlines()[0]
                ax.text(0, y, f" not reported: {why[:70]}", color=style.LOSS, va="center",
                        fontsize=style.SMALL)  # fmt: skip
                continue
            ax.barh(
                y, 100 * share, 0.7, color=style.STOCK if r["variant"] == "stock" else style.OURS
            )
            launches = r.get("norm_launches")
            told = f" {100 * share:.1f} %   {r['norms']} norms"
            told += f" in {launches} launches" if launches is not None else ""
            told += f", {1e3 * r['norm_ms']:.0f} µs of {r['ms']:.2f} ms, {r['launches']} launches"
            ax.text(100 * share, y, told, va="center", fontsize=style.SMALL)
        names = [_name(r) for r in rows]
        ax.set_yticks(range(len(rows)), names)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_xlim(0, 2.6 * most)
        told = [model, dtype, f"batch {batch}", label if len(sources) > 1 else ""]
        ax.set_title(", ".join(part for part in told if part))
        ax.grid(axis="x", color=style.GRID, linewidth=0.6)
    axes[-1, 0].set_xlabel("norms, % of the kernels' time of a step")
    style.title(made, "what the norms take of a decode step")
    handles = [Patch(color=style.STOCK, label="stock"), Patch(color=style.OURS, label="patched")]
    style.foot(made, sources, handles)
    return made


def _share(record) -> float | None:
    return None if record.get("error") else record.get("norm_share")


def _name(record) -> str:
    quantization = record.get("quantization", "none")
    parts = (record["variant"], record["mode"], "" if quantization == "none" else quantization)
    return "  ".join(part for part in parts if part)
