"""Which architectures gain from patching, and how much: an audit of every family that is tested.

Question: of a model of this type, how many norms are fused, in which form, and how many kernel
launches does a layer save in an eager decode step? Each family is built small (two layers; random
weights in bf16) and audited; nothing is computed. A model of full size has the same sites a layer.

    python bench/architectures.py           # writes results/cpu/architectures.json and the page
    python bench/architectures.py --page    # writes docs/architectures.md from the results alone

Takes a minute or two. Exit: 0.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnorm_triton import atomic

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "cpu" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
_BEGIN, _END = "<!-- table: bench/architectures.py -->\n", "<!-- end of table -->\n"
_LAYER = re.compile(r"^.*?\.\d+(?=\.)")


def record(name: str, report: Any) -> dict[str, Any]:
    """One row: what an audit found in a model of type ``name``."""
    layers = {m.group() for site in report.sites if (m := _LAYER.match(site.norm))}
    inside = sum(site.launches_saved for site in report.sites if _LAYER.match(site.norm))
    return {
        "type": name,
        "kinds": sorted({site.kind for site in report.sites}),
        "norms": len(report.sites),
        "fused": len(report.fused),
        "forms": dict(sorted(Counter(site.form for site in report.fused).items())),
        "norm_only": len(report.decided("norm_only")),
        "kept": len(report.kept),
        "layers": len(layers),
        "saved_per_layer": round(inside / len(layers), 1) if layers else 0.0,
        "saved_outside": report.launches_saved - inside,
    }


def measure() -> dict[str, Any]:
    """Audit all families of tests/family_table.py that this release of transformers knows."""
    import torch
    import transformers
    from family_table import FAMILIES, WITHOUT_SITES, build, inputs_of

    import flashnorm_triton as fn

    records: dict[str, dict[str, Any]] = {}
    for family in [*FAMILIES, *WITHOUT_SITES]:
        if family.name in records:
            continue
        try:
            model = build(family, torch.bfloat16)
        except LookupError:
            continue
        example = None if family.inputs is None else inputs_of(family)
        if example is not None:
            example = {k: v.bfloat16() if v.is_floating_point() else v for k, v in example.items()}
        records[family.name] = record(family.name, fn.audit(model, example_inputs=example))
        print(f"{family.name}: {records[family.name]}", flush=True)
    rows = sorted(records.values(), key=lambda row: row["type"])
    return {"torch": torch.__version__, "transformers": transformers.__version__, "types": rows}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| type | norm | norms | fused | as one launch | kept | launches saved a layer | outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forms = ", ".join(f"{count} {form}" for form, count in row["forms"].items()) or "0"
        lines.append(
            f"| {row['type']} | {', '.join(row['kinds'])} | {row['norms']} | {forms} | "
            f"{row['norm_only']} | {row['kept']} | {row['saved_per_layer']:g} | "
            f"{row['saved_outside']} |"
        )
    return "\n".join(lines) + "\n"


def page(text: str, results: Mapping[str, Any]) -> str:
    """The page's text with its table made anew."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    told = f"{len(results['types'])} types of transformers {results['transformers']}:\n\n"
    return before + _BEGIN + told + table(results["types"]) + _END + after


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="only renew the page")
    if not parser.parse_args(argv).page:
        atomic.write_text(RESULTS, json.dumps(measure(), indent=1) + "\n")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    atomic.write_text(PAGE, page(PAGE.read_text(encoding="utf-8"), found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
