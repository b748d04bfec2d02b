"""Quantizing after folding: by how much the error grows, and that a patched one runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from folders import load, logits, relative, saved
from tiny_models import token_ids

import flashnorm_triton as fn
from flashnorm_triton.checkpoints.plan import crest_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "cpu" / "quantize.json"
CONTRACT = 1.25


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    pytest.importorskip("torchao.quantization", exc_type=Exception)
    spec = importlib.util.spec_from_file_location("bench_quantize", ROOT / "bench" / "quantize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_trained_model_quantizes_within_the_contract(bench: ModuleType, tmp_path: Path) -> None:
    records = bench.measure("trained", bench.FOLDER, tmp_path)
    assert {record["scheme"] for record in records} == set(bench.schemes())
    for record in records:
        assert record["logit_ratio"] <= CONTRACT, record
        assert record["weight_ratio_worst"] <= record["largest_crest"] * 1.05, record
        assert 1e-4 < record["logit_error_source"] < 0.3, record


def test_the_crest_factor_bounds_what_folding_costs(bench: ModuleType, tmp_path: Path) -> None:
    """Random models with wide gains: never more than max|g| / rms(g), and far from 1."""
    bench.random_model(tmp_path / "src", lambda n: torch.exp(torch.randn(n)))
    record = fn.fold_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).record
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.float64)
    crest = {f["norm"]: f["crest"] for f in record["folds"] for _ in f["into"]}
    for name in ("int8 per row", "int8 per tensor"):
        config = bench.schemes()[name]
        before, after = (
            bench.weight_errors(bench.quantized(tmp_path / place, config), exact, record)
            for place in ("src", "dst")
        )
        limits = [crest[fold["norm"]] for fold in record["folds"] for _ in fold["into"]]
        ratios = [two / one for one, two in zip(before, after, strict=True)]
        assert all(r <= 1.05 * limit for r, limit in zip(ratios, limits, strict=True))
        assert max(ratios) > 1.5


def test_max_crest_leaves_uneven_gains_alone(tmp_path: Path) -> None:
    gain = torch.tensor([3.0, -4.0, 0.0, 1.0])
    assert crest_of(gain) == pytest.approx(4 / (26 / 4) ** 0.5)
    assert crest_of(torch.ones(7)) == 1 == crest_of(torch.zeros(3))
    source = saved(tmp_path / "src")
    whole = fn.fold_checkpoint(source, tmp_path / "whole", progress=False).record
    crests = sorted(fold["crest"] for fold in whole["folds"])
    limit = (crests[1] + crests[2]) / 2
    even = fn.fold_checkpoint(source, tmp_path / "even", max_crest=limit, progress=False).record
    assert [f["norm"] for f in even["folds"]] == [
        f["norm"] for f in whole["folds"] if f["crest"] <= limit
    ]
    assert len(even["folds"]) == 2
    assert sum("crest factor" in one["reason"] for one in even["kept"]) == 3
    assert relative(logits(load(tmp_path / "even")), logits(load(source))) < 2e-6
    with pytest.raises(ValueError, match="max_crest=0.5: a crest factor is at least 1"):
        fn.fold_checkpoint(source, tmp_path / "none", max_crest=0.5)


@pytest.mark.parametrize("scheme", ["int8 per row", "int4 groups of 32"])
def test_a_folded_quantized_patched_model_runs(
    bench: ModuleType, tmp_path: Path, scheme: str
) -> None:
    source = saved(tmp_path / "src", intermediate_size=128)
    fn.fold_checkpoint(source, tmp_path / "dst", head=False, progress=False)
    model = bench.quantized(tmp_path / "dst", bench.schemes()[scheme])
    ids = token_ids(2, 9)
    wanted = logits(model, ids)
    handle = fn.patch(model)
    decisions = {site.decision for site in handle.report.sites if "layernorm" in site.norm}
    assert decisions == {"norm_only"}
    assert relative(logits(model, ids), wanted) < 1e-5
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)
    handle.revert()
    assert torch.equal(logits(model, ids), wanted)


def test_the_table_in_the_docs_is_the_result_file() -> None:
    records = json.loads(RESULTS.read_text())["records"]
    text = (ROOT / "docs" / "fold.md").read_text()
    for record in records:
        row = (
            f"| {record['model']} | {record['scheme']} | {record['largest_crest']:.2f} | "
            f"{record['weight_error_source']:.4f} | {record['weight_ratio']:.2f} | "
            f"{record['logit_ratio']:.2f} | {record['norms_folded_with_max_crest']} of "
            f"{record['norms']}: {record['logit_ratio_with_max_crest']:.2f} |"
        )
        assert row in text, row
