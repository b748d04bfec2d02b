"""What dropping a norm does to the error of the logits, exactly and approximately.

Question: of tiny random models whose rows are of ordinary size, or so small that both eps count,
how far are the logits from float64's: stock, fused, and with each ``cancel``?

    python bench/cancel.py [--out FILE]     # results/cpu/cancel.json; a minute on a CPU

``python bench/doc_tables.py`` then puts the table into docs/cancel.md. Exit: 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnorm_triton import atomic

RESULTS = Path(__file__).resolve().parent / "results" / "cpu" / "cancel.json"
FAMILIES = ("gemma4_text", "deepseek_v4", "qwen3", "deepseek_v3")
EMBEDDINGS = (1.0, 1e-2, 3e-4)
SEEDS = (0, 1, 2)
BATCH, LENGTH = 3, 44
WAYS: dict[str, dict[str, str]] = {
    "fused": {}, "exact": {"cancel": "exact"}, "fast": {"cancel": "fast"},
}  # fmt: skip


def errors(family: str, embeddings: float, seed: int) -> dict[str, float]:
    """Relative Frobenius errors of one model's float32 logits against its float64 logits.

    ``embeddings`` scales the embeddings, and so the rows that the first norm reads.
    """
    import torch
    from cancel_models import cancel_model, error, logits
    from tiny_models import token_ids

    import flashnorm_triton as fn

    ids = token_ids(BATCH, LENGTH, seed)
    made = {"seed": seed, "embedding": embeddings}
    exact = logits(cancel_model(family, dtype=torch.float64, **made), ids)
    model = cancel_model(family, **made)
    found = {"stock": error(logits(model, ids), exact)}
    for name, options in WAYS.items():
        with fn.patched(model, **options):
            found[name] = error(logits(model, ids), exact)
    return found


def record(family: str, embeddings: float) -> dict[str, Any]:
    """The geometric means of ``errors`` over the seeds."""
    drawn = [errors(family, embeddings, seed) for seed in SEEDS]
    means = {name: geometric_mean([each[name] for each in drawn]) for name in drawn[0]}
    return {"model": family, "embeddings": embeddings, "rel_err": means}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args(argv).out
    records = []
    for family in FAMILIES:
        for embeddings in EMBEDDINGS:
            records.append(record(family, embeddings))
            print(records[-1], flush=True)
    result = {
        "schema": 1,
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dtype": "float32", "rows": BATCH * LENGTH, "seeds": len(SEEDS), "records": records,
    }  # fmt: skip
    atomic.write_text(out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
