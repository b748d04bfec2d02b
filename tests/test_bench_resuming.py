"""Going on with a result file: what is kept, what is set aside, and that nothing is lost."""

from __future__ import annotations

import pytest

from flashnorm_triton import results
from flashnorm_triton.bench import decode, generate, report, resuming, running

HEAD = results.header(copy_tb_s=4.0, matmul_tflops=800.0, gpu="NVIDIA H200")
SETTINGS = {"rounds": 15}


def record(m: int, **more):
    return {
        "case": "a.qkv", "op": "norm_linear", "dtype": "bfloat16", "m": m, "n": 64, "k": 32,
        "plan": {}, "us": 2.0, "us_q20": 1.9, "us_q80": 2.1, "baselines_us": {"stock": 3.0},
        "floor_us": 1.0, "rel_err": 1e-3, "rel_err_stock": 1e-3, "speedup": 1.5, **more,
    }  # fmt: skip


def begin(path, head=HEAD, settings=SETTINGS, *, resume=True):
    said: list[str] = []
    kept = resuming.begin(path, head, settings, resume=resume, log=said.append)
    return kept, " ".join(said)


def test_measured_records_are_kept_and_failed_ones_are_not(tmp_path):
    path = tmp_path / "norm_linear.json"
    first, _ = begin(path)
    first.save([record(1), {**record(2), "error": "out of memory"}], goals=[])
    again, said = begin(path, {**HEAD, "copy_tb_s": 3.0, "date": "2027-01-01T00:00:00Z"})
    assert "1 records are there" in said
    assert again.has(case="a.qkv", m=1) and not again.has(case="a.qkv", m=2)
    assert again.head["copy_tb_s"] == 4.0  # the floors that are there were computed with it
    again.save([record(2)])
    loaded = results.load(path)
    assert [r["m"] for r in loaded.records] == [1, 2] and loaded.header["settings"] == SETTINGS
    third, _ = begin(path)
    third.forget(m=1)
    assert not third.has(m=1) and third.has(m=2)


@pytest.mark.parametrize(
    ("head", "settings", "why"),
    [
        ({**HEAD, "gpu": "NVIDIA L4"}, SETTINGS, "it is of gpu NVIDIA H200, this is NVIDIA L4"),
        ({**HEAD, "kernel_hash": "ab" * 20}, SETTINGS, "kernel_hash"),
        ({**HEAD, "torch": "9.9"}, SETTINGS, "this is 9.9"),
        (HEAD, {"rounds": 21}, "it is of rounds = 15, this is 21"),
        (HEAD, {"rounds": 15, "compiled": True}, "compiled = None, this is True"),
    ],
)
def test_a_file_of_something_else_is_set_aside(tmp_path, head, settings, why):
    path = tmp_path / "norm_linear.json"
    begin(path)[0].save([record(1)])
    content = path.read_bytes()
    kept, said = begin(path, head, settings)
    assert not kept.records and why in said and not path.exists()
    (old,) = tmp_path.glob("norm_linear.json.*.old")
    assert old.read_bytes() == content and old.name in said
    assert not list(tmp_path.glob("*.json"))  # no picture is drawn of it


def test_a_damaged_file_is_set_aside_and_an_old_one_never_overwritten(tmp_path):
    path = tmp_path / "decode.json"
    for content in ("{", "{}", '{"records": []}'):
        path.write_text(content)
        assert not begin(path)[0].records
    assert sorted(p.read_text() for p in tmp_path.glob("*.old")) == sorted(
        ["{", "{}", '{"records": []}']
    )


def test_without_resume_the_file_is_written_anew(tmp_path):
    path = tmp_path / "decode.json"
    begin(path)[0].save([record(1)])
    assert not begin(path, resume=False)[0].records
    assert len(results.load(path).records) == 1  # until there is something to write


def test_a_screen_is_told_of_lines_steps_and_records(tmp_path):
    told: list[object] = []

    class Screen(report.Screen):
        def line(self, text):
            told.append(text)

        def track(self, items, label):
            for item in items:
                yield item
                told.append((label, item))

        def found(self, records):
            told.append(len(records))

    with report.shown_on(Screen()):
        for item in report.progress([7], "op"):
            report.say("hello")
            begin(tmp_path / "x.json")[0].save([record(item)])
    assert told == ["hello", 1, ("op", 7)]
    assert type(report._screen) is report.Screen


def test_a_decode_cell_of_which_a_contender_is_missing_is_measured_whole(tmp_path):
    words = ["--models", "tiny", "--baselines", "eager", "--modes", "eager", "--levels", "block"]
    words += ["--device", "cpu", "--out", str(tmp_path)]
    args = decode.parse([*words, "--batches", "1", "2"], "decode")
    everyone = [w for wave in decode.waves(args) for group in wave for w in group]
    assert len(everyone) == 4
    speed = {"ms": 1.0, "tokens_per_s": 1.0, "launches": None, "fraction_of_bandwidth": None}
    kept = resuming.Kept(tmp_path / "decode.json", HEAD)
    kept.before = tuple({**decode.identity(what), **speed} for what in everyone[:3])
    ((group,),) = decode.waves_left(args, kept)
    assert group == everyone[2:] and len(kept.before) == 2
    assert all(kept.has(**decode.identity(what)) for what in everyone[:2])


def test_a_mode_of_which_one_model_is_missing_is_measured_for_both(tmp_path):
    args = generate.parse(["--out", str(tmp_path)])
    kept = resuming.Kept(tmp_path / "generate.json", HEAD)
    names = [("eager", "stock"), ("eager", "patched"), ("compiled", "stock")]
    kept.before = tuple(generate.identity(args.size, *name, "bfloat16") for name in names)
    assert generate.modes_left(args, kept) == ["compiled"] and len(kept.before) == 2
    other = generate.parse(["--out", str(tmp_path), "--dtype", "fp16"])
    assert generate.modes_left(other, kept) == ["eager", "compiled"]


@pytest.mark.parametrize(
    ("out", "wanted"),
    [
        (None, "flashnorm-results/nvidia_h200/x.json"),
        ("mine.json", "mine.json"),
        ("a/folder", "a/folder/x.json"),
    ],
)
def test_where_results_go(out, wanted):
    path = None if out is None else running.Path(out)
    assert running.result_file(path, "NVIDIA H200", "x.json").as_posix() == wanted
