"""README's table says what the result files say, computed here anew; and those are current."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from flashnorm_triton import plans, results

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDER = ROOT / "bench" / "results" / "nvidia_h200"
BANDS = {
    "1 row (token)": (1,),
    "2 to 16 rows": (2, 4, 8, 16),
    "32 and 64 rows": (32, 64),
    "128 to 512 rows": (128, 256, 512),
    "1024 to 8192 rows": (1024, 2048, 4096, 8192),
}


def operation() -> results.Results:
    return results.load(FOLDER / "norm_linear.json")


@pytest.mark.parametrize("band", BANDS)
def test_speedups(band):
    cells = [cell for cell in operation().records if cell["m"] in BANDS[band]]
    assert len(cells) == 6 * len(BANDS[band])
    fastest = [
        min(us for name, us in cell["baselines_us"].items() if name != "gemm_only")
        for cell in cells
    ]
    # The file's speedups are medians over rounds: near the ratio of the medians, not equal to it.
    ratios = [us / cell["us"] for us, cell in zip(fastest, cells, strict=True)]
    told = re.search(rf"\| the operation, {re.escape(band)} \| .* \| ([\d.]+) \(([\d.]+)\)", README)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert float(told[1]) == pytest.approx(mean, rel=0.03)
    assert float(told[2]) == pytest.approx(min(cell["speedup"] for cell in cells), abs=0.005)


def test_cells_are_counted():
    cells = operation().records
    compiled = sum("compiled" in cell["baselines_us"] for cell in cells)
    assert f"in {compiled} of the {len(cells)} cells" in README
    unfused = sum(cell["plan"]["strategy"] == "unfused" for cell in cells)
    assert f"{unfused} of the cells run unfused" in README


def test_the_results_are_of_the_kernels_that_ship():
    """Those that are not are said to be older, in README, where they are named."""
    checked = (ROOT / "bench" / "results" / "kernels.gpu-checked").read_text().strip()
    assert results.kernel_hash() == checked
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        if path.name not in README or '"kernel_hash"' not in text:
            continue
        stale = results.load(path).header["kernel_hash"] != checked
        told = f"(bench/results/nvidia_h200/{path.name}), older than the kernels" in README
        assert stale == told, path.name


def test_the_numerics_contract_held_in_every_cell():
    assert all(cell["contract_ok"] for cell in operation().records)


def test_versions_are_those_of_the_package():
    """Python, and the oldest GPU, as the script and the kernels have them."""
    script = (ROOT / "run").read_text(encoding="utf-8")
    least, most = re.search(
        r"\(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)", script
    ).groups()
    assert f"Python 3.{least} to 3.{most}" in README
    major, minor = divmod(plans.MIN_CAPABILITY, 10)
    assert re.search(rf"compute capability\s+{major}\.{minor}\b", README)


@pytest.mark.parametrize("page", ["README.md", "docs/patching.md"])
def test_compiled_blocks_are_told_as_the_last_run_found_them(page):
    """Once they are timed, the advice to wait goes."""
    (run,) = (
        record
        for record in results.load(FOLDER / "decode.json").records
        if (record["model"], record["batch"], record["mode"], record["variant"])
        == ("llama-3.2-1b", 1, "reduce-overhead", "block")
    )
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    waits = 'patch with `level="norm"` before compiling' in text
    assert waits == bool(run.get("error"))
