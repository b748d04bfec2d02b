"""README's table of what is gained and what is not, from the H200's result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from bench.doc_pages.sources import ROOT, Source, table

README = ROOT / "README.md"
BANDS = (
    ("1 row (token)", 1, 1), ("2 to 16 rows", 2, 16), ("32 and 64 rows", 32, 64),
    ("128 to 512 rows", 128, 512), ("1024 to 8192 rows", 1024, 8192),
)  # fmt: skip
WIN, TIE = 1.05, 0.95
MODEL = "llama-3.2-1b"
_BASELINES = (
    ("stock", "stock modules"), ("rms_norm+linear", "`F.rms_norm`"),
    ("triton_norm+linear", "a one-launch Triton norm"), ("liger_norm+linear", "Liger's RMSNorm"),
)  # fmt: skip


def verdict(speedup: float) -> str:
    """The word for a speedup."""
    return "wins" if speedup >= WIN else "ties" if speedup >= TIE else "**loses**"


def gains(operation: Source, decode: Source, generate: Source) -> str:
    """The table, then what its words mean and which files it is of."""
    rows = [*_operation(operation), *_decode(decode), *_generate(generate)]
    head = (f"{operation.header['gpu']}, bf16", "against", "speedup", "")
    return "\n\n".join([table(head, rows), _legend(operation, decode, generate)])


def _operation(source: Source) -> list[Sequence[str]]:
    rows = []
    for name, first, last in BANDS:
        cells = [r["speedup"] for r in source.measured if first <= r["m"] <= last]
        mean, worst = geometric_mean(cells), min(cells)
        told = f"{mean:.2f} ({worst:.2f})"
        rows.append((f"the operation, {name}", "fastest unfused", told, verdict(mean)))
    return rows


def _decode(source: Source) -> list[Sequence[str]]:
    runs = {(r["mode"], r["variant"]): r for r in source.records if _is_shown(r)}
    graph, compiled = "graph", "reduce-overhead"
    rows: list[Sequence[str]] = []
    for name, mode, variant, against in (
        ("decode step, blocks, graph", graph, "block", graph),
        ("decode step, blocks, graph", graph, "block", compiled),
        ("decode step, norms, compiled", compiled, "norm", compiled),
        ("decode step, norms, graph", graph, "norm", compiled),
        ("decode step, blocks, compiled", compiled, "block", compiled),
    ):
        ours, stock = runs.get((mode, variant)), runs.get((against, "stock"))
        if ours is not None and stock is not None:
            rows.append((name, f"stock, {_MODES[against]}", *_stepped(ours, stock, against)))
    return rows


def _is_shown(record: Mapping[str, Any]) -> bool:
    """Of many models and batches the front page has one."""
    return (record["model"], record.get("batch", 1)) == (MODEL, 1)


_MODES = {"graph": "in a CUDA graph", "reduce-overhead": "compiled"}


def _stepped(ours: Mapping[str, Any], stock: Mapping[str, Any], against: str) -> tuple[str, str]:
    if ours.get("error") or stock.get("error"):
        return ours.get("error") or stock["error"], "**loses**" if ours.get("error") else ""
    speedup = ours["speedups"][against]
    launches = f"{stock['launches']} → {ours['launches']} kernels"
    return f"{speedup:.2f} ({stock['ms']:.2f} → {ours['ms']:.2f} ms, {launches})", verdict(speedup)


def _generate(source: Source) -> list[Sequence[str]]:
    runs = {(r["mode"], r["variant"]): r for r in source.measured if _is_shown(r)}
    old = ", older" if source.older else ""
    rows = []
    for mode in ("eager", "compiled"):
        stock, ours = runs[mode, "stock"], runs[mode, "patched"]
        rates = f"{stock['tokens_per_s']:.0f} → {ours['tokens_per_s']:.0f} tokens/s"
        told = f"{ours['speedup']:.2f} ({rates}{old})"
        rows.append(
            (f"`generate`, norms, {mode}", f"stock, {mode}", told, verdict(ours["speedup"]))
        )
    return rows


def _legend(operation: Source, decode: Source, generate: Source) -> str:
    cells = operation.measured
    names = [word for key, word in _BASELINES if all(key in c["baselines_us"] for c in cells)]
    compiled = sum("compiled" in cell["baselines_us"] for cell in cells)
    unfused = sum(cell["plan"]["strategy"] == "unfused" for cell in cells)
    shapes = len({(cell["k"], cell["n"]) for cell in cells})
    step = next(r for r in decode.records if _is_shown(r))
    more = len({(r["model"], r["batch"]) for r in decode.measured}) > 1
    rest = "Other models and batches: [measured](docs/measured.md#whole-models)." if more else ""
    return (
        f"Medians of runs timed in turn, losses included: from {WIN:.2f} on it wins, below "
        f"{TIE:.2f} it loses. The operation: geometric mean of {shapes} layers (in brackets the "
        f"worst cell); unfused is the fastest of {', '.join(names)} and (in {compiled} of the "
        f"{len(cells)} cells) `torch.compile`, each with the library's matmul. Where it "
        "ties, that matmul is "
        f"hard to beat: {unfused} of the cells run unfused, which was fastest "
        f"({operation.cite(README)}). Steps: Llama-3.2-1B's shape, batch {step['batch']}, static "
        f"cache of {step['tokens']} places ({decode.cite(README)}); `generate`: a dynamic cache "
        f"where eager ({generate.cite(README)}). "
        + (rest or "Other models, batches and GPUs are not measured yet.")
    )
