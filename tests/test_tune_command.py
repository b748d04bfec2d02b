"""``flashnorm tune`` from its options to its exit code, and what ``flashnorm info`` is told."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
import torch
import typer
from fake_machine import GOOD, FakeCompiler, FakeMachine
from rich.console import Console
from test_sites import write_config
from typer.testing import CliRunner

from flashnorm_triton import results, tables
from flashnorm_triton.plans import Device, Plan, Problem
from flashnorm_triton.tables import Entry, Gpu, Key, Run, Table
from flashnorm_triton.tuning import command, info, progress, run, sites, tuner

H200 = Gpu("NVIDIA H200", 132, 90)
DEVICE = Device("cuda", 90, 132, gluon=True)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path / "user"))
    for name in ("FLASHNORM_TABLES", command._RESTARTS, command._SINCE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    yield
    tables.forget()


app = typer.Typer()
app.command("tune")(command.tune)
app.command("other")(lambda: None)


def invoke(*words: str):
    return CliRunner().invoke(app, ["tune", *words])


@pytest.fixture
def machine(monkeypatch):
    """``run.tune`` on a made-up GPU: all but Rig and Pool is the real thing."""
    made = FakeMachine(lambda problem, plan: 10.0)
    made.uuid, made.closed = "GPU-1", 0

    def close():
        made.closed += 1

    made.close = close
    monkeypatch.setattr(run, "Rig", lambda: made)
    monkeypatch.setattr(run, "Pool", lambda jobs: FakeCompiler())
    return made


# The command


def test_without_a_gpu_it_says_so_and_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("--shapes", "2048:3072")
    assert result.exit_code == 2
    assert "needs a GPU" in result.output and "is_available() is False" in result.output
    assert not tables.cache_dir().exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either --model or --shapes"),
        (("--model", "m", "--shapes", "1:2"), "either --model or --shapes"),
        (("--shapes", "64"), "no shape"),
        (("--shapes", "64:64", "--dtype", "int4"), "'int4'"),
        (("--shapes", "64:64", "--tokens", "none"), "'none'"),
        (("--shapes", "64:64", "--effort", "heroic"), "quick, full"),
        (("--shapes", "64:64", "--epilogue", "tanh"), "'tanh' is no epilogue"),
        (("--shapes", "64:64", "--seconds", "0"), "seconds is 0.0"),
        (("--model", "./nowhere"), "no file or folder"),
    ],
)
def test_bad_options_change_nothing(machine, words, message):
    result = invoke(*words)
    assert result.exit_code == 2 and message in result.output
    assert machine.opened == [] and not tables.cache_dir().exists()


def test_shapes_are_tuned_into_the_users_table(machine):
    result = invoke("--shapes", "2048:3072,64:128", "--tokens", "1,16,17", "--dtype", "bf16,fp16")
    assert result.exit_code == 0, result.output
    table = tables.read(tables.user_path(H200), H200)
    assert len(table.entries) == 2 * 2 * 3
    assert "12 cells tuned" in result.output and str(tables.user_path(H200)) in result.output
    assert result.output.count("unfused  ") >= 12  # a line a cell
    assert machine.closed == 1
    again = invoke("--shapes", "2048:3072,64:128", "--tokens", "1,16,17", "--dtype", "bf16,fp16")
    assert "0 cells tuned, 12 already" in again.output


def test_epilogues_are_tuned_beside_plain_cells(machine):
    words = ("--shapes", "64:128", "--tokens", "1", "--epilogue", "plain,silu+gated")
    result = invoke(*words)
    assert result.exit_code == 0 and "64→128 bfloat16 M=1 silu+gated" in result.output
    entries = tables.read(tables.user_path(H200), H200).entries
    assert {key.epilogue for key in entries} == {"", "silu+gated"}
    assert "2 already in the table" in invoke(*words).output


def test_a_time_limit_leaves_cells_for_the_same_command(machine, monkeypatch):
    monkeypatch.setattr(run, "Tuner", lambda *a: tuner.Tuner(*a, clock=machine.clock))
    words = ("--shapes", "64:128", "--tokens", "1,2,4,8,16,32", "--seconds", "1e-6")
    first = invoke(*words)
    assert first.exit_code == 1 and "the time is up with 5 cells left" in first.output
    assert len(tables.read(tables.user_path(H200)).entries) == 1
    last = invoke(*words[:-2])
    assert last.exit_code == 0 and "5 cells tuned, 1 already" in last.output


def test_a_model_is_tuned_into_a_given_file(machine, tmp_path):
    folder, out = write_config(tmp_path / "model"), tmp_path / "made" / "nvidia_h200.json"
    result = invoke("--model", folder, "--tokens", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert {(key.k, key.n) for key in tables.read(out).entries} == {(64, 128), (64, 320)}


def test_an_interrupt_ends_with_130_and_keeps_cells(machine):
    def verdict(problem, plan):
        if problem.m == 16:
            os.kill(os.getpid(), signal.SIGTERM)  # a polite kill does as Ctrl-C
        return GOOD

    machine.verdict = verdict
    before = signal.getsignal(signal.SIGTERM)
    result = invoke("--shapes", "64:128", "--tokens", "1,16")
    assert result.exit_code == 130 and "goes on from here" in result.output
    assert len(tables.read(tables.user_path(H200)).entries) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_failed_cell_ends_with_1(machine):
    def verdict(problem, plan):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    machine.verdict = verdict
    result = invoke("--shapes", "64:128", "--tokens", "1")
    assert result.exit_code == 1 and "not enough GPU memory" in result.output


def test_a_table_that_cannot_be_written_ends_with_2(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path / "file"))
    result = invoke("--shapes", "64:128")
    assert result.exit_code == 2 and "FLASHNORM_CACHE_DIR" in result.output
    assert machine.opened == [] and machine.closed == 1


class Replaced(BaseException):
    """Stands for the end of this program in ``os.execv``."""


def test_a_lost_gpu_starts_the_same_command_anew(machine, monkeypatch):
    """In a new process, as the context is gone; --force then holds since the first start."""
    starts = []

    def execv(program, words):
        starts.append((program, words))
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "flashnorm_triton.cli", "tune", "x"])

    def verdict(problem, plan):
        if plan.form == "gemv" and problem.m == 2:
            machine.broken = True
            raise RuntimeError("CUDA error: unspecified launch failure")
        return GOOD

    machine.verdict = verdict
    words = ("--shapes", "64:128", "--tokens", "1,2", "--force")
    with pytest.raises(Replaced):
        invoke(*words)
    assert starts == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert os.environ[command._RESTARTS] == "1"

    machine.broken, machine.opened = False, []
    machine.verdict = lambda problem, plan: GOOD
    result = invoke(*words)
    assert result.exit_code == 0
    assert [problem.m for problem in machine.opened] == [2]  # M = 1 was done since the start


def test_restarts_have_an_end(machine, monkeypatch):
    monkeypatch.setenv(command._RESTARTS, str(command._MOST_RESTARTS))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("restarted for ever"))

    def verdict(problem, plan):
        machine.broken = True
        raise RuntimeError("CUDA error")

    machine.verdict = verdict
    result = invoke("--shapes", "64:128", "--tokens", "1")
    assert result.exit_code == 1 and "given up" in result.output


# The function


def test_tune_takes_modules_pairs_and_several_dtypes(machine, tmp_path):
    report = run.tune([(64, 128)], dtype=("bf16", "fp16"), tokens=(1,), path=tmp_path / "a.json")
    assert len(report.done) == 2
    model = sites.skeleton(write_config(tmp_path / "m"))
    report = run.tune(model, tokens=[1], path=tmp_path / "b.json")
    assert len(report.done) == 2
    report = run.tune([(64, 128)], tokens=(1,), path=tmp_path / "a.json", force=True)
    assert len(report.done) == 1 and report.skipped == 0
    with pytest.raises(ValueError, match="'64:x'"):
        run.tune([(64, "x")])


def test_after_tuning_prepared_problems_are_looked_up_anew(machine):
    from flashnorm_triton import dispatch

    dispatch._ready[("a problem prepared before",)] = lambda *_: None
    before = tables.choice(Problem("bfloat16", 1, 128, 64), DEVICE, H200.name)
    run.tune([(64, 128)], tokens=(1,))
    assert ("a problem prepared before",) not in dispatch._ready
    after = tables.choice(Problem("bfloat16", 1, 128, 64), DEVICE, H200.name)
    assert (before.source, after.source) == ("heuristic", "user")


# What info shows


def stored(kernel_hash: str, plan: Plan, m: int = 16) -> dict[Key, Entry]:
    made = Run("2026-01-31T12:00:00Z", "2.11.0", "3.6.0", kernel_hash, "quick")
    key = Key("norm_linear", "bfloat16", 3072, 2048, m)
    return {key: Entry(plan, 6.5, 8.6, 6.7, 0.0016, 0.0021, made)}


def test_info_says_which_tables_there_are_and_which_are_stale():
    plan = Plan("single_pass", "gemv", 1, 4, 256)
    assert "your table: none" in info.table_lines(H200)[0]
    tables.write(tables.user_path(H200), Table(H200, stored("0" * 40, plan)))
    fresh = stored(results.kernel_hash(), plan)
    tables.write(tables.SHIPPED / "nvidia_h200.json", Table(H200, fresh))
    h100 = Gpu("NVIDIA H100 80GB HBM3", 132, 90)
    tables.write(tables.SHIPPED / "nvidia_h100.json", Table(h100, fresh))
    (tables.SHIPPED / "zz.json").write_text("{")
    user, *shipped = info.table_lines(H200)
    assert "1 cells, 2026-01-31 to 2026-01-31; 1 cells stale" in user
    assert "stale" not in shipped[0] and "nvidia_h200.json" in shipped[0]
    assert any("not used" in line and "zz.json" in line for line in shipped)
    assert "like GPU" in shipped[-1] and "H100" in shipped[-1]


def test_info_says_which_table_serves_which_cell_and_why(monkeypatch):
    plan = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 6, in_flight=1)
    tables.write(tables.user_path(H200), Table(H200, stored("0" * 40, plan)))
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(info.plan_table(H200, DEVICE, sites.problems([sites.Site(2048, 3072)])))
    text = console.export_text()
    line = next(line for line in text.splitlines() if "nvidia_h200-132.json" in line)
    assert "2048 → 3072" in line and " 16…" in line and "in_flight=1" in line
    assert "1.32x unfused" in line and "2026-01-31" in line and "other kernel sources" in line
    assert "no table has this cell" in text
    monkeypatch.setenv("FLASHNORM_TABLES", "off")
    assert info.table_lines(H200)[-1] == "FLASHNORM_TABLES=off"


# How a run shows itself


def test_lines_tell_the_time_that_is_left():
    clock, written = iter([0.0, 10.0, 20.0]), []
    shown = progress.Lines(written.append, lambda: next(clock))
    shown.begin(cost=4.0, cells=3)
    shown.cell(1.0, "first")
    shown.cell(2.0, "second")
    assert written == ["   1/3   30 s left  first", "   2/3    7 s left  second"]


def test_a_bar_shows_the_best_plan_so_far(monkeypatch, capsys):
    bar = progress.Bar()
    bar.begin(3.0, 2)
    bar.best("gemv 1x4x256 6.50 µs")
    bar.cell(1.5, "first [bold]cell[/bold]")
    task = bar._bar.tasks[0]
    assert task.description == "gemv 1x4x256 6.50 µs" and task.fields["cells"] == "1/2"
    assert task.completed == pytest.approx(1.5) and task.total == pytest.approx(3.0)
    bar.end()
    assert "[bold]" in capsys.readouterr().out


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch):
    assert isinstance(progress.for_output(), progress.Lines)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert isinstance(progress.for_output(), progress.Bar)


def test_a_plan_in_a_few_words():
    plan = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 6, in_flight=1)
    assert tuner.plan_text(plan) == "hopper_swap 16x64x128 w4 s6 in_flight=1"
    assert tuner.plan_text(replace(plan, in_flight=0)) == "hopper_swap 16x64x128 w4 s6"
