"""Writes the parts of README and docs/ that come from result files and from the code.

    python bench/doc_tables.py [--gpu nvidia_h200]

What lies between ``<!-- name -->`` and ``<!-- /name -->`` in a page is replaced; a test holds every
page to it. A part whose result file is not there stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.doc_pages import (
    cancel,
    code,
    measured,
    models,
    overlap,
    pictures,
    plans,
    readme,
    staleness,
    tries,
)
from bench.doc_pages.sources import RESULTS, ROOT, Source, read
from flashnorm_triton import atomic

DOCS = ROOT / "docs"
Part = tuple[tuple[str, ...], Callable[..., str]]


def _of_records(render: Callable[..., str]) -> Callable[[Source], str]:
    return lambda source: render(source.records)


# page -> mark -> the result files, and what makes a text of them
PAGES: dict[str, dict[str, Part]] = {
    "README.md": {
        "gains": (("norm_linear.json", "decode.json", "generate.json"), readme.gains),
    },
    "docs/api.md": {"api": ((), code.api)},
    "docs/cancel.md": {"errors": (("../cpu/cancel.json",), cancel.errors)},
    "docs/commands.md": {"commands": ((), code.commands)},
    "docs/measured.md": {
        "ships": (
            (
                "norm_linear.json",
                "norm_linear_fp16.json",
                "norm_linear_untuned.json",
                "host.json",
                "patching.json",
            ),
            measured.ships,
        ),
        "decode": (("decode.json",), models.steps),
        "prefill": (("prefill.json",), models.steps),
        "ablation": (("ablation.json",), models.ablation),
        "profile": (("profile.json",), models.profile),
        "paper": (("paper.json",), models.paper),
        "few_rows": (("attempts.json",), tries.few_rows),
        "gemv_forms": (("gemv_forms.json",), tries.gemv_forms),
        "gated_gemv": (("gemv_forms.json",), tries.gated_gemv),
        "swap": (("attempts.json",), tries.swap),
        "split_k": (("attempts.json",), tries.split_k),
        "many_rows": (("attempts.json",), tries.many_rows),
        "more": (("attempts.json",), tries.more),
        "epilogues": (("epilogues.json",), tries.epilogues),
        "experts": (("experts.json",), tries.experts),
    },
    "docs/overlap.md": {"overlap": (("overlap.json",), _of_records(overlap.overlap_tables))},
    "docs/pictures.md": {"pictures": ((), pictures.pictures)},
    "docs/robustness.md": {"soak": (("soak.json",), measured.soak)},
    "docs/strategies.md": {"winners": (("norm_linear.json",), plans.winners)},
    "docs/tuning.md": {"shipped": ((), plans.shipped)},
    "docs/staleness.md": {
        "lag": (("lag.json",), _of_records(staleness.lag_table)),
        "faults": (("faults.json",), _of_records(staleness.faults_table)),
        "missed": (("faults.json",), _of_records(staleness.missed)),
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
    """The text of the page of that name with every part whose results are in ``folder``."""
    for mark, (files, render) in PAGES[name].items():
        paths = [folder / file for file in files]
        if all(path.exists() for path in paths):
            page = put(page, mark, render(*map(read, paths)))
    return page


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="nvidia_h200", help="folder of bench/results")
    args = parser.parse_args(argv)
    for name in PAGES:
        path = ROOT / name
        atomic.write_text(path, rendered(name, path.read_text("utf-8"), RESULTS / args.gpu))
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
