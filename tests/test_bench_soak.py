"""bench/soak.py: what it counts and how it judges, with made-up launchers and on a CPU."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import soak, soak_members
from flashnorm_triton import plans, results, tables
from flashnorm_triton.bench import report
from flashnorm_triton.plans import UNFUSED, Device, Plan, Problem
from flashnorm_triton.tuning import measure, validate

HEAD = {
    "schema": 1, "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip
H200 = Device("cuda", 90, 132, gluon=True)


class Fake:
    """Launches 100 a graph and 4 one by one; every ``period``-th launch moves a bit."""

    us = 500.0

    def __init__(self, period: int = 0) -> None:
        self.period, self.made, self.told, self.streams = period, 0, 0, set()

    def replay(self, stream: int) -> int:
        self.streams.add(stream)
        self.made += 100
        return 100

    def launch(self, stream: int) -> int:
        self.made += 4
        return 4

    def settle(self) -> int:
        moved = self.made // self.period if self.period else 0
        fresh, self.told = moved - self.told, moved
        return fresh


class World:
    """A clock that a batch moves by a second, and what was asked of the GPU."""

    def __init__(self) -> None:
        self.now, self.loaded, self.waits = 0.0, 0.0, 0

    def options(self, **more):
        return {
            "rng": random.Random(0), "load": self.load, "synchronize": self.wait,
            "clock": lambda: self.now, **more,
        }  # fmt: skip

    def load(self, us: float) -> None:
        self.loaded += us

    def wait(self) -> None:
        self.waits += 1
        self.now += 1.0


class Log(report.Log):
    def __init__(self, world: World) -> None:
        self.world, self.lines = world, []

    @property
    def seconds(self) -> float:
        return self.world.now

    def __call__(self, text: str) -> None:
        self.lines.append(text)


def test_it_launches_until_there_are_enough_always_under_load():
    world, members = World(), [Fake(), Fake()]
    tally = soak.soak(members, wanted=10_000, seconds=1e9, **world.options())
    assert 10_000 <= tally.total < 10_000 + 24 * 100
    assert tally.launches == [member.made for member in members] and min(tally.launches) > 2000
    assert 0 < tally.plain < tally.total / 10 and tally.mismatches == [0, 0]
    assert world.loaded == 24 * 500.0 * world.waits
    assert members[0].streams == {0, 1, 2}


def test_it_stops_when_the_time_is_up():
    world = World()
    tally = soak.soak([Fake()], wanted=10**9, seconds=3.0, **world.options())
    assert world.waits == 3 and tally.seconds == 3.0 and tally.total == tally.launches[0]


@pytest.mark.parametrize("period", [1, 997, 9_000])
def test_a_single_moved_bit_is_counted_and_fails_the_family(period):
    world, members = World(), [Fake(), Fake(period)]
    tally = soak.soak(members, wanted=20_000, seconds=1e9, **world.options())
    assert tally.mismatches == [0, tally.launches[1] // period] and tally.mismatches[1] > 0
    family = soak.Family("a")
    family.add(tally, [{"problem": "p", "plan": "sound"}, {"problem": "p", "plan": "racing"}])
    record = family.record(20_000)
    results.validate(HEAD, [record])
    assert record["mismatches"] == tally.mismatches[1] and not record["goal_met"]
    assert "racing" in family.bad()


def run_all(tmp_path, families, known=None, world=None, ready=lambda member: member, **options):
    world = world or World()
    path = tmp_path / "soak.json"
    log = Log(world)
    records = soak.run_all(
        families,
        known or {},
        ready=ready,
        describe=lambda member, made: {"problem": "p", "plan": str(id(member))},
        save=lambda records: results.save(path, HEAD, records),
        wanted=5_000,
        log=log,
        **{"seconds": 1e6, **world.options(), **options},
    )
    assert [r["family"] for r in results.load(path).records] == [r["family"] for r in records]
    return records, path, log


def test_every_family_gets_its_launches_and_a_sound_run_meets_its_goal(tmp_path):
    records, _, log = run_all(tmp_path, {"a": [Fake()], "b": [Fake(), Fake()]})
    assert all(r["goal_met"] and r["launches"] >= 5_000 for r in records)
    assert len(log.lines) == 2 and "families" in soak.table(records, 5_000)
    assert "no moved bit: 2 of 2" in soak.table(records, 5_000)


def test_a_run_out_of_time_is_short_and_the_next_one_goes_on(tmp_path):
    families = {"a": [Fake()], "b": [Fake()]}
    records, path, _ = run_all(tmp_path, families, seconds=3.0)
    assert not any(r["goal_met"] for r in records) and all(r["launches"] for r in records)
    before = {r["family"]: r["launches"] for r in records}
    known = soak.resumed(path, HEAD)
    assert {name: family.launches for name, family in known.items()} == before
    records, _, _ = run_all(tmp_path, families, known)
    assert all(r["goal_met"] for r in records)
    made = families["a"][0].made
    assert records[0]["launches"] == made == records[0]["members"][0]["launches"]
    # What is finished is not launched again, and stays in the file.
    records, _, _ = run_all(tmp_path, {"b": families["b"]}, soak.resumed(path, HEAD))
    assert [r["family"] for r in records] == ["a", "b"] and families["a"][0].made == made


@pytest.mark.parametrize("changed", ["gpu", "torch", "triton", "kernel_hash"])
def test_counts_of_other_kernels_or_versions_are_not_taken_over(tmp_path, changed):
    _, path, _ = run_all(tmp_path, {"a": [Fake()]})
    assert soak.resumed(path, {**HEAD, "date": "later"})
    assert not soak.resumed(path, {**HEAD, changed: "other"})
    assert not soak.resumed(tmp_path / "none.json", HEAD)


def test_a_family_that_failed_begins_anew(tmp_path):
    _, path, _ = run_all(tmp_path, {"a": [Fake(period=50)], "b": [Fake()]})
    assert list(soak.resumed(path, HEAD)) == ["b"]


def test_a_member_that_is_wrong_at_once_fails_its_family_and_the_others_go_on(tmp_path):
    def ready(member):
        if member.us == 1.0:
            raise ValueError("wrong at the first launch: relative error 0.5")
        return member

    broken = Fake()
    broken.us = 1.0
    families = {"a": [broken, Fake()], "b": [Fake()]}
    records, _, log = run_all(tmp_path, families, ready=ready)
    assert [r["goal_met"] for r in records] == [False, True]
    assert records[0]["launches"] >= 5_000 and broken.made == 0
    assert "relative error 0.5" in log.lines[0]


def test_an_error_while_launching_ends_the_run_with_what_is_known(tmp_path):
    class Lost(Fake):
        def replay(self, stream):
            raise RuntimeError("an illegal memory access was encountered")

    records, path, _ = run_all(tmp_path, {"a": [Fake()], "b": [Lost()], "c": [Fake()]})
    assert [r["goal_met"] for r in records] == [True, False, False]
    assert "illegal memory access" in records[1]["error"] and records[2]["launches"] == 0
    assert "illegal" in soak.table(results.load(path).records, 5_000)


# Members


def test_every_family_that_ships_has_members_that_fit():
    rng = random.Random(0)
    pool = soak_members.pool(tables.Gpu("NVIDIA H200", 132, 90), H200)
    pool = list(soak_members.with_epilogues(pool))
    found = soak_members.families(pool, H200, 4, rng)
    assert {
        "single_pass/gemv", "single_pass/hopper_swap", "single_pass/hopper_swap/split",
        "single_pass/hopper_rows/own", "stats_then_gemm/hopper_rows/given",
        "single_pass/tiles/shared", "single_pass/tiles/own", "stats_then_gemm/tiles/given",
        "stats_then_gemm/scaled_gemm", soak_members.NORM,
    } <= set(found)  # fmt: skip
    for family, members in found.items():
        assert 1 <= len(members) <= 4
        for member in members:
            assert member.family == family
            assert soak_members.limits.unfit(member.plan, member.problem, H200) is None
    for form, served in plans.EPILOGUES.items():
        if form not in ("library", "reference") and "centred" in served:
            assert any(f"/{form}" in name and "centred" in name for name in found)
    shipped = {soak_members.Member(problem, plan).family for problem, plan in plans.shipped_plans()}
    tabled = {
        soak_members.Member(PROBLEM, entry.plan).family
        for path in tables.SHIPPED.glob("*.json")
        for entry in tables.read(path).entries.values()
    }
    assert shipped | tabled <= set(found)


PROBLEM = Problem("float32", 3, 96, 128, has_bias=True)


def test_row_counts_are_drawn_within_the_bucket():
    member = soak_members.Member(Problem("bfloat16", 64, 960, 576), UNFUSED)
    drawn = {
        soak_members._within_bucket(member, random.Random(seed)).problem.m for seed in range(60)
    }
    assert min(drawn) > 32 and max(drawn) <= 64 and len(drawn) > 15


def test_differing_counts_launches_not_values():
    wanted = [torch.randn(2, 5) for _ in range(3)]
    outputs = [tensor.clone() for tensor in wanted]
    stack = torch.stack([validate.bits(tensor) for tensor in wanted])
    assert int(soak_members.differing(outputs, stack)) == 0
    outputs[1][0, 2] = torch.nextafter(outputs[1][0, 2], torch.tensor(9.0))
    outputs[1][1, 4] = -7.0
    assert int(soak_members.differing(outputs, stack)) == 1
    outputs[2][0, 0] = float("nan")
    assert int(soak_members.differing(outputs, stack)) == 2


class NoStream:
    """A torch stream of a machine without a GPU: its context does nothing."""


@pytest.fixture
def no_streams(monkeypatch):
    import contextlib

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return [NoStream() for _ in range(soak.STREAMS)]


def test_a_ready_member_launches_and_finds_a_planted_fault(no_streams, monkeypatch):
    torch.manual_seed(0)
    calls = []
    true_op = soak_members.rig.norm_linear

    def op(x, weight, eps, bias, gain, plan):
        calls.append(x)
        y = true_op(x, weight, eps, bias, gain)
        if len(calls) == broken:
            y.view(torch.int32)[0, 1] ^= 1
        return y

    broken = -1
    monkeypatch.setattr(soak_members.rig, "norm_linear", op)
    plan = Plan("single_pass", "gemv", 4, 16, 64)
    ready = soak_members.make_ready(soak_members.Member(PROBLEM, plan), no_streams, "cpu")
    assert ready.verdict.reason is None and ready.launch(0) == 16 and ready.settle() == 0
    broken = len(calls) + 5
    assert ready.launch(1) == 16 and ready.launch(0) == 16
    assert ready.settle() == 1 and ready.settle() == 0
    assert "96 M=3 float32 bias" in soak_members.describe(ready.member, ready)["problem"]


def test_a_member_wrong_at_its_first_launch_is_refused(no_streams, monkeypatch):
    monkeypatch.setattr(
        soak_members.rig, "norm_linear", lambda x, w, *rest, plan: x.new_ones(len(x), len(w))
    )
    member = soak_members.Member(PROBLEM, Plan("single_pass", "gemv", 4, 16, 64))
    with pytest.raises(ValueError, match="wrong at the first launch"):
        soak_members.make_ready(member, no_streams, "cpu")


@pytest.mark.parametrize(
    ("reasons", "draws"),
    [
        (["largest error 2"], 2),
        (["largest error 2"] * 3, 3),
        (["relative error 2", None], 1),
        (["leaves values unwritten", None], 1),
    ],
)
def test_only_the_noisy_figure_is_drawn_again(no_streams, monkeypatch, reasons, draws):
    drawn = []

    def check(case, run):
        drawn.append(case)
        reason = reasons[len(drawn) - 1] if len(drawn) <= len(reasons) else None
        return validate.Verdict(reason, 1.0, 1.0), [run(part) for part in case.parts]

    monkeypatch.setattr(validate, "check_values", check)
    member = soak_members.Member(Problem("float32", 3, 96, 128), UNFUSED)
    if len(reasons) == 1:
        assert soak_members.make_ready(member, no_streams, "cpu").launch(0)
    else:
        with pytest.raises(ValueError, match="wrong at the first launch"):
            soak_members.make_ready(member, no_streams, "cpu")
    assert len(drawn) == draws


@pytest.mark.parametrize("has_gain", [False, True])
def test_the_unfused_pair_is_soaked_by_its_norm(no_streams, has_gain):
    problem = Problem("float32", 3, 96, 128, has_gain=has_gain)
    ready = soak_members.make_ready(soak_members.Member(problem, UNFUSED), no_streams, "cpu")
    assert ready.launch(0) and ready.settle() == 0
    assert ready.wanted.shape[1:] == (3, 128)


def test_the_command_from_members_to_the_file(no_streams, monkeypatch, tmp_path, capsys):
    """All but the GPU: members of the tables, compiled, checked, launched, written; and again."""
    from fake_machine import FakeCompiler

    from flashnorm_triton.tuning import build, rig

    class Load:
        us = 25.0

        def __call__(self, repeats: int) -> None: ...

    class NoGpu:
        closed = 0
        gpu, device, target = tables.Gpu("NVIDIA H200", 132, 90), H200, ("cuda", 90, 32)
        load = Load()
        backend = None

        def close(self) -> None:
            NoGpu.closed += 1

    def ready(member, streams):
        return true_ready(replace(member, problem=PROBLEM), no_streams, "cpu")

    true_ready = soak_members.make_ready
    true_op = soak_members.rig.norm_linear
    monkeypatch.setattr(
        soak_members.rig, "norm_linear", lambda *a, plan, **more: true_op(*a, **more)
    )
    monkeypatch.setattr(rig, "Rig", NoGpu)
    monkeypatch.setattr(build, "Pool", lambda jobs: FakeCompiler())
    monkeypatch.setattr(soak_members, "make_ready", ready)
    monkeypatch.setattr(soak_members.Ready, "capture", lambda self, backend: None)
    monkeypatch.setattr(soak_members.Ready, "replay", soak_members.Ready.launch)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 100))
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for name in ("require_gpu", "copy_tb_s", "matmul_tflops"):
        monkeypatch.setattr(measure, name, lambda: 4.0)
    monkeypatch.setattr(results, "header", lambda **rates: {**HEAD, **rates})
    path = tmp_path / "soak.json"
    argv = ["--launches", "100", "--members", "2", "--families", "gemv", "--out", str(path)]
    assert soak.main(argv) == 0, capsys.readouterr().out
    records = results.load(path).records
    assert {record["family"] for record in records} >= {"single_pass/gemv"}
    assert all(record["goal_met"] and record["launches"] >= 100 for record in records)
    assert NoGpu.closed == 1 and emptied  # little memory was free
    assert soak.main(argv) == 0 and results.load(path).records == records  # nothing left to do


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert soak.main(["--out", str(tmp_path / "s.json")]) == 2
    assert "needs a GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["--launches", "--seconds", "--members"])
def test_bad_arguments_are_refused(word, capsys):
    with pytest.raises(SystemExit) as stop:
        soak.main([word, "0"])
    assert stop.value.code == 2 and f"{word} 0" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_short_soak_moves_no_bit(tmp_path):
    path = tmp_path / "soak.json"
    argv = ["--launches", "3000", "--members", "1", "--families", "gemv", "--out", str(path)]
    assert soak.main(argv) == 0
    records = results.load(path).records
    assert "single_pass/gemv" in {record["family"] for record in records}
    for record in records:
        assert record["launches"] >= 3000 and record["plain_launches"] > 0, record
        assert record["mismatches"] == 0 and record["goal_met"], record


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the race is Hopper's",
)
def test_on_a_gpu_the_racing_form_is_caught(monkeypatch):
    """At its first launch against float64, or, let through that, by bits that move."""
    import racing_family

    from flashnorm_triton import dispatch, launch
    from flashnorm_triton.tuning.rig import Rig

    monkeypatch.setitem(launch.FAMILIES, "tiles", racing_family.Racing)
    monkeypatch.setattr(dispatch, "unfit", lambda *_: None)  # the gate that keeps the form out
    member = soak_members.Member(Problem("bfloat16", 256, 6144, 4096), racing_family.RACING)
    check = validate.check_values
    monkeypatch.setattr(
        validate, "check_values", lambda *a: (validate.Verdict(None, 0.0, 0.0), check(*a)[1])
    )
    dispatch._families.clear()
    dispatch._ready.clear()
    rig = Rig()
    try:
        with torch.no_grad():
            ready = soak_members.make_ready(member, [torch.cuda.Stream() for _ in range(3)])
            ready.capture(rig.backend)
            tally = soak.soak(
                [ready], wanted=2_000, seconds=20.0, rng=random.Random(0),
                load=lambda us: rig.load(max(1, round(us / rig.load.us))),
                synchronize=torch.cuda.synchronize,
            )  # fmt: skip
        assert sum(tally.mismatches) > 0
    finally:
        rig.close()
        dispatch._families.clear()
        dispatch._ready.clear()
