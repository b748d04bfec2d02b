"""docs/cancel.md: errors with and without the norm that is dropped."""

from __future__ import annotations

from bench.doc_pages.sources import ROOT, Source, table

PAGE = ROOT / "docs" / "cancel.md"
_WAYS = ("stock", "fused", "exact", "fast")


def errors(source: Source) -> str:
    """The geometric means over the draws, model by model."""
    rows = [
        (r["model"], f"{r['embeddings']:g}", *(f"{r['rel_err'][way]:.1e}" for way in _WAYS))
        for r in source.records
    ]
    head = source.header
    note = (
        f"{head['rows']} rows, {head['dtype']}, geometric mean of {head['seeds']} draws, torch "
        f"{head['torch']}, transformers {head['transformers']} ({source.cite(PAGE)}, "
        "`python bench/cancel.py`):"
    )
    return f"{note}\n\n{table(('model', 'embeddings', *_WAYS), rows)}"
