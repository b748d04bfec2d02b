"""``flashnorm plot`` and the figures that were there first: what must be seen is in the picture."""

from __future__ import annotations

import json

import matplotlib.image
import pytest
from plot_records import (
    HEAD,
    OLD,
    OTHER_GPU,
    SHAPES,
    SPEEDUPS,
    cell,
    cells,
    drawn,
    panels,
    points,
    source,
    texts,
)  # fmt: skip
from typer.testing import CliRunner

from flashnorm_triton import plots, results
from flashnorm_triton.cli import app
from flashnorm_triton.plots import drawing, speedup, style


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


def step(variant, mode, ms, speedups=None, **changes):
    return {
        "model": "llama-3.2-1b", "batch": 1, "tokens": 512, "dtype": "bfloat16", "variant": variant,
        "mode": mode, "ms": ms, "ms_q20": 0.97 * ms, "ms_q80": 1.04 * ms,
        "tokens_per_s": 1e3 / ms, "launches": round(200 * ms), "fraction_of_bandwidth": 0.7,
        "floor_ms": 0.6, "speedups": speedups or {}, **changes,
    }  # fmt: skip


STEPS = (
    step("stock", "graph", 2.0),
    step("stock", "reduce-overhead", 1.5),
    step("norm", "graph", 1.8, {"graph": 1.11, "reduce-overhead": 0.83}),
    step("block", "graph", 0.9, {"graph": 2.22, "reduce-overhead": 1.67}),
    {"model": "llama-3.2-1b", "batch": 1, "tokens": 512, "dtype": "bfloat16", "variant": "block",
     "mode": "reduce-overhead", "error": "other logits"},
)  # fmt: skip


def call(*args):
    return CliRunner().invoke(app, ["plot", *map(str, args)])


def test_each_shape_has_a_panel_with_its_curve_band_bound_and_losses():
    records = cells()
    figure = drawn(source(records))["made_up"]
    found = panels(figure)
    # A column a model: the first row is every model's first shape.
    for ax, shape in zip(found, (SHAPES[0], SHAPES[2], SHAPES[1], SHAPES[3]), strict=True):
        assert ax.get_title(loc="left") == f"{shape[1]} → {shape[2]}   {shape[0]}"
        assert list(points(ax, style.OURS).items()) == list(SPEEDUPS.items())
        assert points(ax, style.LOSS) == {256: 0.92}
        assert points(ax, style.LOSS, "x") == {}
        (dashed,) = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
        bound = {r["m"]: r["bound"] for r in records if r["case"] == shape[0]}
        assert dict(zip(dashed.get_xdata(), dashed.get_ydata(), strict=True)) == bound
        assert len([line for line in ax.get_lines() if list(line.get_ydata()) == [1, 1]]) == 1
        band = ax.collections[0].get_datalim(ax.transData)
        assert (band.ymin, band.ymax) == (pytest.approx(0.89), pytest.approx(1.62))
        assert ax.get_xscale() == "log"
        low, high = ax.get_ylim()
        assert low <= 0.89 and high >= 1.62
    assert found[0].get_ylim() == found[2].get_ylim()
    assert "slower" in texts(figure) and "breaks the contract" not in texts(figure)


def test_a_broken_contract_is_marked():
    figure = drawn(source(cells(contract_ok=False)))["made_up"]
    assert points(figure.axes[0], style.LOSS, "x") == {16: 1.1}
    assert "breaks the contract" in texts(figure)


def test_failed_cells_leave_a_gap():
    figure = drawn(source(cells(error="out of memory")))["made_up"]
    assert 16 not in points(figure.axes[0], style.OURS)


