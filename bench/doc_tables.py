"""Writes the tables of docs/overlap.md and docs/staleness.md from bench/results/<gpu>/*.json.

    python bench/doc_tables.py [--gpu nvidia_h200]

What lies between ``<!-- name -->`` and ``<!-- /name -->`` in a page is replaced. A table whose
result file is not there stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from flashnorm_triton import atomic, results

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROWS = (1, 16, 64, 256, 512, 1024, 4096, 8192)
_WAYS = (
    ("gemm_only", "matmul alone"), ("unfused", "norm, matmul"), ("stock", "stock"),
    ("sequential", "one stream"),
)  # fmt: skip
USUAL = ("unit", "perplexity")
_ORDER = (
    "unit", "perplexity", "bits", "float64", "delay", "graph", "lint", "lag", "racecheck",
    "memcheck", "initcheck", "synccheck",
)  # fmt: skip


def overlap_tables(records: Sequence[Mapping[str, Any]]) -> str:
    """One table a shape, dtype and epilogue, then where it pays, in words."""
    good = report.measured(records)
    lines: list[str] = []
    for kind in dict.fromkeys((r["k"], r["n"], r["dtype"], r["epilogue"]) for r in good):
        k, n, dtype, epilogue = kind
        mine = [r for r in good if (r["k"], r["n"], r["dtype"], r["epilogue"]) == kind]
        names = [label for _, label in _WAYS]
        head = ["tokens", *names, "**two streams**", "less than one stream", "less than stock"]
        lines += [f"{k}→{n}, {dtype}{', LayerNorm + bias + GELU' if epilogue else ''}:", ""]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for r in mine:
            if r["m"] in ROWS:
                us = [f"{r['baselines_us'][name]:.1f}" for name, _ in _WAYS]
                less = [f"{100 * r['reduction'][name]:.0f} %" for name in ("sequential", "stock")]
                row = [str(r["m"]), *us, f"**{r['us']:.1f}**", *less]
                lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join([*lines, *_words(good)])


def _words(good: Sequence[Mapping[str, Any]]) -> list[str]:
    pays = [r for r in good if r["speedup_q20"] > 1]
    loses = [r for r in good if r["speedup_q80"] < 1]
    ahead = [r for r in good if r["over"]["chosen"] > 1.02]
    cells = ", ".join(_cell(r, r["over"]["chosen"]) for r in ahead) or "none"
    won = ", ".join(_cell(r, r["speedup"]) for r in pays) or "none"
    host = [r["host_us"] for r in good if r.get("host_us")]
    lines = [
        f"Of {len(good)} cells two streams beat every way without a fused kernel in {len(pays)} "
        f"and lose to the best of those in {len(loses)}. They pay at {won}.",
        "",
        f"Against the plan in use they are ahead by more than 2 % at: {cells}.",
    ]
    if host:
        most = max(each["overlap"] - each["unfused"] for each in host)
        lines += [
            "",
            f"A fork and a join cost the host up to {most:.0f} µs a call more than the unfused "
            "pair, in eager use; in a captured graph nothing.",
        ]
    return lines


def _cell(r: Mapping[str, Any], gain: float) -> str:
    after = " LayerNorm + GELU" if r["epilogue"] else ""
    return f"{r['k']}→{r['n']} {r['dtype']}{after} M = {r['m']} ({gain:.2f}x)"


def faults_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Fault by instrument."""
    from bench.faults import table

    places = {name: place for place, name in enumerate(_ORDER)}
    return table(sorted(records, key=lambda r: places.get(r["instrument"], len(places))))


def missed(records: Sequence[Mapping[str, Any]]) -> str:
    """What one launch and perplexity say of each fault that both pass, and who saw it."""
    cells = {(r["fault"], r["instrument"]): r for r in report.measured(records)}
    lines = []
    for fault in dict.fromkeys(name for name, _ in cells):
        usual = [cells.get((fault, instrument)) for instrument in USUAL]
        seen = [r for (name, _), r in cells.items() if name == fault and r["caught"]]
        if seen and any(r and r["caught"] is False for r in usual):
            passed = "; ".join(
                f"{r['instrument']}: {'misses it' if r['caught'] is False else 'sees it'} "
                f"({r['detail']})"
                for r in usual
                if r and r["caught"] is not None
            )
            others = [r["instrument"] for r in seen if r["instrument"] not in USUAL]
            lines.append(f"- `{fault}`: {passed}. Seen by {', '.join(others) or 'no other'}.")
    return "\n".join(lines)


def lag_table(records: Sequence[Mapping[str, Any]]) -> str:
    """One row a run of bench/lag.py."""
    head = (
        "model", "mode", "watched", "tokens", "steps × sites", "beyond rounding",
        "a lag would show, logits", "sites", "worst / limit", "KL, 1e-4 nats (stock)", "s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for r in records:
        if r.get("error"):
            lines.append(f"| {r['lag']} | {r['mode']} | {r['watched']} | {r['error'][:80]} |")
            continue
        sites = r.get("sites_decidable")
        row = (
            r["lag"], r["mode"], r["watched"], f"{r['tokens']:,}", f"{r['site_steps']:,}",
            r["found"] or "none", f"{100 * r['decidable']:.1f} %",
            "" if sites is None else f"{100 * sites:.1f} %",
            "–" if r["worst"] is None else f"{r['worst']:.2f}",
            "–" if r["kl"] is None else f"{1e4 * r['kl']:.2f} ({1e4 * r['kl_stock']:.2f})",
            f"{r['seconds']:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


# page -> mark -> the result file and what makes a text of its records
PAGES = {
    "overlap.md": {"overlap": ("overlap.json", overlap_tables)},
    "staleness.md": {
        "lag": ("lag.json", lag_table),
        "faults": ("faults.json", faults_table),
        "missed": ("faults.json", missed),
    },
}


def put(page: str, name: str, text: str) -> str:
    """The page with what lies between the marks of that name replaced.

    Raises ValueError when the page has no such marks.
    """
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
    if not marked.search(page):
        raise ValueError(f"the page has no <!-- {name} --> … <!-- /{name} -->")
    return marked.sub(lambda found: f"{found[1]}{text.rstrip()}\n{found[2]}", page)


def rendered(name: str, page: str, folder: Path) -> str:
    """The text of the page of that name with every table whose results are in ``folder``."""
    for mark, (file, render) in PAGES[name].items():
        if (folder / file).exists():
            page = put(page, mark, render(results.load(folder / file).records))
    return page


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="nvidia_h200", help="folder of bench/results")
    args = parser.parse_args(argv)
    for name in PAGES:
        page = (DOCS / name).read_text(encoding="utf-8")
        text = rendered(name, page, ROOT / "bench" / "results" / args.gpu)
        atomic.write_text(DOCS / name, text)
        print(f"written: {DOCS / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
