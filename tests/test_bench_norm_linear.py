"""The bench norm_linear: its contract check, ratios, records and table, on a CPU."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest
import torch

from flashnorm_triton import algebra, ops, plans, results
from flashnorm_triton.bench import accuracy, cases, norm_linear, report, resuming
from flashnorm_triton.bench.shapes import SHAPES, TOKENS, Shape, parse_shapes, parse_tokens
from flashnorm_triton.tuning import measure

N, K, EPS = 192, 320, 1e-5
SHAPE = Shape("tiny", K, N)
HEAD = {
    "schema": 1,
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "driver": "580.1",
    "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z",
    "copy_tb_s": 4.0,
    "matmul_tflops": 800.0,
}


# --- shapes -------------------------------------------------------------------------------------


def test_the_sweep_is_six_shapes_by_fourteen_row_counts():
    sizes = [(shape.k, shape.n) for shape in SHAPES]
    assert sizes == [
        (576, 960),
        (576, 3072),
        (2048, 3072),
        (2048, 16384),
        (4096, 6144),
        (4096, 28672),
    ]
    assert tuple(1 << i for i in range(14)) == TOKENS


def test_shapes_by_name_and_by_size():
    assert parse_shapes(["llama-3.1-8b.qkv", "2048x3072"]) == (SHAPES[4], SHAPES[2])
    assert parse_shapes(["128x77"]) == (Shape("128x77", 128, 77),)
    assert parse_shapes(["2048:3072", "a=8:9"]) == (SHAPES[2], Shape("a", 8, 9))  # as for tune
    for word in ("llama", "12x", "0x5", "axb"):
        with pytest.raises(ValueError, match=f"'{word}'.*llama-3.2-1b.qkv"):
            parse_shapes([word])
    assert parse_tokens(["1", "4096"]) == (1, 4096)
    for word in ("0", "-1", "1.5", "x"):
        with pytest.raises(ValueError, match=f"'{word}'"):
            parse_tokens([word])


# --- the numerics contract ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    torch.manual_seed(11)
    weight = (torch.randn(N, K) * K**-0.5).bfloat16()
    gain = (1 + 0.5 * torch.randn(K)).bfloat16()
    return gain, weight, algebra.fold(weight, gain.float()), cases.Stock(gain, weight)


def verdict(site, op, m=64):
    gain, weight, _, stock = site
    with torch.no_grad():
        return accuracy.check(
            op, stock, gain=gain, weight64=weight.double(), eps=EPS, m=m, dtype=torch.bfloat16
        )


@pytest.mark.parametrize("m", [1, 3, 64, 200])
def test_the_operation_keeps_the_contract(site, m):
    found = verdict(site, lambda x: ops.norm_linear(x, site[2], EPS), m)
    assert found.ok and 0.9 < found.ratio < 1.1
    assert 1e-3 < found.rel_err_stock < 1e-2
    assert found.calls % (3 * math.ceil(accuracy.LEAST_ROWS / m)) == 0


def scale_error(x, folded):
    return ops.norm_linear(x, folded, EPS) * 1.006


def forgets_eps(x, folded):
    return ops.norm_linear(x.float(), folded.float(), 1e-12).to(x.dtype)


def squares_in_bf16(x, folded):
    s = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (x @ folded.T) * s


def one_bad_element(x, folded):
    y = ops.norm_linear(x, folded, EPS)
    y[-1, -1] += 0.1 * y[-1].abs().max()
    return y


def unwritten_tile(x, folded):
    y = ops.norm_linear(x, folded, EPS)
    y[:, -16:] = math.nan
    return y


def zero_row_is_nan(x, folded):
    wide = x.float()
    return (wide / wide.square().mean(-1, keepdim=True).sqrt() @ folded.float().T).to(x.dtype)


def no_gain(x, folded):
    return ops.norm_linear(x, folded.roll(1, 0), EPS)


@pytest.mark.parametrize(
    ("fault", "by"),
    [
        (scale_error, "ratio"),
        (forgets_eps, "ratio"),
        (squares_in_bf16, "ratio"),
        (one_bad_element, "max_ratio"),
        (unwritten_tile, "max_ratio"),
        (zero_row_is_nan, "ratio"),
        (no_gain, "ratio"),
    ],
)
def test_a_faulty_operation_breaks_the_contract(site, fault, by):
    found = verdict(site, lambda x: fault(x, site[2]))
    assert not found.ok and getattr(found, by) > accuracy.LIMIT
    draws = accuracy.MOST_DRAWS if found.finite else 1
    assert found.calls == 2 * len(accuracy.KINDS) * draws  # two calls of 64 rows a draw


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"rel_err": 2.4e-3}, True),
        ({"rel_err": 2.6e-3}, False),
        ({"max_err": 0.026}, False),
        ({"max_err": math.nan}, False),
        ({"finite": False}, False),
    ],
)
def test_each_criterion_of_the_contract_counts(change, ok):
    figures = dict(rel_err=2e-3, rel_err_stock=2e-3, max_err=0.02, max_err_stock=0.02)
    figures |= dict(finite=True, poisoned_calls=3, calls=3)
    assert accuracy.Verdict(**{**figures, **change}).ok is ok


def test_an_error_in_a_zero_row_is_infinitely_bad():
    wanted = torch.tensor([[1.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    errors = accuracy.Errors()
    errors.add("plain", wanted.clone(), wanted)
    assert errors.top == 0.0
    errors.add("plain", wanted + torch.tensor([[0.0, 0.1], [0.0, 0.0]]), wanted)
    assert errors.top == pytest.approx(0.05)
    errors.add("plain", wanted + torch.tensor([[0.0, 0.0], [0.0, 1e-9]]), wanted)
    assert errors.top == math.inf


def test_a_nan_reaches_the_record_as_null(site):
    fields = verdict(site, lambda x: unwritten_tile(x, site[2])).fields()
    assert fields["contract_ok"] is False and fields["finite"] is False
    assert fields["rel_err"] is None and fields["err_ratio"] is None
    json.dumps(fields, allow_nan=False)


def test_inputs_are_what_they_are_called():
    make = dict(rows=64, k=K, device=torch.device("cpu"), dtype=torch.float32)
    outlier = accuracy.make_rows("outlier", **make).abs()
    assert (outlier.amax(1) / outlier.median(1).values).median() > 100
    assert len(set(outlier.argmax(1).tolist())) > 32
    rms = accuracy.make_rows("scaled", **make).square().mean(1).sqrt()
    assert (rms == 0).sum() == 1 and rms.max() > 1e2 and rms[rms > 0].min() < 1e-2
    with pytest.raises(ValueError, match="'odd'"):
        accuracy.make_rows("odd", **make)


# --- ratios and records -------------------------------------------------------------------------


def steady(us: float, rounds: int = 15) -> measure.Timing:
    return measure.timing([us] * rounds)


def test_best_unfused_is_the_fastest_of_the_unfused_and_never_the_bare_matmul():
    got = norm_linear.compare(
        {
            "ours": steady(5.0),
            "ours again": steady(5.1),
            "gemm_only": steady(4.0),
            "stock": steady(20.0),
            "rms_norm+linear": steady(9.0),
            "triton_norm+linear": steady(8.0),
        }
    )
    assert got["best_unfused"] == "triton_norm+linear"
    assert got["speedup"] == pytest.approx(1.6) and got["vs_gemm"] == pytest.approx(1.25)
    assert got["bound"] == pytest.approx(2.0) and got["repeat"] == pytest.approx(1.02)
    assert set(got["baselines_us"]) == {
        "gemm_only",
        "stock",
        "rms_norm+linear",
        "triton_norm+linear",
    }


def test_without_baselines_there_is_no_speedup():
    got = norm_linear.compare({"ours": steady(5.0)})
    assert got["us"] == 5.0 and "speedup" not in got and "vs_gemm" not in got


def test_floor_is_bytes_at_one_row_and_arithmetic_at_many():
    shape = SHAPES[2]
    moved = 2 * (2048 + 2048 * 3072 + 3072)
    assert norm_linear.floor_us(shape, 1, 4.0, 800.0) == pytest.approx(moved / 4e12 * 1e6)
    flops = 2 * 4096 * 2048 * 3072
    assert norm_linear.floor_us(shape, 4096, 4.0, 800.0) == pytest.approx(flops / 8e14 * 1e6)


class FakeDevice:
    """Runs what it captures, and says that every call takes ``us``, or fails for some callables."""

    def __init__(self, us: float = 5.0, fails: int = -1) -> None:
        self.us, self.fails, self.captured = us, fails, 0

    def capture(self, fn, calls, rotations):
        self.captured += 1
        if self.captured - 1 == self.fails:
            raise RuntimeError("out of shared memory")
        fn(rotations - 1)
        return calls

    def time_ms(self, handles):
        return [calls * self.us / 1e3 for calls in handles]


def tiny_case(shape=SHAPE):
    return cases.Case(shape, cache_bytes=200_000, memory_bytes=10**9, device="cpu")


def cell(case, m, backend):
    return norm_linear.measure_cell(
        case,
        m,
        backend=backend,
        rounds=15,
        compiled=False,
        head=HEAD,
        facts=plans.Device("cpu"),
    )


@torch.no_grad()
def test_a_measured_cell_is_a_valid_record():
    torch.manual_seed(3)
    case = tiny_case()
    record = cell(case, 4, FakeDevice(us=60.0))
    results.validate(HEAD, [record])
    assert record["contract_ok"] and record["speedup"] == pytest.approx(1.0)
    assert record["plan"]["strategy"] == "torch"
    assert record["rotations"] * 2 * K * (N + 4) > 2 * 200_000
    assert "failed" not in record


@torch.no_grad()
def test_a_failing_baseline_is_recorded_and_the_others_are_timed():
    torch.manual_seed(3)
    record = cell(tiny_case(), 4, FakeDevice(us=60.0, fails=5))
    results.validate(HEAD, [record])
    assert list(record["failed"]) == ["stock"]
    assert "out of shared memory" in record["failed"]["stock"]
    assert "triton_norm+linear" in record["baselines_us"]


@torch.no_grad()
def test_ours_failing_is_an_error():
    torch.manual_seed(3)
    with pytest.raises(measure.CaptureError, match="'ours'.*shared memory"):
        cell(tiny_case(), 4, FakeDevice(fails=0))


class FakeLog:
    def __init__(self) -> None:
        self.seconds, self.lines = 0.0, []

    def __call__(self, text: str) -> None:
        self.lines.append(text)


def good_record(shape, m, **changes):
    record = {
        **norm_linear.identity(shape, m),
        "plan": {"strategy": "single_pass"},
        **norm_linear.compare(
            {"ours": steady(5.0), "gemm_only": steady(5.0), "stock": steady(8.0)}
        ),
        "floor_us": 3.0,
        "rel_err": 2e-3,
        "rel_err_stock": 2e-3,
        "err_ratio": 1.0,
        "max_err_ratio": 1.0,
        "finite": True,
        "contract_ok": True,
    }
    return {**record, **changes}


def test_a_sweep_saves_after_every_cell_and_survives_a_failing_one(tmp_path):
    kept = resuming.Kept(tmp_path / "r.json", HEAD)
    saved = []

    def save(record):
        kept.save([record])
        saved.append(len(results.load(kept.path).records))

    def one(case, m):
        if m == 2:
            raise RuntimeError("illegal memory access")
        return good_record(case, m)

    complete = norm_linear.sweep(
        [(shape, m) for shape in SHAPES[:2] for m in (1, 2, 4)],
        make_case=lambda shape: shape,
        cell=one,
        save=save,
        budget_s=100.0,
        log=FakeLog(),
    )
    assert complete and saved == [1, 2, 3, 4, 5, 6]
    records = kept.records
    assert [r.get("error") for r in records[:3]] == [
        None,
        "RuntimeError: illegal memory access",
        None,
    ]
    assert len(report.contract_failures(records)) == 2


def test_a_sweep_stops_at_its_budget_with_what_it_has():
    log, records = FakeLog(), []

    def one(case, m):
        log.seconds += 30.0
        return good_record(case, m)

    complete = norm_linear.sweep(
        [(shape, m) for shape in SHAPES for m in TOKENS],
        make_case=lambda shape: shape,
        cell=one,
        save=records.append,
        budget_s=100.0,
        log=log,
    )
    assert not complete and len(records) == 4


def test_fp16_is_measured_as_fp16():
    torch.manual_seed(3)
    case = cases.Case(
        SHAPE, cache_bytes=200_000, memory_bytes=10**9, device="cpu", dtype=torch.float16
    )
    with torch.no_grad():
        record = norm_linear.measure_cell(
            case, 4, backend=FakeDevice(us=60.0), rounds=15, compiled=False, head=HEAD,
            facts=plans.Device("cpu"), light=True,
        )  # fmt: skip
    results.validate(HEAD, [record])
    assert record["dtype"] == "float16" and record["contract_ok"]
    assert set(record["baselines_us"]) == set(norm_linear.LIGHT) - {"ours"}
    assert case.folded[0].dtype == case.stock[0].linear.weight.dtype == torch.float16


def test_liger_is_a_baseline_where_it_is_installed(monkeypatch):
    module = types.ModuleType("liger_kernel.ops.rms_norm")

    class LigerRMSNormFunction:
        @staticmethod
        def apply(x, gain, eps, offset, casting, in_place):
            assert (eps, offset, casting, in_place) == (cases.EPS, 0.0, "llama", False)
            return torch.nn.functional.rms_norm(x, (K,), gain, eps)

    module.LigerRMSNormFunction = LigerRMSNormFunction
    case, x = tiny_case(), [torch.randn(2, K, dtype=torch.bfloat16)]
    monkeypatch.setattr(cases.importlib.util, "find_spec", lambda name: None)
    assert "liger_norm+linear" not in case.candidates(x, compiled=False)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", module)
    monkeypatch.setattr(cases.importlib.util, "find_spec", lambda name: object())
    found = case.candidates(x, compiled=False)
    with torch.no_grad():
        assert torch.equal(found["liger_norm+linear"](0), found["rms_norm+linear"](0))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", None)  # a broken install
    with pytest.raises(ImportError):
        case.candidates(x, compiled=False)["liger_norm+linear"](0)
    timings = {"ours": steady(5.0), "stock": steady(9.0), "liger_norm+linear": steady(7.0)}
    assert norm_linear.compare(timings)["best_unfused"] == "liger_norm+linear"


def test_compiling_keeps_the_pace():
    pace = {"began": 30.0, "cells": 100, "budget_s": 130.0}
    assert norm_linear.affordable(30.9, done=0, **pace)
    assert not norm_linear.affordable(31.1, done=0, **pace)
    assert norm_linear.affordable(80.0, done=49, **pace)
    assert not norm_linear.affordable(82.0, done=50, **pace)


# --- the table ----------------------------------------------------------------------------------


def test_geomean():
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(report.geomean([]))


def test_the_table_shows_losses_failures_and_gaps():
    broken = {**norm_linear.identity(SHAPES[1], 2), "error": "CaptureError: no"}
    records = [
        good_record(SHAPES[0], 1),
        good_record(SHAPES[0], 2, speedup=0.9),
        good_record(SHAPES[1], 1, contract_ok=False, err_ratio=1.7, failed={"compiled": "boom"}),
        broken,
    ]
    text = report.operation_table(records)
    assert "worst cell: smollm2-135m.qkv M=2 0.900x against stock" in text
    assert "cells under 0.97x: 1 of 3" in text
    assert "baseline failed: compiled: boom" in text
    assert "numerics contract: 2 failures in 4 cells" in text
    assert "error ratio 1.7" in text and "CaptureError: no" in text
    speedups = text.split("ours / bare matmul")[0].splitlines()
    assert speedups[-3].split() == ["576→3072", "1.60", "-"]
    assert speedups[-2].split() == ["geomean", "1.60", "0.90"]


def test_a_clean_table_has_no_failures():
    text = report.operation_table([good_record(SHAPES[0], 1)])
    assert "numerics contract: 0 failures in 1 cells" in text
