"""docs/architectures.md: its table is what bench/architectures.py found, and is still so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from family_table import FAMILIES, Family, build, inputs_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flashnorm_triton as fn
from bench import architectures

FOUND = json.loads(architectures.RESULTS.read_text(encoding="utf-8"))
ROWS = {row["type"]: row for row in FOUND["types"]}


def test_the_page_shows_the_results() -> None:
    text = architectures.PAGE.read_text(encoding="utf-8")
    assert architectures.page(text, FOUND) == text
    assert list(ROWS) == sorted(ROWS) and len(ROWS) >= 100
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]] == list(ROWS)


def test_every_family_that_is_patched_has_its_row() -> None:
    for family in FAMILIES:
        row = ROWS[family.name]
        counts = (row["forms"].get("packed", 0), row["forms"].get("experts", 0), row["norm_only"])
        assert counts == (family.packed, family.experts, family.alone), family.name
        assert row["norms"] == row["fused"] + row["norm_only"] + row["kept"]


def _family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.parametrize("name", ["llama", "phimoe", "t5", "vit"])
def test_the_results_are_what_an_audit_finds(name: str) -> None:
    import torch
    import transformers

    family = _family(name)
    example = None
    if family.inputs is not None:
        example = {key: value.bfloat16() for key, value in inputs_of(family).items()}
    report = fn.audit(build(family, torch.bfloat16), example_inputs=example)
    found, row = architectures.record(name, report), ROWS[name]
    assert (found["forms"], found["norm_only"]) == (row["forms"], row["norm_only"])
    if transformers.__version__ == FOUND["transformers"]:  # another may count other launches
        assert found == row


def test_launches_saved_in_layers_and_outside() -> None:
    row = ROWS["llama"]
    # bf16: two casts beside pow, mean, add, rsqrt and two products; q, k, v and gate, up.
    assert row["layers"] == 2 and row["saved_per_layer"] == (8 + 3 - 1) + (8 + 2 - 1)
    assert row["saved_outside"] == 8 - 1
