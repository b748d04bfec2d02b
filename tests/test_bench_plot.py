"""bench/plot.py on made-up results: what must be seen in the picture is in the picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.colors import to_hex  # noqa: E402

from bench import plot  # noqa: E402
from flashnorm_triton import results  # noqa: E402
from flashnorm_triton.bench.shapes import SHAPES  # noqa: E402

HEAD = {
    "schema": 1,
    "gpu": "NVIDIA Made Up",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "driver": "580.1",
    "kernel_hash": "0123456789" * 4,
    "date": "2026-01-02T03:04:05Z",
    "copy_tb_s": 4.0,
    "matmul_tflops": 800.0,
}
SPEEDUPS = {1: 1.6, 4: 1.25, 16: 1.1, 256: 0.92, 4096: 1.01}


def cell(shape, m, speedup, **changes):
    record = {
        "case": shape.case,
        "op": "norm_linear",
        "dtype": "bfloat16",
        "m": m,
        "n": shape.n,
        "k": shape.k,
        "plan": None,
        "us": 5.0,
        "us_q20": 4.9,
        "us_q80": 5.1,
        "baselines_us": {"gemm_only": 4.0, "stock": 5.0 * speedup},
        "floor_us": 3.0,
        "rel_err": 2e-3,
        "rel_err_stock": 2e-3,
        "contract_ok": True,
        "speedup": speedup,
        "speedup_q20": speedup - 0.03,
        "speedup_q80": speedup + 0.02,
        "bound": 1.3,
    }
    return {**record, **changes}


def operation_results(shapes=SHAPES, **changes):
    records = [
        cell(shape, m, speedup, **(changes if m == 16 else {}))
        for shape in shapes
        for m, speedup in reversed(SPEEDUPS.items())
    ]
    return results.Results(HEAD, tuple(records))


def model_record(mode, variant, speed, **changes):
    return {
        "model": "llama-3.2-1b",
        "mode": mode,
        "variant": variant,
        "ms": 1e3 / speed,
        "tokens_per_s": speed,
        "launches": 300,
        "fraction_of_bandwidth": 0.1,
        **changes,
    }


MODELS = (
    model_record("eager", "stock", 40.0),
    model_record("eager", "patched", 60.0, speedup=1.5),
    model_record("compiled", "stock", 300.0),
    {"model": "m", "mode": "compiled", "variant": "patched", "error": "disagrees"},
)


def texts(figure):
    found = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    return "\n".join(found)


def points(ax, color, marker):
    for line in ax.get_lines():
        if to_hex(line.get_color()) == color and line.get_marker() == marker:
            return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return {}


def test_each_shape_has_a_panel_with_its_curve_band_bound_and_losses():
    figure = plot.draw(operation_results())
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert len(panels) == 6
    for ax, shape in zip(panels, SHAPES, strict=True):
        assert f"{shape.k} → {shape.n}" in ax.get_title(loc="left")
        assert list(points(ax, plot.OURS, "o").items()) == list(SPEEDUPS.items())
        assert points(ax, plot.LOSS, "o") == {256: 0.92}
        assert points(ax, plot.LOSS, "x") == {}
        dashed = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
        assert set(dashed[0].get_ydata()) == {1.3}
        level = [line for line in ax.get_lines() if list(line.get_ydata()) == [1, 1]]
        assert len(level) == 1
        band = ax.collections[0].get_datalim(ax.transData)
        assert (band.ymin, band.ymax) == (pytest.approx(0.89), pytest.approx(1.62))
        assert ax.get_xscale() == "log"
        low, high = ax.get_ylim()
        assert low <= 0.89 and high >= 1.62
    assert "slower" in texts(figure) and "breaks the contract" not in texts(figure)


def test_the_caption_names_device_and_versions():
    for loaded in (operation_results(), results.Results(HEAD, MODELS)):
        text = texts(plot.draw(loaded))
        for part in ("NVIDIA Made Up", "2.11.0", "3.6.0", "5.17.0", "2026-01-02", "01234567"):
            assert part in text


def test_a_broken_contract_is_marked():
    figure = plot.draw(operation_results(contract_ok=False))
    assert points(figure.axes[0], plot.LOSS, "x") == {16: 1.1}
    assert "breaks the contract" in texts(figure)


def test_failed_cells_leave_a_gap():
    figure = plot.draw(operation_results(error="out of memory"))
    assert 16 not in points(figure.axes[0], plot.OURS, "o")


def test_bars_say_speed_ratio_and_what_is_missing():
    figure = plot.draw(results.Results(HEAD, MODELS))
    ax = figure.axes[0]
    widths = sorted(patch.get_width() for patch in ax.patches)
    assert widths == [40.0, 60.0, 300.0]
    text = texts(figure)
    assert "patched 60  (1.50x), 300 kernels a step" in text
    assert "patched: not reported" in text
    assert [label.get_text() for label in ax.get_yticklabels()] == ["eager", "compiled"]
    low, high = sorted(ax.get_ylim())
    assert all(low < t.get_position()[1] < high for t in ax.texts)


def test_nothing_to_draw_is_an_error():
    failed = {**MODELS[3], "variant": "stock"}
    with pytest.raises(results.ResultsError, match="no record has a speed"):
        plot.draw(results.Results(HEAD, (failed,)))
    only = cell(SHAPES[0], 1, 1.0)
    del only["speedup"]
    with pytest.raises(results.ResultsError, match="no record has a speedup"):
        plot.draw(results.Results(HEAD, (only,)))
    with pytest.raises(results.ResultsError, match="no figure for records of this kind"):
        plot.draw(results.Results(HEAD, ({"family": "a", "error": "no"},)))


def test_hidden_tables_and_the_dtype_are_told():
    untuned = results.Results(
        {**HEAD, "tables": "off"}, (cell(SHAPES[0], 1, 1.2, dtype="float16"),)
    )
    told = texts(plot.draw(untuned))
    assert "tables hidden" in told and "fused, float16" in told
    assert "hidden" not in texts(plot.draw(operation_results(SHAPES[:1])))


@pytest.mark.parametrize("kind", ["operation", "model"])
def test_the_same_results_give_the_same_svg(tmp_path, kind):
    loaded = operation_results(SHAPES[:1]) if kind == "operation" else results.Results(HEAD, MODELS)
    first, picture = plot.write(plot.draw(loaded), tmp_path / "a.svg")
    second, _ = plot.write(plot.draw(loaded), tmp_path / "b.svg")
    assert first.read_bytes() == second.read_bytes()
    assert b"<dc:date>" not in first.read_bytes()
    assert picture.read_bytes().startswith(b"\x89PNG")
    wide = matplotlib.image.imread(picture)
    assert wide.shape[1] == 1800
    assert (wide[0, 0] == 1).all()  # a solid ground, also on a dark page


def test_the_command_writes_beside_the_given_name(tmp_path, capsys):
    path = tmp_path / "generate.json"
    results.save(path, HEAD, MODELS)
    assert plot.main([str(path), "-o", str(tmp_path / "out" / "figure.png")]) == 0
    assert (tmp_path / "out" / "figure.svg").exists()
    assert (tmp_path / "out" / "figure.png").exists()
    assert "figure.svg" in capsys.readouterr().out


def test_without_a_name_it_writes_into_the_gpus_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    path = tmp_path / "norm_linear.json"
    results.save(path, HEAD, operation_results(SHAPES[:1]).records)
    assert plot.main([str(path)]) == 0
    assert (tmp_path / "bench" / "figures" / "nvidia_made_up" / "norm_linear.svg").exists()


def test_a_bad_file_is_a_message(tmp_path, capsys):
    assert plot.main([str(tmp_path / "none.json")]) == 2
    assert "plot: cannot read" in capsys.readouterr().err


def test_contenders_with_what_failed():
    common = {"model": "llama-3.2-1b", "batch": 1, "tokens": 512, "dtype": "bfloat16"}
    speed = {"tokens_per_s": 1.0, "fraction_of_bandwidth": 0.7}
    records = [
        {**common, **speed, "variant": "stock", "mode": "reduce-overhead", "ms": 1.5,
         "launches": 400, "speedups": {}},
        {**common, **speed, "variant": "block", "mode": "graph", "ms": 0.9, "launches": 140,
         "speedups": {"reduce-overhead": 1.67}},
        {**common, "variant": "norm", "mode": "graph", "error": "other logits"},
    ]  # fmt: skip
    figure = plot.draw(results.Results(HEAD, tuple(records)))
    (ax,) = figure.axes
    assert [patch.get_width() for patch in ax.patches] == [1.5, 0.9]
    said = [text.get_text() for text in ax.texts]
    assert "not reported" in said[2] and "140 kernels" in said[1] and "1.67x" in said[1]
    with pytest.raises(results.ResultsError, match="no record has a time"):
        plot.contenders_figure(HEAD, records[2:])
