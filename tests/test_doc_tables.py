"""README and docs/: what is between marks is what the result files and the code say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from planted_faults import FAULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import doc_tables, fault_instruments
from bench.doc_pages import code, overlap, pictures, readme, staleness
from bench.doc_pages.sources import Source
from flashnorm_triton import results

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "nvidia_h200"
STALENESS = (doc_tables.DOCS / "staleness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", doc_tables.PAGES)
def test_the_tables_are_those_of_the_results(name: str):
    """After new results: python bench/doc_tables.py."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert doc_tables.rendered(name, page, FOLDER) == page


@pytest.mark.parametrize("name", doc_tables.PAGES)
def test_every_mark_has_its_part(name: str):
    marks = re.findall(r"^<!-- (\w+) -->$", (ROOT / name).read_text(encoding="utf-8"), re.M)
    assert sorted(marks) == sorted(doc_tables.PAGES[name])


def test_every_fault_and_instrument_is_explained():
    for name in (*FAULTS, *fault_instruments.INSTRUMENTS, "lag"):
        assert f"| `{name}` | " in STALENESS or f"| {name} | " in STALENESS, name


def test_instruments_in_the_results_are_explained():
    path = FOLDER / "faults.json"
    if not path.exists():
        pytest.skip("no faults.json yet")
    for record in results.load(path).records:
        for key in ("fault", "instrument"):
            assert re.search(rf"^\| `?{record[key]}`? \| ", STALENESS, re.M), record[key]


def fault(name: str, instrument: str, caught: bool | None, detail: str = "so") -> dict:
    return {
        "fault": name, "instrument": instrument, "caught": caught, "launches": 7,
        "seconds": 1.0, "detail": detail, "false_alarm": False,
    }  # fmt: skip


def test_what_the_usual_checks_miss_is_told_in_their_numbers():
    records = [
        fault("no_wait", "unit", False, "error 1e-3"),
        fault("no_wait", "perplexity", False, "15.878, stock 15.879"),
        fault("no_wait", "lag", True),
        fault("no_wait", "racecheck", None),
        fault("no_fork", "unit", True),
        fault("no_fork", "perplexity", True),
        fault("dropped_slot", "unit", False),
    ]
    text = staleness.missed(records)
    assert text.splitlines() == [
        "- `no_wait`: unit: misses it (error 1e-3); perplexity: misses it (15.878, stock 15.879). "
        "Seen by lag."
    ]
    table = staleness.faults_table(records)
    assert "| fault | unit | perplexity | lag | racecheck |" in table
    assert "| `no_wait` | missed | missed | **seen** (7) | – |" in table


def test_runs_of_the_lag_detector():
    run = {
        "lag": "six", "mode": "graph", "watched": "sites", "tokens": 4096, "rows": 1, "clean": True,
        "found": None, "site_steps": 106470, "decidable": 1.0, "sites_decidable": 0.999,
        "worst": 0.654, "kl": 2.02e-4, "kl_stock": 2.37e-4, "seconds": 7.6,
    }  # fmt: skip
    text = staleness.lag_table([run, {**run, "found": "step 3", "worst": None, "kl": None}])
    first, second = text.splitlines()[2:]
    begin = "| six | graph | sites | 4,096 | 106,470 | none | "
    assert first == begin + "100.0 % | 99.9 % | 0.65 | 2.02 (2.37) | 8 |"
    assert "step 3" in second and "| – | – |" in second


def test_what_is_between_the_marks_is_replaced():
    page = "a\n<!-- overlap -->\nold\n<!-- /overlap -->\nb\n"
    assert doc_tables.put(page, "overlap", "new\n\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- faults -->"):
        doc_tables.put(page, "faults", "x")


def record(m: int, ours: float, epilogue: str = "", **more) -> dict:
    us = {"gemm_only": 5.0, "unfused": 9.0, "stock": 20.0, "sequential": 12.5, "chosen": 8.0}
    return {
        "k": 576, "n": 960, "dtype": "bfloat16", "epilogue": epilogue, "m": m, "us": ours,
        "baselines_us": us, "speedup": 9 / ours, "speedup_q20": 9 / ours, "speedup_q80": 9 / ours,
        "over": {name: value / ours for name, value in us.items()},
        "reduction": {name: 1 - ours / us[name] for name in ("sequential", "stock")}, **more,
    }  # fmt: skip


def test_words_and_rows():
    host = {"overlap": 40.0, "unfused": 25.0}
    text = overlap.overlap_tables([record(64, 10.0, host_us=host), record(256, 7.5, "x")])
    assert "| 64 | 5.0 | 9.0 | 20.0 | 12.5 | **10.0** | 20 % | 50 % |" in text
    assert "Of 2 cells two streams beat every way without a fused kernel in 1 and lose" in text
    assert "ahead by more than 2 % at: 576→960 bfloat16 LayerNorm + GELU M = 256 (1.07x)" in text
    assert "up to 15 µs a call more" in text


