"""The bench norm_linear: its goals and its command line, on a CPU."""

from __future__ import annotations

import types

import pytest
import torch

from flashnorm_triton import plans, results
from flashnorm_triton.bench import goals, norm_linear
from flashnorm_triton.bench.shapes import SHAPES, TOKENS
from flashnorm_triton.tuning import measure

HEAD = {
    "schema": 1, "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip


def cell_of(m, speedup, vs_gemm=0.95, case=0):
    return {**norm_linear.identity(SHAPES[case], m), "speedup": speedup, "vs_gemm": vs_gemm}


def test_goals_are_those_of_the_table_and_cover_every_cell():
    assert sorted(m for goal in goals.TUNED for m in goal.tokens) == list(TOKENS)
    assert [(g.least_mean, g.least_cell) for g in goals.TUNED] == [
        (1.48, 1.04), (1.20, 1.00), (1.13, 1.00), (1.02, 0.98), (1.03, 0.98),
    ]  # fmt: skip
    assert all(goal.least_cell == 0.90 and goal.least_mean is None for goal in goals.UNTUNED)


@pytest.mark.parametrize(
    ("records", "met"),
    [
        ([cell_of(1, 1.5, 0.85), cell_of(1, 1.5, 0.9, 1)], True),
        ([cell_of(1, 2.3, 0.85), cell_of(1, 1.03, 0.85, 1)], False),  # worst cell
        ([cell_of(1, 1.47, 0.85), cell_of(1, 1.47, 0.85, 1)], False),  # mean
        ([cell_of(1, 1.6, 0.95), cell_of(1, 1.6, 0.95, 1)], False),  # bare matmul
        ([cell_of(1, 1.6, 0.8), {**norm_linear.identity(SHAPES[1], 1), "error": "no"}], False),
    ],
)
def test_a_goal_is_met_by_mean_worst_cell_and_bare_matmul_together(records, met):
    (row,) = goals.judge(records, goals.TUNED)
    assert row["m"] == "1" and row["cells"] == 2 and row["met"] is met
    assert ("MISSED" in goals.table([row])) is not met


def test_without_tables_no_cell_may_fall_under_the_limit():
    good, bad = cell_of(256, 0.91), cell_of(512, 0.89)
    assert [row["met"] for row in goals.judge([good], goals.UNTUNED)] == [True]
    (row,) = goals.judge([good, bad], goals.UNTUNED)
    assert not row["met"] and row["worst_case"].endswith("M=512")
    assert "goals met: 0 of 1" in goals.table([row])


def test_cells_over_the_bare_matmul_are_counted():
    (row,) = goals.judge([cell_of(64, 1.2, 1.01), cell_of(32, 1.2, 0.99)], goals.TUNED)
    assert row["cells_over_gemm"] == 1 and "1 of 2 cells over" in goals.table([row])


# --- the command line ---------------------------------------------------------------------------


def test_what_is_measured_and_where_it_is_written(tmp_path):
    args = norm_linear.parse([])
    assert args.dtypes == ("bf16", "fp16") and args.cells["bf16"] == (SHAPES, TOKENS)
    assert len(args.cells["fp16"][0]) == 3 and args.compiled and args.rounds == 21
    names = [norm_linear.result_path(args, "NVIDIA H200", name).name for name in args.dtypes]
    assert names == ["norm_linear.json", "norm_linear_fp16.json"]
    args = norm_linear.parse(["--untuned"])
    assert args.dtypes == ("bf16",) and not args.compiled and args.cells["bf16"][1] == TOKENS
    assert norm_linear.result_path(args, "NVIDIA H200", "bf16").name == "norm_linear_untuned.json"
    args = norm_linear.parse(["--dtype", "fp16"])
    assert norm_linear.result_path(args, "NVIDIA H200", "fp16").name == "norm_linear_fp16.json"
    args = norm_linear.parse(["--dtype", "fp16", "--out", str(tmp_path / "mine.json")])
    assert args.cells["fp16"] == (SHAPES, TOKENS)
    assert norm_linear.result_path(args, "NVIDIA H200", "fp16") == tmp_path / "mine.json"


def test_untuned_hides_the_tables(monkeypatch):
    monkeypatch.setenv("FLASHNORM_TABLES", "on")
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    seen = []
    monkeypatch.setattr(
        norm_linear,
        "run",
        lambda args, argv: seen.append(norm_linear.os.environ["FLASHNORM_TABLES"]),
    )
    norm_linear.main([])
    norm_linear.main(["--untuned"])
    assert seen == ["on", "off"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "llama"], "unknown shape 'llama'"),
        (["--tokens", "0"], "'0' is no number of tokens"),
        (["--rounds", "0"], "--rounds 0"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        norm_linear.main(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--untuned"]])
def test_the_command_from_cells_to_files(tmp_path, monkeypatch, capsys, words):
    """All but the GPU and its timings: cells of both dtypes, files, goals, exit code."""

    class Backend:
        def capture(self, fn, calls, rotations):
            fn(0)
            return calls

        def time_ms(self, handles):
            return [calls * 0.06 for calls in handles]

    true_case = norm_linear.Case
    for name in ("require_gpu", "copy_tb_s", "matmul_tflops"):
        monkeypatch.setattr(measure, name, lambda: 4.0)
    properties = types.SimpleNamespace(L2_cache_size=1000, total_memory=1 << 33)
    monkeypatch.setenv("FLASHNORM_TABLES", "on")
    monkeypatch.setattr(measure, "CudaBackend", Backend)
    monkeypatch.setattr(results, "header", lambda **rates: {**HEAD, **rates})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(norm_linear.runtime, "device_facts", lambda index: plans.Device("cpu"))
    monkeypatch.setattr(
        norm_linear, "Case", lambda shape, **more: true_case(shape, device="cpu", **more)
    )
    path = tmp_path / "r.json"
    argv = ["--out", str(path), "--shapes", "320x64", "--tokens", "1", "4", "--jobs", "1"]
    assert norm_linear.main([*argv, "--no-compiled", *words]) == 0, capsys.readouterr().out
    loaded = results.load(path)
    assert [record["m"] for record in loaded.records] == [1, 4]
    assert loaded.header["tables"] == ("off" if words else "on")
    assert [row["m"] for row in loaded.header["goals"]] == ["1", "2-16"]
    assert ("stock" in loaded.records[0]["baselines_us"]) is not bool(words)
    said = capsys.readouterr().out
    assert "goals met:" in said and f"written: {path}" in said
    half = tmp_path / "r_fp16.json"
    assert half.exists() is not bool(words)
    if not words:
        assert {record["dtype"] for record in results.load(half).records} == {"float16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert norm_linear.main(["--out", str(tmp_path / "r.json")]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu_a_quick_run_writes_valid_results(tmp_path, capsys):
    path = tmp_path / "norm_linear.json"
    argv = ["--shapes", "576x960", "--tokens", "1", "16", "--rounds", "5", "--jobs", "1"]
    code = norm_linear.main([*argv, "--no-compiled", "--out", str(path)])
    records = results.load(path).records
    assert code == 0, capsys.readouterr().out
    assert [record["m"] for record in records] == [1, 16]
    assert records[0]["host_us"]["ours"] > 0
    assert records[0]["poisoned_calls"][0] > 0
