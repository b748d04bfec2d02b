"""The bench overlap: its cells, what it times, its comparison, words and figure, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnorm_triton import results, runtime
from flashnorm_triton.bench import overlap
from flashnorm_triton.bench.shapes import TOKENS, Shape
from flashnorm_triton.plans import OVERLAP
from flashnorm_triton.tuning import measure

HEAD = {
    "schema": 1, "gpu": "NVIDIA Made Up", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip
US = {
    "overlap": 10.0, "sequential": 13.0, "stock": 20.0,
    "rms_norm+linear": 11.0, "unfused": 9.0, "chosen": 8.0, "gemm_only": 7.0,
}  # fmt: skip


def timings(**us: float) -> dict[str, measure.Timing]:
    return {name: measure.timing([value] * 5) for name, value in {**US, **us}.items()}


def record(m: int = 64, **us: float) -> dict:
    cell = overlap.Cell(overlap.SHAPES[0], "bfloat16", False, m)
    compared = overlap.compare(timings(**us))
    checked = {"rel_err": 2e-3, "rel_err_stock": 2e-3, "contract_ok": True, "floor_us": 1.0}
    return {**overlap.identity(cell), **compared, **checked}


def test_the_table_has_both_shapes_all_tokens_and_an_epilogue():
    cells = overlap.cells(TOKENS)
    for dtype in ("bfloat16", "float32"):
        for shape in ("576→960", "4096→4096"):
            rows = [
                c.m for c in cells if (c.dtype, c.shape.label, c.finished) == (dtype, shape, False)
            ]
            assert rows == list(TOKENS) and rows[0] == 1 and rows[-1] == 8192
    assert {c.m for c in cells if c.finished} == {m for m in TOKENS if m >= 64}


def test_overlap_is_compared_with_everything_else():
    found = record()
    assert found["plan"] == OVERLAP.as_dict() and found["us"] == 10.0
    assert found["best_other"] == "unfused" and found["speedup"] == pytest.approx(0.9)
    assert found["over"]["sequential"] == pytest.approx(1.3)
    assert found["reduction"] == pytest.approx({"sequential": 1 - 10 / 13, "stock": 0.5})
    assert set(found["baselines_us"]) == set(US) - {"overlap"}
    # What a fused kernel takes is told, but no part of "the best other way".
    assert found["over"]["chosen"] == pytest.approx(0.8)


def test_words_say_where_it_pays_and_where_not():
    records = [record(64), record(128, unfused=14.0, **{"rms_norm+linear": 13.0})]
    text = overlap.table(records)
    assert "faster than every way without a second stream in 1 of 2 cells" in text
    assert "slower than the best of them in 1" in text
    assert "pays at M = 128; best 1.30x at M = 128" in text
    failed = {**overlap.identity(overlap.cells([1])[0]), "error": "out of memory"}
    assert "1 of 2 cells" in overlap.table([*records, failed])
    results.validate(HEAD, [*records, failed])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("finished", [False, True])
def test_what_is_timed_computes_the_same(dtype, finished):
    if not runtime.interpreting():
        pytest.skip("needs the interpreter")
    pytest.importorskip("transformers")
    cell = overlap.Cell(Shape("tiny", 64, 48), dtype, finished, 8)
    kind = getattr(torch, dtype)
    x = [torch.randn(8, 64).to(kind)]
    weights, gains = [(torch.randn(48, 64) / 8).to(kind)], [torch.ones(64).to(kind)]
    found = {name: call(0) for name, call in overlap.candidates(cell, x, weights, gains).items()}
    assert set(found) == set(US) - ({"rms_norm+linear"} if finished else set())
    bare = torch.nn.functional.linear(x[0], weights[0])
    assert torch.equal(found.pop("gemm_only"), bare)
    for name, y in found.items():
        torch.testing.assert_close(y, found["stock"], rtol=4e-2, atol=2e-2, msg=name)


def test_the_figure(tmp_path):
    from flashnorm_triton.plots import drawing, sources

    loaded = results.Results(HEAD, (record(64), record(128), record(256)))
    source = sources.of_results(loaded, Path("overlap.json"))
    ((_, figure),) = drawing.figures([source])
    (ax,) = [ax for ax in figure.axes if ax.get_visible()]
    lines = {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}
    assert lines["the same work in one stream"] == pytest.approx([1.3] * 3)
    assert lines["the plan in use"] == pytest.approx([0.8] * 3)
    failed = results.Results(HEAD, ({**record(64), "error": "x"},))
    with pytest.raises(results.ResultsError, match="no record has a time"):
        list(drawing.figures([sources.of_results(failed, Path("overlap.json"))]))


def test_arguments(capsys):
    assert overlap.parse(["--tokens", "1", "64"]).tokens == (1, 64)
    for argv in (["--rounds", "0"], ["--tokens", "none"]):
        with pytest.raises(SystemExit):
            overlap.parse(argv)
    if not torch.cuda.is_available():
        assert overlap.main([]) == 2
        assert "needs a GPU" in capsys.readouterr().err