def test_what_is_older_than_the_kernels_is_marked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(results, "kernel_hash", lambda: "new")
    path = FOLDER / "decode.json"
    for made_with, told in (("new", ""), ("old", ", older than the kernels")):
        source = Source(path, {"kernel_hash": made_with}, ())
        link = "[decode.json](bench/results/nvidia_h200/decode.json)"
        assert source.cite(readme.README) == link + told
        assert source.cite(ROOT / "docs" / "measured.md") == link.replace("(", "(../") + told
    assert not Source(path, {"what": "tries"}, ()).older


@pytest.mark.parametrize(
    ("speedup", "word"), [(1.05, "wins"), (1.049, "ties"), (0.95, "ties"), (0.949, "**loses**")]
)
def test_words_for_a_speedup(speedup: float, word: str):
    assert readme.verdict(speedup) == word


def test_losses_stay_in_the_table():
    """A mean below one, and a run that did not end, are rows as the others."""
    base = {"op": "x", "k": 1, "n": 1, "plan": {"strategy": "unfused"}, "baselines_us": {}}
    rows = (1, 2, 32, 128, 1024)
    cells = tuple({**base, "m": m, "speedup": 0.9 if m == 32 else 1.5} for m in rows)
    step = {
        "model": "llama-3.2-1b",
        "batch": 1,
        "tokens": 8,
        "ms": 2.0,
        "launches": 9,
        "speedups": {"graph": 0.5},
    }
    step["speedups"]["reduce-overhead"] = 0.4
    ends = [("graph", "stock"), ("graph", "norm"), ("graph", "block")]
    ends += [("reduce-overhead", "stock"), ("reduce-overhead", "norm")]
    steps = [{**step, "mode": mode, "variant": variant} for mode, variant in ends]
    steps.append({**steps[0], "mode": "reduce-overhead", "variant": "block", "error": "no end"})
    steps.append({**steps[1], "batch": 8, "ms": 77.0, "speedups": {"graph": 9.0}})
    runs = [
        {
            "model": "llama-3.2-1b",
            "mode": mode,
            "variant": variant,
            "tokens_per_s": 10.0,
            "speedup": 1.0,
        }  # fmt: skip
        for mode in ("eager", "compiled")
        for variant in ("stock", "patched")
    ]
    header = {"gpu": "a GPU", "kernel_hash": "old"}
    text = readme.gains(
        *(
            Source(FOLDER / name, header, tuple(records))
            for name, records in (("a.json", cells), ("b.json", steps), ("c.json", runs))
        )
    )
    assert "| the operation, 32 and 64 rows | fastest unfused | 0.90 (0.90) | **loses** |" in text
    assert "| stock, compiled | no end | **loses** |" in text
    assert "| 0.40 (2.00 → 2.00 ms, 9 → 9 kernels) | **loses** |" in text
    assert "(10 → 10 tokens/s, older) | ties |" in text
    assert "77" not in text and "(docs/measured.md#whole-models)" in text
    assert text.count("older than the kernels") == 3 and "5 of the cells run unfused" in text


def test_arguments_are_spelled_as_the_parser_has_them():
    """The page of commands is made from what functions declare: held to each command's help."""
    from typer.testing import CliRunner

    from flashnorm_triton.cli import app

    names = code.registered()
    assert {"demo", "audit", "tune", "fold", "verify", "info"} <= set(names)
    for name, callback in names.items():
        done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
        assert done.exit_code == 0
        for argument in code.declared(callback):
            for spelling in argument.spellings:
                assert spelling.lower() in done.output.lower(), (name, spelling)


def test_a_docstring_becomes_markdown():
    text = code._described(
        "Do :func:`x` to ``y``.\n\nMore\nof it.\n\nArgs:\n    a: one\n        thing.\n"
        "    b (c): two.\n\nReturns:\n    What\n    comes.\n\nRaises ValueError."
    )
    assert text == (
        "Do `x` to `y`.\n\nMore of it.\n\n**Args**\n\n- `a`: one thing.\n- `b (c)`: two.\n\n"
        "**Returns** What comes.\n\nRaises ValueError.\n"
    )


def test_every_family_of_figures_has_words():
    from flashnorm_triton.plots import drawing

    stems = {"operation": "norm_linear", "step": "decode"}
    for kind, families in drawing.FAMILIES.items():
        for suffix, _ in families:
            assert pictures.caption(stems.get(kind, kind) + suffix), (kind, suffix)
    with pytest.raises(ValueError, match="does not say what other shows"):
        pictures.caption("other")
