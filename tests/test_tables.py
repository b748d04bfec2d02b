"""Tables of tuned plans: round trip, lookup order, and every way in which a file can be wrong."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from flashnorm_triton import atomic, plans, tables
from flashnorm_triton.plans import UNFUSED, Device, Plan, Problem
from flashnorm_triton.tables import Entry, Gpu, Key, Run, Table

H200 = Gpu("NVIDIA H200", 132, 90)
DEVICE = Device("cuda", 90, 132, gluon=True)
PROBLEM = Problem("bfloat16", 12, 3072, 2048)
KEY = Key("norm_linear", "bfloat16", 3072, 2048, 16)
RUN = Run("2026-01-31T12:00:00Z", "2.11.0", "3.6.0", "0" * 40, "quick")
TUNED = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 5, max_registers=128, in_flight=1)


def entry(plan: Plan = TUNED, run: Run = RUN) -> Entry:
    return Entry(plan, 6.5, 8.6, 6.7, 0.0016, 0.0021, run)


def table_of(gpu: Gpu = H200, plan: Plan = TUNED, **changed: object) -> Table:
    return Table(gpu, {replace(KEY, **changed): entry(plan)})


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    """An empty user's folder and an empty shipped folder, and no memory of earlier lookups."""
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("FLASHNORM_TABLES", raising=False)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tables, "LOCK_SECONDS", 0.2)
    tables.forget()
    yield
    tables.forget()


