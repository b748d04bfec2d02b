"""Every figure in README is the one in the committed result files, and those are current."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flashnorm_triton import results

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDER = ROOT / "bench" / "results" / "nvidia_h200"
BANDS = {
    "1": (1,),
    "2 to 16": (2, 4, 8, 16),
    "32, 64": (32, 64),
    "128 to 512": (128, 256, 512),
    "1024 to 8192": (1024, 2048, 4096, 8192),
}


def operation() -> results.Results:
    return results.load(FOLDER / "norm_linear.json")


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.mark.parametrize("band", BANDS)
def test_speedups(band):
    cells = [cell for cell in operation().records if cell["m"] in BANDS[band]]
    assert len(cells) == 6 * len(BANDS[band])
    fused = geomean([cell["speedup"] for cell in cells])
    worst = min(cell["speedup"] for cell in cells)
    bare = geomean([cell["vs_gemm"] for cell in cells])
    assert f"| {band} | {fused:.2f} | {worst:.2f} | {bare:.2f} |" in README


def test_cells_are_counted():
    cells = operation().records
    compiled = sum("compiled" in cell["baselines_us"] for cell in cells)
    assert f"in {compiled} of the {len(cells)} cells" in README
    unfused = sum(cell["plan"]["strategy"] == "unfused" for cell in cells)
    assert f"{unfused}\nof the {len(cells)} cells run unfused" in README


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_generate(mode):
    stock, patched = (
        next(r for r in results.load(FOLDER / "generate.json").records
             if (r["mode"], r["variant"]) == (mode, variant))
        for variant in ("stock", "patched")
    )  # fmt: skip
    rates = f"{stock['tokens_per_s']:.0f} → {patched['tokens_per_s']:.0f}"
    assert rates in README and f"{patched['speedup']:.2f}x" in README
    if mode == "eager":
        assert f"{stock['launches']} → {patched['launches']} kernels a step" in README


def test_without_a_table():
    worst = min(r["speedup"] for r in results.load(FOLDER / "norm_linear_untuned.json").records)
    assert f"no cell is below {math.floor(100 * worst) / 100:.2f}x" in README


def test_host_time():
    calls = {r["m"]: r["host_us"] for r in results.load(FOLDER / "host.json").records}
    one = calls[1]
    assert f"{one['norm_linear']:.1f} against {one['F.linear']:.1f} µs at one row" in README
    fused = [us for m, us in calls.items() if m != 128]  # the plan there is unfused
    assert all(us["norm_linear"] < us["F.linear"] for us in fused)


def test_patching():
    patched = results.load(FOLDER / "patching.json").records[0]
    beside = patched["peak_gb"] - patched["weights_gb"]
    assert f"{patched['patch_s']:.1f} s and {beside:.2f} GB beside its weights" in README


def test_the_results_are_of_the_kernels_that_ship():
    """Those that are not are said to be older, in README, where they are named."""
    checked = (ROOT / "bench" / "results" / "kernels.gpu-checked").read_text().strip()
    assert results.kernel_hash() == checked
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        if path.name not in README or '"kernel_hash"' not in text:
            continue
        stale = results.load(path).header["kernel_hash"] != checked
        told = f"({'bench/results/nvidia_h200/' + path.name}), older than the kernels" in README
        assert stale == told, path.name


def test_the_numerics_contract_held_in_every_cell():
    assert all(cell["contract_ok"] for cell in operation().records)