def test_gpus_and_dtypes_overlay_and_only_like_is_compared_with_like():
    here = source([*cells(SHAPES[:1]), cell(SHAPES[0], 16, 1.4, dtype="float16")])
    there = source([cell(SHAPES[0], m, 2.0) for m in (1, 8)], head=OTHER_GPU)
    lone = source([cell(SHAPES[3], 1, 3.0)], head=OTHER_GPU)
    figure = drawn(here, there)["made_up"]
    (ax,) = panels(figure)
    assert points(ax, style.SERIES[0], "o") == SPEEDUPS
    assert points(ax, style.SERIES[1], "s") == {16: 1.4}
    assert points(ax, style.SERIES[2], "^") == {1: 2.0, 8: 2.0}
    said = texts(figure)
    for label in (
        "NVIDIA Made Up, bfloat16",
        "NVIDIA Made Up, float16",
        "AMD Thought Up, bfloat16",
    ):
        assert label in said
    # Another shape is another panel: never a point of the same curve.
    one, other = panels(drawn(here, lone)["made_up"])
    assert points(one, style.SERIES[2], "^") == {} and points(other, style.SERIES[0]) == {}
    assert points(other, style.SERIES[2], "^") == {1: 3.0}


def test_hidden_tables_and_the_dtype_are_told():
    untuned = source([cell(SHAPES[0], 1, 1.2, dtype="float16")], head={**HEAD, "tables": "off"})
    told = texts(drawn(untuned)["made_up"])
    assert "tables hidden" in told and "fused, float16" in told
    assert "hidden" not in texts(drawn(source(cells(SHAPES[:1])))["made_up"])


def test_the_caption_names_device_versions_and_what_is_stale():
    for records in (cells(SHAPES[:1]), MODELS, STEPS):
        for name, figure in drawn(source(records)).items():
            text = texts(figure)
            for part in ("NVIDIA Made Up", "2.11.0", "3.6.0", "5.17.0", "2026-01-02"):
                assert part in text, name
            assert results.kernel_hash()[:8] in text and "STALE" not in text
        for name, figure in drawn(source(records), source(records, head=OLD)).items():
            assert texts(figure).count("STALE") == 2, name  # its caption's line, and the mark


def test_bars_of_generate_say_speed_ratio_band_and_what_is_missing():
    figure = drawn(source([{**MODELS[0], "ms_q20": 20.0, "ms_q80": 50.0}, *MODELS[1:]]))["made_up"]
    (ax,) = panels(figure)
    assert [patch.get_width() for patch in ax.patches] == [40.0, 60.0, 300.0]
    assert list(ax.get_lines()[0].get_xdata()) == [20.0, 50.0]  # 40 · 25 ms / (50, 20) ms
    text = texts(figure)
    assert "60 tok/s, 300 kernels" in text and "1.50x stock eager" in text
    assert "not reported: disagrees" in text
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["stock  eager", "patched  eager", "stock  compiled", "patched  compiled"]
    low, high = sorted(ax.get_ylim())
    assert all(low < patch.get_y() < high for patch in ax.patches)


def test_bars_of_a_step_show_losses_in_red():
    figure = drawn(source(STEPS))["made_up"]
    (ax,) = panels(figure)
    assert [patch.get_width() for patch in ax.patches] == [2.0, 1.5, 1.8, 0.9]
    said = {text.get_text(): text.get_color() for text in ax.texts}
    assert said["0.83x stock reduce-overhead"] == style.LOSS
    assert said["1.67x stock reduce-overhead"] == style.OURS
    assert said[" not reported: other logits"] == style.LOSS
    assert "0.90 ms, 180 kernels" in said
    bands = [tuple(line.get_xdata()) for line in ax.get_lines()]
    assert bands[0] == (pytest.approx(1.94), pytest.approx(2.08))


def test_bars_of_two_gpus_stand_beside_each_other_with_their_own_ratios():
    slow = [{**r, "ms": 3 * r["ms"]} if "ms" in r else r for r in STEPS]
    (ax,) = panels(drawn(source(STEPS), source(slow, head=OTHER_GPU))["made_up"])
    widths = [patch.get_width() for patch in ax.patches]
    assert widths == pytest.approx([2.0, 6.0, 1.5, 4.5, 1.8, 5.4, 0.9, 2.7])
    assert len({patch.get_hatch() for patch in ax.patches}) == 2
    assert "AMD Thought Up" in ax.get_yticklabels()[1].get_text()