@pytest.fixture
def user_file() -> Path:
    return tables.user_path(H200)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def looked_up() -> tables.Choice:
    """The choice for PROBLEM; warnings are errors here, as a strict caller has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tables.choice(PROBLEM, DEVICE, H200.name)


def warned(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


# Round trip


def test_what_is_written_is_what_is_read(user_file):
    table = table_of()
    table.entries[replace(KEY, m=1, has_gain=True)] = entry(UNFUSED, replace(RUN, effort="full"))
    table.entries[replace(KEY, dtype="float16")] = entry(
        Plan("stats_then_gemm", "hopper_rows", 128, 128, 64, 4, 5, squares="given", group_m=4)
    )
    table.refused = {"some plan": "took the GPU down"}
    tables.write(user_file, table)
    assert tables.read(user_file, H200) == table
    assert tables.dump(tables.parse(tables.dump(table))) == tables.dump(table)
    data = json.loads(user_file.read_text())
    assert data["schema"] == 1 and data["gpu"] == "NVIDIA H200" and data["sm_count"] == 132
    assert {run["kernel_hash"] for run in data["runs"]} == {"0" * 40}
    by_m = {row["m"]: row for row in data["entries"]}
    assert by_m[1]["us"] == 6.5 and by_m[1]["baseline_us"] == 8.6 and by_m[1]["rel_err"] == 0.0016
    # One line an entry, so that a shipped table's changes can be read.
    assert sum('"op"' in line for line in user_file.read_text().splitlines()) == 3


GATED = {"activation": "silu", "gated": True, "has_residual": True}


def test_an_epilogue_is_another_cell_and_plain_entries_stay_valid(user_file):
    put(user_file, tables.dump(table_of()))  # as versions without epilogues wrote it
    assert json.loads(user_file.read_text())["schema"] == 1
    assert "epilogue" not in json.loads(user_file.read_text())["entries"][0]
    gated = replace(PROBLEM, **GATED)
    assert tables.key_of(PROBLEM) == KEY
    assert tables.key_of(gated) == replace(KEY, epilogue="silu+gated+residual")
    assert looked_up().plan == TUNED
    assert tables.choice(gated, DEVICE, H200.name).source == "heuristic"
    tables.merge(user_file, H200, {tables.key_of(gated): entry(UNFUSED)})
    tables.forget()
    assert tables.choice(gated, DEVICE, H200.name).source == "user"
    assert looked_up().plan == TUNED
    # A version that knows no epilogues must not take such an entry for a plain one.
    assert json.loads(user_file.read_text())["schema"] == 2
    assert tables.dump(tables.read(user_file)) == user_file.read_text()


def test_a_bucket_serves_every_row_count_in_it(user_file):
    tables.write(user_file, table_of())
    for m, served in ((8, False), (9, True), (12, True), (16, True), (17, False)):
        plan = tables.lookup(replace(PROBLEM, m=m), DEVICE, H200.name)
        assert (plan == TUNED) is served, m
    assert tables.lookup(replace(PROBLEM, has_bias=True), DEVICE, H200.name) == TUNED
    for other in ({"n": 3080}, {"k": 2056}, {"dtype": "float16"}):
        assert tables.lookup(replace(PROBLEM, **other), DEVICE, H200.name) != TUNED


# Order of lookup


def variant(stages: int) -> Plan:
    return replace(TUNED, num_stages=stages, max_registers=0)


def test_order_user_then_shipped_then_capability_then_heuristic(user_file):
    h100 = Gpu("NVIDIA H100 80GB HBM3", 132, 90)
    h800 = Gpu("NVIDIA H800", 110, 90)
    a100 = Gpu("NVIDIA A100", 108, 80)
    made = {
        "user": (user_file, table_of(plan=variant(3))),
        "shipped": (tables.SHIPPED / "nvidia_h200.json", table_of(plan=variant(4))),
        "h100": (tables.SHIPPED / "z_h100.json", table_of(h100, variant(5))),
        "h800": (tables.SHIPPED / "a_h800.json", table_of(h800, variant(6))),
        "a100": (tables.SHIPPED / "a_a100.json", table_of(a100, variant(2))),
    }
    for path, table in made.values():
        tables.write(path, table)
    expected = [
        ("user", "user", variant(3)),
        ("shipped", "shipped", variant(4)),
        ("h100", "capability", variant(5)),  # as many multiprocessors: nearer than the H800
        ("h800", "capability", variant(6)),
        ("a100", "heuristic", plans.choose(PROBLEM, DEVICE)),
    ]
    for name, source, plan in expected:
        tables.forget()
        found = looked_up()
        assert (found.source, found.plan) == (source, plan), name
        made[name][0].unlink()
    tables.forget()
    assert looked_up().source == "heuristic"


def test_a_cell_that_the_nearer_table_lacks_comes_from_the_next(user_file):
    tables.write(user_file, table_of(plan=variant(3), m=1))
    tables.write(tables.SHIPPED / "nvidia_h200.json", table_of(plan=variant(4)))
    found = looked_up()
    assert found.source == "shipped" and "2026-01-31" in found.reason


@pytest.mark.parametrize("other", [Gpu("NVIDIA H200 NVL", 132, 90), Gpu("NVIDIA H200", 66, 90)])
def test_identity_is_the_exact_name_and_the_multiprocessors(other):
    tables.write(tables.SHIPPED / "nvidia_h200.json", table_of(other))
    assert looked_up().source == "capability"
    tables.write(tables.SHIPPED / "nvidia_h200.json", table_of(replace(other, capability=80)))
    tables.forget()
    assert looked_up().source == "heuristic"
    assert tables.user_path(other) != tables.user_path(H200)


def test_tables_can_be_hidden(user_file, monkeypatch):
    tables.write(user_file, table_of())
    monkeypatch.setenv("FLASHNORM_TABLES", "off")
    assert looked_up().source == "heuristic"


def test_a_lookup_after_the_first_reads_no_file(user_file, monkeypatch):
    tables.write(user_file, table_of())
    assert looked_up().plan == TUNED
    monkeypatch.setattr(tables, "read", lambda *_: pytest.fail("a file was read"))
    assert looked_up().plan == TUNED
    other = replace(PROBLEM, n=128)
    assert tables.lookup(other, DEVICE, H200.name) == plans.choose(other, DEVICE)


def test_a_cpu_and_float64_do_not_ask_the_tables(user_file, monkeypatch):
    monkeypatch.setattr(tables, "survey", lambda *_: pytest.fail("tables were read"))
    assert tables.lookup(PROBLEM, Device("cpu"), "cpu") == plans.TORCH
    wide = replace(PROBLEM, dtype="float64")
    assert tables.lookup(wide, DEVICE, H200.name) == plans.TORCH


# Plans that do not fit


def test_a_plan_that_does_not_fit_the_problem_is_passed_over(user_file):
    tables.write(user_file, table_of())
    unaligned = tables.choice(replace(PROBLEM, tma=False), DEVICE, H200.name)
    assert unaligned.source == "heuristic" and "aligned" in unaligned.reason
    no_gluon = tables.choice(PROBLEM, replace(DEVICE, gluon=False), H200.name)
    assert no_gluon.source == "heuristic" and "Gluon" in no_gluon.reason


@pytest.mark.parametrize("changed", [{"swizzle": 8}, {"block_n": 48}, {"form": "gone"}])
def test_an_entry_whose_plan_no_longer_exists_is_ignored_alone(user_file, changed):
    table = table_of()
    table.entries[replace(KEY, m=1)] = entry(UNFUSED)
    data = json.loads(tables.dump(table))
    for row in data["entries"]:
        if row["m"] == 16:
            row["plan"].update(changed)
    put(user_file, json.dumps(data))
    assert looked_up().source == "heuristic"
    assert tables.choice(replace(PROBLEM, m=1), DEVICE, H200.name).source == "user"


# Files that cannot be used: a forward goes on, with one warning


def broken(kind: str) -> str:
    text = tables.dump(table_of())
    data = json.loads(text)
    if kind == "newer schema":
        return json.dumps({**data, "schema": tables.SCHEMA + 1, "entries": "as tables will be"})
    if kind == "older schema":
        return json.dumps({**data, "schema": 0})
    if kind == "foreign gpu":
        return tables.dump(table_of(Gpu("NVIDIA A100", 108, 80)))
    if kind == "other multiprocessors":
        return tables.dump(table_of(replace(H200, sm_count=78)))
    if kind == "wrong types":
        data["entries"][0]["us"] = "fast"
        return json.dumps(data)
    if kind == "no such run":
        data["entries"][0]["run"] = -1
        return json.dumps(data)
    return {
        "truncated": text[: len(text) // 2],
        "empty": "",
        "not json": "plans = {}",
        "not an object": "[1, 2, 3]",
        "no schema": json.dumps({key: value for key, value in data.items() if key != "schema"}),
        "deep": "[" * 100_000,
    }[kind]


KINDS = (
    "truncated", "empty", "not json", "not an object", "no schema", "deep", "wrong types",
    "no such run", "older schema", "newer schema", "foreign gpu", "other multiprocessors",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_file_costs_one_warning_and_nothing_else(user_file, kind):
    put(user_file, broken(kind))
    chosen = []

    def two_lookups():
        for m in (12, 100):
            problem = replace(PROBLEM, m=m)
            chosen.append(
                tables.lookup(problem, DEVICE, H200.name) == plans.choose(problem, DEVICE)
            )

    messages = warned(two_lookups)
    assert chosen == [True, True]
    assert len(messages) == 1 and user_file.name in messages[0]
    assert user_file.read_text() == broken(kind)  # a forward changes nothing
    tables.forget()
    assert looked_up().source == "heuristic"  # not even where warnings are errors


@pytest.mark.parametrize("kind", KINDS)
def test_the_tuner_sets_a_bad_file_aside_and_keeps_it(user_file, kind):
    put(user_file, broken(kind))
    messages = warned(lambda: tables.merge(user_file, H200, {KEY: entry()}))
    assert len(messages) == 1 and "set aside" in messages[0]
    suffix = "newer" if kind == "newer schema" else "bad"
    assert Path(f"{user_file}.{suffix}").read_text() == broken(kind)
    assert looked_up().plan == TUNED


def test_bytes_that_are_no_text(user_file):
    user_file.parent.mkdir(parents=True)
    user_file.write_bytes(b"\xff\xfe\x00plans")
    assert looked_up().source == "heuristic"
    messages = warned(lambda: tables.merge(user_file, H200, {KEY: entry()}))
    assert len(messages) == 1 and "set aside" in messages[0]
    tables.forget()
    assert looked_up().plan == TUNED


def test_a_folder_in_the_place_of_the_file(user_file):
    user_file.mkdir(parents=True)
    assert looked_up().source == "heuristic"
    with pytest.raises(tables.TableError, match="cannot write"):
        tables.merge(user_file, H200, {KEY: entry()})


def test_a_file_that_may_not_be_read(user_file, monkeypatch):
    tables.write(user_file, table_of())

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    assert looked_up().source == "heuristic"


def test_no_home_folder(monkeypatch):
    monkeypatch.delenv("FLASHNORM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert looked_up().source == "heuristic"
    with pytest.raises(tables.TableError, match="FLASHNORM_CACHE_DIR"):
        tables.cache_dir()


def test_whatever_goes_wrong_a_forward_gets_a_plan(monkeypatch):
    def defect(*_):
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(tables, "survey", defect)
    assert len(warned(lambda: [tables.lookup(PROBLEM, DEVICE, H200.name) for _ in range(3)])) == 1
    tables.forget()
    found = looked_up()
    assert found.plan == plans.choose(PROBLEM, DEVICE) and "ZeroDivisionError" in found.reason


def test_the_cache_folder(monkeypatch, tmp_path):
    assert tables.cache_dir() == tmp_path / "user"
    monkeypatch.delenv("FLASHNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tables.cache_dir() == tmp_path / "xdg" / "flashnorm_triton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tables.cache_dir() == tmp_path / "home" / ".cache" / "flashnorm_triton"


# Writing


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_for_real(user_file):
    user_file.parent.mkdir(parents=True)
    user_file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(tables.TableError, match="FLASHNORM_CACHE_DIR"):
        tables.merge(user_file, H200, {KEY: entry()})


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("where", ["mkstemp", "fsync", "replace"])
def test_a_write_that_fails_keeps_the_old_table_and_leaves_no_litter(
    user_file, monkeypatch, code, where
):
    """A read-only folder or a full disk, at each step of the write."""
    tables.merge(user_file, H200, {KEY: entry()})
    before = user_file.read_text()
    owner = atomic.tempfile if where == "mkstemp" else atomic.os

    def failing(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, where, failing)
    with pytest.raises(tables.TableError, match="FLASHNORM_CACHE_DIR") as error:
        tables.merge(user_file, H200, {replace(KEY, m=1): entry(UNFUSED)})
    assert os.strerror(code) in str(error.value) and str(user_file) in str(error.value)
    monkeypatch.undo()
    assert user_file.read_text() == before
    assert sorted(p.suffix for p in user_file.parent.iterdir()) == [".json", ".lock"]


def test_a_writer_killed_half_way_leaves_the_old_table(user_file, tmp_path):
    """The process dies between the temporary file's first bytes and its renaming."""
    tables.merge(user_file, H200, {KEY: entry()})
    before = user_file.read_text()
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_tables as t
        from flashnorm_triton import tables
        os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        tables.merge(tables.Path({str(user_file)!r}), t.H200, {{t.replace(t.KEY, m=1): t.entry()}})
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120)
    assert ended.returncode == -9
    assert user_file.read_text() == before
    assert looked_up().plan == TUNED
    # The lock died with its holder: the next writer is not kept waiting.
    after = tables.merge(user_file, H200, {replace(KEY, m=2): entry(UNFUSED)})
    assert set(after.entries) == {KEY, replace(KEY, m=2)}


