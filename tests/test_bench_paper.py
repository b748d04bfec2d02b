"""bench/paper.py: the paper's figures agree with themselves, and ours are told beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashnorm_triton import results
from flashnorm_triton.bench import cases, paper

ROWS = [(table, row) for table in paper.data()["tables"] for row in table["rows"]]


@pytest.mark.parametrize("key", ["unfused", "other"])
def test_printed_reductions_are_those_of_the_printed_times(key: str) -> None:
    """Times are printed to a microsecond: a reduction may be off by what that leaves open."""
    name = "reduction_percent" if key == "unfused" else "other_reduction_percent"
    checked = 0
    for table, row in ROWS:
        if f"{key}_ms" not in row:
            continue
        unfused, fused, half = row[f"{key}_ms"], row["fused_ms"], 0.0005
        least = 1 - (fused + half) / (unfused - half)
        most = 1 - (fused - half) / (unfused + half)
        printed = row[name] / 100
        assert least - 0.0006 <= printed <= most + 0.0006, (table["table"], row)
        checked += 1
    assert checked == (51 if key == "unfused" else 36)


def test_the_papers_cells_and_its_claims() -> None:
    """18 cells each on A100 and H100; the claims of its text, counted in its tables."""
    a100, h100 = (paper.tables_of([name])[0]["rows"] for name in ("8", "10"))
    assert [(r["k"], r["n"], r["m"]) for r in a100] == [(r["k"], r["n"], r["m"]) for r in h100]
    assert len(a100) == 18 and {r["m"] for r in a100} == {1, 16, 64, 256, 1024, 4096}
    assert sum(r["reduction_percent"] > 0 for r in a100) == 5
    assert sum(r["reduction_percent"] > 0 for r in h100) == 18
    assert sum(r["other_reduction_percent"] > 0 for r in h100) == 10
    t4 = [r for name in ("2", "3") for r in paper.tables_of([name])[0]["rows"]]
    saved = sorted(r["reduction_percent"] for r in t4 if r["reduction_percent"])
    assert saved == [12.1, 13.9, 33.6, 35.5]
    decode = paper.data()["decode"]
    for row in decode["norm_share"]["rows"]:
        share = 100 * row["norm_ms"] / row["decode_ms"]
        assert share == pytest.approx(row["norm_percent"], abs=0.05)
    rates = decode["swap"]["tokens_per_s"]
    gain = rates["F.rms_norm without a weight"] / rates["stock norm"] - 1
    assert 100 * gain == pytest.approx(decode["swap"]["gain_percent"], abs=0.02)
    assert paper.data()["source"].startswith("https://github.com/OpenMachine-ai/transformer-tricks")


def _measured(us: float, best: float, **more: Any) -> dict[str, Any]:
    baselines = {
        "gemm_only": 3.0,
        "rms_norm+linear": 8.0,
        "triton_norm+linear": best,
        "stock": 12.0,
    }
    return {
        "us": us, "us_q20": us, "us_q80": us, "plan": {"form": "gemv"}, "baselines_us": baselines,
        "best_unfused": "triton_norm+linear", "speedup": best / us, "contract_ok": True,
        "rel_err": 1e-3, "rel_err_stock": 1e-3, **more,
    }  # fmt: skip


def _sweep(
    tables: list[str], cell: Any, spent: Any = lambda: False, **more: Any
) -> tuple[list[dict[str, Any]], list[int], bool]:
    """The records, how many each save brought, and whether it came to its end."""
    records: list[dict[str, Any]] = []
    counts: list[int] = []

    def save(new: list[dict[str, Any]]) -> None:
        counts.append(len(new))
        records.extend(new)

    complete = paper.sweep(
        paper.tables_of(tables), "float16", cell, save=save, spent=spent, log=lambda text: None,
        **more,
    )  # fmt: skip
    return records, counts, complete


def test_a_cell_of_two_tables_is_measured_once(tmp_path: Path) -> None:
    asked: list[Any] = []

    def cell(key: Any) -> dict[str, Any]:
        asked.append(key)
        if key[2] == 64:
            raise RuntimeError("no such luck")
        return _measured(4.0 if key[0] < 2048 else 7.0, best=6.0)

    records, counts, complete = _sweep(["8", "9", "10"], cell)
    assert complete and len(asked) == len(set(asked)) == 18 and len(records) == 42
    assert counts == [3, 3, 2, 2, 2, 2] * 3
    for record in records:
        if record["m"] == 64:
            assert record["error"] == "RuntimeError: no such luck" and "us" not in record
            continue
        won = record["k"] == 576
        assert record["won"] is won
        assert record["reduction"] == pytest.approx(0.5 if won else 1 / 8)
        assert record["best_reduction"] == pytest.approx(1 / 3 if won else -1 / 6)
        assert "gemm_only" not in record["baselines_us"] and record["gemm_us"] == 3.0
    first = next(r for r in records if r["table"] == "10" and r["m"] == 1)
    assert first["paper_us"] == {"unfused": 96.0, "fused": 19.0, "other": 38.0}
    assert first["paper_reduction"] == 0.804 and first["paper_won"]
    text = paper.table_text(records)
    assert "won: paper 18 of 18" not in text  # FlashInfer's column counts too
    assert "won: paper 10 of 18, here 5 of 15" in text and "RuntimeError: no such luck" in text
    head = results.header(copy_tb_s=4.0, matmul_tflops=700.0, gpu="NVIDIA H200")
    results.save(tmp_path / "paper.json", head, records)
    assert len(results.load(tmp_path / "paper.json").records) == 42


def test_who_is_absent_is_named() -> None:
    told = paper.absences(_measured(4, 6, failed={"liger_norm+linear": "no capture"}))
    assert told == {
        "liger_norm+linear": "no capture",
        "flashinfer_norm+linear": "flashinfer-python is not installed",
    }


def test_flashinfer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call compiles for half a minute: not again at every cell."""
    calls: list[Any] = []

    def rmsnorm(*tensors: Any) -> None:
        calls.append(tensors)
        raise OSError("ninja: build stopped")

    package, norm = ModuleType("flashinfer"), ModuleType("flashinfer.norm")
    norm.rmsnorm = rmsnorm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    cases._no_flashinfer.cache_clear()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="FlashInfer's rmsnorm: OSError: ninja: build stop"):
            cases.flashinfer_norm(torch.ones(2, 64), torch.ones(64))
    assert len(calls) == 1
    cases._no_flashinfer.cache_clear()


def test_the_budget_keeps_what_is_finished() -> None:
    turns = iter([False, False, True])
    records, counts, complete = _sweep(["2"], lambda key: _measured(4, 6), lambda: next(turns))
    assert not complete and counts == [1, 1]
    # What is there is not measured again; nor does it stand in the way of the rest.
    there = {(r["table"], r["m"]) for r in records}
    more, _, complete = _sweep(
        ["2"], lambda key: _measured(4, 6), has=lambda row: (row["table"], row["m"]) in there
    )
    assert complete and [r["m"] for r in more] == [4096, 8192]


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper.parse(["--tables", "7"])
    assert "no table '7' of the paper: use 2, 3, 8, 9, 10" in capsys.readouterr().err
    assert paper.parse(["--quick"]).tables == ["10"]
    if not torch.cuda.is_available():
        assert paper.main([]) == 2
        assert "paper: timing needs a GPU" in capsys.readouterr().err
