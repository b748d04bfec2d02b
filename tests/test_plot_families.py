"""Figures of operations, profiles, ladders and the paper's cells: drawn is what was measured."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from plot_records import (
    HEAD,
    LADDER,
    OTHER_GPU,
    SHAPES,
    SPEEDUPS,
    TOKENS,
    cell,
    cells,
    drawn,
    panels,
    paper_cell,
    points,
    profile,
    rungs,
    source,
    texts,
)

from flashnorm_triton import results, tables
from flashnorm_triton.plans import Plan
from flashnorm_triton.plots import drawing, roofline, share, sources, style, waterfall, winners


def bars_of(ax):
    """(left, bottom, width, height, colour) of each bar."""
    return [(p.get_x(), p.get_y(), p.get_width(), p.get_height(), to_hex(p.get_facecolor()))
            for p in ax.patches]  # fmt: skip


def test_breakdown_stacks_the_norm_on_the_matmul_beside_the_fused_time():
    records = cells(SHAPES[:2])
    # Where a compiler beats the bare matmul there is nothing on top of it.
    records[0]["baselines_us"]["compiled"] = 0.9 * records[0]["baselines_us"]["gemm_only"]
    figure = drawn(source(records))["made_up_breakdown"]
    for ax, shape in zip(panels(figure), SHAPES[:2], strict=True):
        own = sorted((r for r in records if r["case"] == shape[0]), key=lambda r: r["m"])
        found = iter(bars_of(ax))
        for r in own:
            bare, unfused = (r["baselines_us"][name] for name in ("gemm_only", "compiled"))
            _, _, _, height, color = next(found)
            assert color == style.STOCK and height == pytest.approx(min(1, unfused / bare))
            if unfused > bare:
                _, bottom, _, height, color = next(found)
                assert (bottom, color) == (1, style.NORM)
                assert bottom + height == pytest.approx(unfused / bare)
            _, _, _, height, color = next(found)
            assert height == pytest.approx(r["us"] / bare)
            assert color == (style.LOSS if r["us"] > unfused else style.OURS)
        assert next(found, None) is None
        marks = [tick.get_text() for tick in ax.get_xticklabels()]
        assert [mark.split("\n")[0] for mark in marks] == [str(m) for m in TOKENS]
        assert marks[0].split("\n")[1] == f"{own[0]['baselines_us']['gemm_only']:.1f}"
        level = [line for line in ax.get_lines() if list(line.get_ydata()) == [1, 1]]
        assert len(level) == 1
    assert "fused is slower" in texts(figure) and "time / bare matmul" in texts(figure)
    bare = [{**r, "best_unfused": None} for r in records]
    with pytest.raises(results.ResultsError, match="bare matmul and an unfused way"):
        drawing.breakdown.figure([source(bare)])


def test_winner_map_colours_the_plan_and_marks_ties_and_losses():
    records = [
        cell(SHAPES[0], 1, 1.6),
        cell(SHAPES[0], 4, 0.9, plan={"strategy": "unfused", "form": "library"}),
        cell(SHAPES[1], 1, 1.01, plan={"strategy": "stats_then_gemm", "form": "hopper_rows"}),
        cell(SHAPES[1], 4, 1.2, plan={"strategy": "single_pass", "form": "yet to come"}),
        cell(SHAPES[1], 16, 1.2, plan=None),
    ]
    figure = drawn(source(records))["made_up_winners"]
    (ax,) = panels(figure)
    filled = {(p.get_x() + 0.5, p.get_y() + 0.5): to_hex(p.get_facecolor())
              for p in ax.patches if isinstance(p, Rectangle) and p.get_fill()}  # fmt: skip
    assert filled == {
        (0, 0): winners.PLANS["single_pass", "gemv"][0],
        (1, 0): winners.PLANS["unfused", "library"][0],
        (0, 1): winners.PLANS["stats_then_gemm", "hopper_rows"][0],
        (1, 1): winners._OTHER[0],
    }
    said = {t.get_position(): t.get_text() for t in ax.texts}
    assert said == {(0, 0): "1.60", (1, 0): "0.90", (0, 1): "= 1.01", (1, 1): "1.20"}
    framed = [p for p in ax.patches if not p.get_fill()]
    assert [(p.get_x(), p.get_y()) for p in framed] == [(0.55, -0.42)]
    assert to_hex(framed[0].get_edgecolor()) == style.LOSS
    assert [t.get_text() for t in ax.get_yticklabels()][1] == "small.gate_up  576→3072"
    assert "slower than unfused" in texts(figure) and "the 20–80 % band holds 1" in texts(figure)


def table_of(*rows):
    gpu = tables.Gpu("NVIDIA Made Up", 7, 90)
    run = tables.Run("2026-01-02T03:04:05Z", "2.11.0", "3.6.0", results.kernel_hash(), "full")
    return tables.Table(gpu, {
        tables.Key("norm_linear", "bfloat16", 960, 576, m): tables.Entry(
            plan, us, baseline, us, 1e-3, 1e-3, run
        )
        for m, plan, us, baseline in rows
    })  # fmt: skip


def test_winner_map_of_a_tuned_table(tmp_path):
    library = Plan("unfused", "library")
    gemv = Plan("single_pass", "gemv", block_m=1, block_n=2, block_k=256)
    table = table_of((1, gemv, 2.0, 3.0), (4, gemv, 3.0, 2.0), (16, library, 2.0, 2.1))
    tables.write(tmp_path / "nvidia_made_up.json", table)
    read = sources.read(tmp_path / "nvidia_made_up.json")
    assert (read.kind, read.stale) == ("table", False)
    figure = drawn(read)["table_nvidia_made_up_winners"]
    (ax,) = panels(figure)
    assert [t.get_text() for t in ax.texts] == ["1.50", "0.67", "= 1.05"]
    assert len([p for p in ax.patches if not p.get_fill()]) == 1
    assert "within 1 %, or unfused itself" in texts(figure)
    assert "NVIDIA Made Up" in texts(figure) and "STALE" not in texts(figure)
    tables.write(tmp_path / "none.json", tables.Table(tables.Gpu("NVIDIA Made Up", 7, 90)))
    with pytest.raises(results.ResultsError, match=r"none\.json.* no entry to draw"):
        sources.read(tmp_path / "none.json")


def test_roofline_has_the_measured_ceilings_and_the_achieved_rates():
    records = [cell(SHAPES[2], m, speedup) for m, speedup in SPEEDUPS.items()]
    records.append(cell(SHAPES[2], 2, 1.5, dtype="float32"))
    figure = drawn(source(records))["made_up_roofline"]
    flops, moved = panels(figure)
    roof = flops.get_lines()[0].get_ydata()
    assert max(roof) == HEAD["matmul_tflops"]
    assert flops.get_lines()[0].get_xdata()[0] * HEAD["copy_tb_s"] == pytest.approx(roof[0])
    assert max(moved.get_lines()[0].get_ydata()) == HEAD["copy_tb_s"]
    k, n = 2048, 3072
    for r in records[:-1]:
        m, seconds = r["m"], r["us"] / 1e6
        nbytes = 2 * (m * k + n * k + m * n)
        x = 2 * m * n * k / nbytes
        for ax, rate in ((flops, 2 * m * n * k / seconds / 1e12), (moved, nbytes / seconds / 1e12)):
            ours = points(ax, style.SERIES[0])
            at = min(ours, key=lambda found: abs(found - x))
            assert (at, ours[at]) == (pytest.approx(x), pytest.approx(rate)), m
    hollow = [line for line in flops.get_lines() if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 1 and len(hollow[0].get_xdata()) == len(SPEEDUPS)
    assert len(points(flops, style.LOSS)) == 1  # M = 256
    assert flops.get_xscale() == flops.get_yscale() == moved.get_xscale() == "log"
    assert "FLOP / byte" in texts(figure) and "copy 4.00 TB/s" in texts(figure)
    unmeasured = source(records, head={**HEAD, "copy_tb_s": 0.0})
    with pytest.raises(results.ResultsError, match="measured ceilings"):
        roofline.figure([unmeasured])


def test_rooflines_of_two_gpus_keep_their_own_ceilings():
    other = {**OTHER_GPU, "copy_tb_s": 2.0}
    records = [cell(SHAPES[2], 1, 1.2), cell(SHAPES[2], 64, 1.2)]
    made = drawn(source(records), source(records, head=other))["made_up_roofline"]
    _, moved, _, other_moved = panels(made)
    assert max(moved.get_lines()[0].get_ydata()) == 4.0
    assert max(other_moved.get_lines()[0].get_ydata()) == 2.0


def test_waterfall_goes_from_stock_to_patched_by_what_each_group_changes():
    stock, block = profile("stock"), profile("block")
    made = drawn(source([stock, block, profile("block", "compiled")]))["made_up_waterfall"]
    us, launches = panels(made)  # the compiled one has no stock beside it
    moved = waterfall.changes(stock, block, "us")
    assert moved["norm"] == -stock["groups"][0]["us"] and moved["matmul"] > 0
    found = bars_of(us)
    whole = [sum(g["us"] for g in r["groups"]) for r in (stock, block)]
    assert (found[0][3], found[-1][3]) == (pytest.approx(whole[0]), pytest.approx(whole[1]))
    assert found[1][1:2] == (pytest.approx(whole[0]),) and found[1][3] == pytest.approx(
        moved["norm"]
    )
    colors = {t.get_text(): bar[4] for t, bar in zip(us.get_xticklabels(), found, strict=True)}
    assert colors["norm"] == waterfall.SAVED and colors["matmul"] == style.LOSS
    # Each bar begins where the one before it ends, and the last change ends at the total.
    ends = [bottom + height for _, bottom, _, height, _ in found]
    assert [bar[1] for bar in found[1:-1]] == pytest.approx(ends[:-2])
    assert ends[-2] == pytest.approx(whole[1])
    assert [bar[3] for bar in bars_of(launches)] == [449, -198, -80, 171]
    said = texts(made)
    assert "−198" in said and "µs of kernels" in said
    assert f"{stock['ms']:.3g} → {block['ms']:.3g} ms a step" in said
    with pytest.raises(results.ResultsError, match="beside a patched one"):
        waterfall.figure([source([stock])])


def test_small_changes_are_drawn_together_and_none_is_lost():
    stock, block = profile("stock"), profile("block")
    block["groups"] += [{"group": "copy", "launches": 1, "us": 2.0},
                        {"group": "cache", "launches": 1, "us": 3.0}]  # fmt: skip
    us, _ = panels(waterfall.figure([source([stock, block])]))
    names = [t.get_text() for t in us.get_xticklabels()]
    assert "copy" not in names and names[-2:] == ["rest", "patched"]
    total = sum(bar[3] for bar in bars_of(us)[:-1])
    assert total == pytest.approx(sum(g["us"] for g in block["groups"]))


def test_norm_share_says_norms_launches_and_what_is_missing():
    eager = {**profile("stock", "eager", "int4"), "norm_wall_share": 0.4}
    keys = ("model", "mode", "variant", "quantization", "batch", "tokens", "dtype")
    missing = {key: eager[key] for key in keys} | {"variant": "block", "error": "no blocks"}
    records = [profile("stock"), profile("block"), eager, missing]
    made = drawn(source(records))["made_up_norm_share"]
    (ax,) = panels(made)
    widths = [bar[2] for bar in bars_of(ax)]
    assert widths == pytest.approx([100 * r["norm_share"] for r in records[:3]])
    said = texts(made)
    assert "33 norms in 198 launches" in said and "33 norms, no launch of their own" in said
    assert "stock  eager  int4" in said and "not reported: no blocks" in said
    assert points(ax, style.INK, "D") == {40.0: 2}
    with pytest.raises(results.ResultsError, match="norms' share"):
        share.figure([source([missing])])


def test_the_ladder_has_a_rung_each_and_red_ones():
    records = rungs()
    made = drawn(source(records))["made_up"]
    one, other, whole = panels(made)
    assert [t.get_text() for t in one.get_xticklabels()] == [
        drawing.ladder.NAMES[rung] for rung in LADDER
    ]
    for ax, case in ((one, "large.qkv"), (other, "large.gate_up")):
        own = {r["rung"]: r for r in records if r.get("case") == case and r["m"] == 1
               and "us" in r}  # fmt: skip
        found = points(ax, drawing.ladder._SHADES[0])
        assert list(found.values()) == [own[rung]["speedup"] for rung in LADDER]
        assert points(ax, style.LOSS) == {1: pytest.approx(0.9)}
        assert len([line for line in ax.get_lines() if list(line.get_ydata()) == [1, 1]]) == 1
        low, high = drawing.ladder.band(own["fused"])
        assert low == pytest.approx(own["fused"]["speedup"] / 1.05)
        assert high == pytest.approx(own["fused"]["speedup"] / 0.98)
        assert len(ax.collections) == 3
    steps = [r for r in records if r["level"] == "decode"]
    assert [bar[2] for bar in bars_of(whole)] == [r["ms"] for r in steps if "ms" in r]
    said = texts(made)
    assert "not reported: not ready after 35 s" in said and "1 token\n" in said
    assert "whole blocks" in said and "speedup over stock" in said
    with pytest.raises(results.ResultsError, match="no rung"):
        drawing.ladder.figure([source([r for r in records if r.get("error")])])


def test_the_papers_cells_stand_beside_ours_wins_and_losses_counted():
    rows = [paper_cell(1, 0.35, 0.5), paper_cell(64, 0.1, 0.02), paper_cell(256, 0.2, -0.1),
            paper_cell(1024, 0.05, None)]  # fmt: skip
    made = drawn(source(rows))["made_up"]
    (ax,) = panels(made)
    hollow = [line for line in ax.get_lines() if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == pytest.approx([35, 10, 20, 5])
    filled = [(line.get_xdata()[0], to_hex(line.get_color())) for line in ax.get_lines()
              if line.get_marker() == "o" and line not in hollow]  # fmt: skip
    assert filled == [(50, style.OURS), (2, style.OURS), (-10, style.LOSS)]
    best = [(line.get_xdata()[0], to_hex(line.get_color())) for line in ax.get_lines()
            if line.get_marker() == "|"]  # fmt: skip
    assert best == [(pytest.approx(45), style.OURS), (pytest.approx(-3), style.LOSS),
                    (pytest.approx(-15), style.LOSS)]  # fmt: skip
    said = texts(made)
    assert "table 8, NVIDIA A100: 1 of 3 won" in said and "not measured here" in said
    assert "% of the unfused time saved" in said and "here, NVIDIA Made Up" in said
    with pytest.raises(results.ResultsError, match="no cell of the paper"):
        drawing.paper.figure([source([paper_cell(1, 0.1, None)])])


def test_launches_of_a_step_beside_its_time_and_floor():
    step = {"model": "large", "batch": 1, "tokens": 512, "dtype": "bfloat16", "mode": "graph",
            "tokens_per_s": 500.0, "fraction_of_bandwidth": 0.3, "speedups": {}}  # fmt: skip
    records = [
        {**step, "variant": "stock", "ms": 2.0, "launches": 800, "floor_ms": 0.6},
        {**step, "variant": "block", "ms": 0.9, "launches": 149, "floor_ms": 0.6},
    ]
    left, right = panels(drawn(source(records, "decode"))["decode_launches"])
    assert [bar[2] for bar in bars_of(left)] == [800, 149]
    assert [bar[2] for bar in bars_of(right)] == [2.0, 0.9]
    assert [list(line.get_xdata()) for line in right.get_lines()] == [[0.6, 0.6]] * 2
    assert left.get_xlabel() == "kernel launches" and "ms of GPU time" in right.get_xlabel()