def test_two_writers_lose_nothing_of_each_other(user_file):
    """Two processes add their own cells at the same time, one merge a cell."""
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_tables as t
        from flashnorm_triton import tables
        for n in range(25):
            key = t.replace(t.KEY, n=8 * (n + 1), m=int(sys.argv[1]))
            tables.merge(tables.Path({str(user_file)!r}), t.H200, {{key: t.entry()}})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    running = [subprocess.Popen([*command, m]) for m in ("1", "2")]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert len(tables.read(user_file, H200).entries) == 50


def test_a_lock_that_is_held_is_waited_for_and_then_named(user_file):
    from filelock import FileLock

    tables.merge(user_file, H200, {})
    with FileLock(f"{user_file}.lock"), pytest.raises(tables.TableError, match="lock was held"):
        tables.merge(user_file, H200, {KEY: entry()})
    assert KEY in tables.merge(user_file, H200, {KEY: entry()}).entries


def test_shipped_tables_are_sound():
    """What the package ships is readable, complete and fits the GPU that it names."""
    shipped = Path(tables.__file__).parent / "configs"
    for path in shipped.glob("*.json"):
        table = tables.read(path)
        assert path.stem == table.gpu.slug and not table.refused
        rows = json.loads(path.read_text())["entries"]
        assert len(rows) == len(table.entries) > 0, f"{path}: plans that this version has not"
        capability = table.gpu.capability
        device = Device("cuda", capability, table.gpu.sm_count, gluon=capability == 90)
        for key, found in table.entries.items():
            problem = Problem(key.dtype, key.m, key.n, key.k, has_gain=key.has_gain)
            assert tables.unfit(found.plan, problem, device) is None, key
            assert found.us <= 1.02 * found.baseline_us, key
            assert found.rel_err <= 1.25 * found.rel_err_stock, key
