"""docs/pictures.md: every committed figure with what it shows."""

from __future__ import annotations

from pathlib import Path

from bench.doc_pages.sources import ROOT

FIGURES = ROOT / "bench" / "figures"
# How the name of a figure ends (or begins) -> what it shows; the longest that fits.
SHOWN = {
    "norm_linear": "Speedup of the fused operation over the fastest unfused way, by tokens; below "
    "1 it loses. Dashed: what a free norm would give.",
    "_breakdown": "Where the operation's time goes: the bare matmul, what an unfused norm adds, "
    "the fused one.",
    "_winners": "Which plan serves which cell, and what it gains, by rows and shape.",
    "_roofline": "Achieved TFLOP/s and TB/s against what the GPU was measured to reach.",
    "_waterfall": "A decode step before and after: launches and µs, by what the kernels do.",
    "_norm_share": "What the norms take of a decode step.",
    "_launches": "Kernels of a decode step, stock and patched.",
    "overlap": "The matmul beside the statistics against every other way, by tokens "
    "([overlap.md](overlap.md)).",
    "decode": "GPU time of one decode step, stock and patched.",
    "prefill": "GPU time of a prompt, stock and patched.",
    "generate": "Tokens a second of `generate`, stock and patched.",
    "ablation": "What each rung of the ladder gives, from stock to whole blocks.",
    "paper": "The paper's cells beside ours: the share of the time that fusing saves.",
    "lag": "A clean run of the lag detector: no step is nearer to the step before "
    "([staleness.md](staleness.md)).",
    "lag_fault": "One late scale in 600 steps, planted and found ([staleness.md](staleness.md)).",
}  # fmt: skip


def pictures(folder: Path = FIGURES) -> str:
    """Every PNG below a folder, GPU by GPU, with its caption and its file as SVG."""
    parts = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        parts.append(f"## {place.name}\n")
        for path in sorted(place.glob("*.png")):
            link = f"../bench/figures/{place.name}/{path.stem}"
            shown = caption(path.stem)
            parts.append(
                f"**{path.stem}** ([SVG]({link}.svg)). {shown}\n\n![{path.stem}]({link}.png)\n"
            )
    return "\n".join(parts)


def caption(name: str) -> str:
    """What a figure of that name shows; raises ValueError for one that nothing is said of."""
    fitting = [part for part in SHOWN if part[0] == "_" and name.endswith(part)]
    fitting = fitting or [part for part in SHOWN if name.startswith(part)]
    if not fitting:
        raise ValueError(f"bench/doc_pages/pictures.py does not say what {name} shows")
    return SHOWN[max(fitting, key=len)]
