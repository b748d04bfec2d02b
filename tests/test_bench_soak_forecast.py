"""bench/soak_forecast.py: what a soak will take, and that its time is shared so."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import soak
from bench.soak_forecast import Past, listing, past, short_first
from flashnorm_triton import results
from flashnorm_triton.bench import report

HEAD = {
    "schema": 1, "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip


class World:
    """Time that passes while members launch: ``cost`` seconds a launch, after ``setup`` seconds."""

    def __init__(self) -> None:
        self.now = 0.0


class Member:
    us = 10.0

    def __init__(self, world: World, cost: float, setup: float = 0.0) -> None:
        self.world, self.cost, self.setup, self.made = world, cost, setup, 0

    def replay(self, stream: int) -> int:
        self.made += 10
        self.world.now += 10 * self.cost
        return 10

    launch = replay

    def settle(self) -> int:
        return 0


class Log(report.Log):
    def __init__(self, world: World) -> None:
        self.world, self.lines = world, []

    @property
    def seconds(self) -> float:
        return self.world.now

    def __call__(self, text: str) -> None:
        self.lines.append(text)


def run(path: Path, costs: dict[str, float], seconds: float, before=None, setup: float = 0.0):
    """Soak one member a family; its records, and the members."""
    world = World()
    members = {name: Member(world, cost, setup) for name, cost in costs.items()}

    def ready(member: Member) -> Member:
        world.now += member.setup
        return member

    records = soak.run_all(
        {name: [member] for name, member in members.items()},
        {},
        ready=ready,
        describe=lambda member, made: {"problem": "p", "plan": "q"},
        save=lambda records: results.save(path, HEAD, records),
        wanted=20_000,
        seconds=seconds,
        log=Log(world),
        before=before,
        rng=random.Random(0),
        load=lambda us: None,
        synchronize=lambda: None,
        clock=lambda: world.now,
    )
    return {record["family"]: record for record in records}, members


# A launch of "slow" takes 9 times as long as one of the others: 90 s of the 120 are its own.
COSTS = {"a": 5e-4, "slow": 4.5e-3, "b": 5e-4, "c": 5e-4}


def test_time_is_shared_by_what_each_family_took_before(tmp_path):
    path = tmp_path / "soak.json"
    records, _ = run(path, COSTS, seconds=125.0)
    assert not records["slow"]["goal_met"] and records["a"]["goal_met"]
    before = past(path)
    assert before["slow"].short and not before["c"].short
    assert before["slow"].needs(20_000) == pytest.approx(90.0, rel=0.05)
    again, _ = run(path, COSTS, seconds=125.0, before=before)
    assert all(record["goal_met"] for record in again.values())


def test_a_family_that_is_new_gets_a_mean_share(tmp_path):
    before = {"a": Past(1000, 1000, 10.0, 0.0), "b": Past(1000, 1000, 30.0, 0.0)}
    records, _ = run(tmp_path / "s.json", {"new": 0.1, "a": 0.01, "b": 0.03}, 900.0, before)
    # 200 and 600 s of what is known make 400 for what is not, of the 900 a third.
    assert 300 <= records["new"]["seconds"] <= 330


def test_setup_counts_and_is_foretold(tmp_path):
    path = tmp_path / "soak.json"
    records, _ = run(path, {"a": 1e-3, "b": 1e-3}, seconds=60.0, setup=7.0)
    assert records["a"]["setup_seconds"] == 7.0 and records["a"]["goal_met"]
    went = past(path)["a"]
    assert went.needs(20_000) == pytest.approx(27.0, rel=0.05) and went.needs(0) == 0.0


def test_families_that_were_short_come_first(tmp_path):
    path = tmp_path / "soak.json"
    run(path, COSTS, seconds=125.0)
    assert list(short_first(dict.fromkeys(["new", *COSTS]), past(path))) == [
        "slow", "new", "a", "b", "c",
    ]  # fmt: skip
    assert not past(tmp_path / "none.json")


@pytest.mark.parametrize("current", [True, False])
def test_the_list_tells_what_is_left(tmp_path, monkeypatch, capsys, current):
    path = tmp_path / "soak.json"
    records, _ = run(path, COSTS, seconds=125.0)
    monkeypatch.setattr(results, "kernel_hash", lambda: HEAD["kernel_hash"] if current else "00")
    assert soak.main(["--list", "--launches", "20000", "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()[0] in COSTS}
    assert list(rows)[0] == "slow" and len(rows) == 4
    left = 20_000 - records["slow"]["launches"] if current else 20_000
    assert rows["slow"][1] == f"{left:,}"
    assert float(rows["slow"][2]) == pytest.approx(left * 4.5e-3, abs=0.2)
    assert float(rows["a"][2]) == pytest.approx(0.0 if current else 10.0, abs=0.3)
    assert ("its counts do not" in listing(path, 20_000)) is not current
    assert "no earlier run" in listing(tmp_path / "none.json", 20_000)