def test_nothing_to_draw_is_an_error():
    failed = {"model": "m", "mode": "eager", "variant": "stock", "error": "no"}
    with pytest.raises(results.ResultsError, match="no record has a speed"):
        drawn(source([failed]))
    with pytest.raises(results.ResultsError, match="no record has a time"):
        drawn(source([STEPS[4]]))
    only = cell(SHAPES[0], 1, 1.0)
    del only["speedup"]
    with pytest.raises(results.ResultsError, match="no record has a speedup"):
        speedup.figure([source([only])])
    said = []
    made = dict(drawing.figures([source([only])], said.append))
    assert sorted(made) == ["made_up_breakdown", "made_up_roofline"]
    assert len(said) == 2 and all(line.startswith("not drawn: made_up") for line in said)


@pytest.mark.parametrize("records", [cells(SHAPES[:1]), MODELS, STEPS])
def test_the_same_results_give_the_same_svg(records):
    first, again = (
        {name: style.as_svg(figure, "from") for name, figure in drawn(source(records)).items()}
        for _ in "12"
    )
    assert first == again
    for text in first.values():
        assert "<dc:date>" not in text and "<dc:source>from</dc:source>" in text


def test_the_command_writes_svg_and_png_and_tells_what_is_stale(tmp_path):
    results.save(tmp_path / "in" / "generate.json", OLD, MODELS)
    (tmp_path / "in" / "other.json").write_text('{"records": []}')
    done = call(tmp_path / "in", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [
        str(tmp_path / "out" / f"generate.{end}") for end in ("svg", "png")
    ]
    assert "stale: " in done.stderr and "kernels 01234567" in done.stderr
    assert "passed over: " in done.stderr and "other.json" in done.stderr
    picture = matplotlib.image.imread(tmp_path / "out" / "generate.png")
    assert picture.shape[1] == 1800
    assert (picture[0, 0] == 1).all()  # a solid white ground, also on a dark page


def test_folders_overlay_by_name_and_files_by_kind(tmp_path):
    for folder, head in (("a", HEAD), ("b", OTHER_GPU)):
        results.save(tmp_path / folder / "one.json", head, MODELS[:2])
        results.save(tmp_path / folder / "two.json", head, MODELS[:2])
    made = plots.draw([tmp_path / "a", tmp_path / "b"], tmp_path / "folders")
    assert sorted(path.name for path in made if path.suffix == ".svg") == ["one.svg", "two.svg"]
    files = [tmp_path / "a" / "one.json", tmp_path / "a" / "two.json"]
    made = plots.draw(files, tmp_path / "files")
    assert [path.name for path in made] == ["one.svg", "one.png"]
    told = made[0].read_text()
    assert "one.json sha256:" in told and "two.json sha256:" in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the results"),
        ("{", "is not a result file: not JSON"),
        ("[1, 2]", "no list 'records'"),
        (json.dumps({**HEAD, "schema": 99, "records": [MODELS[0]]}), "schema 99 is not"),
        (json.dumps({**HEAD, "records": []}), "holds no record"),
        (json.dumps({**HEAD, "records": [{"family": "a", "error": "no"}]}), "no figure for"),
        (json.dumps({"schema": 9, "sm_count": 1, "entries": []}), "schema 9 is newer"),
    ],
)  # fmt: skip
def test_a_bad_file_is_a_message_that_names_it(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    done = call(path, "--out", tmp_path / "out")
    assert done.exit_code == 2 and message in done.stderr and str(path) in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_and_a_place_that_cannot_be_written_are_messages(tmp_path):
    done = call(tmp_path)
    assert done.exit_code == 2 and "has no result file" in done.stderr
    results.save(tmp_path / "generate.json", HEAD, MODELS)
    (tmp_path / "taken").write_text("a file")
    done = call(tmp_path / "generate.json", "--out", tmp_path / "taken")
    assert done.exit_code == 2 and "give another folder with --out" in done.stderr
