"""bench/faults.py: instruments that need no GPU, the merged file, the table and its verdicts."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from fake_streams import FakeCuda
from planted_faults import FAULTS, healthy, planted

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import fault_instruments as instruments
from bench import faults
from flashnorm_triton import results, streams

HEAD = {
    "schema": 1, "gpu": "NVIDIA Made Up", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip


def record(fault: str, instrument: str, caught: bool | None, **more) -> dict:
    return {
        "fault": fault, "instrument": instrument, "caught": caught,
        "launches": 7 if caught else None, "seconds": None, "detail": "so", "false_alarm": False,
        "control": "quiet", **more,
    }  # fmt: skip


@pytest.fixture
def quiet(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    return instruments.Case(FAULTS["stale_scale"], str(device))


def test_one_quiet_launch_misses_a_stale_scale_and_a_second_input_does_not(quiet):
    with planted("stale_scale"):
        assert not instruments.unit(quiet, 1).caught
        assert bool(quiet.is_wrong(quiet.run(quiet.x[1]), 1))
    with healthy("stale_scale"):
        assert not instruments.unit(quiet, 1).caught
        assert not bool(quiet.is_wrong(quiet.run(quiet.x[1]), 1))


def test_a_value_that_is_not_finite_is_wrong(quiet):
    y = quiet.run(quiet.x[0]).clone()
    assert not bool(quiet.is_wrong(y, 0))
    y[3, 5] = torch.nan
    assert bool(quiet.is_wrong(y, 0))


def test_perplexity_in_one_window_misses_what_two_show(device):
    pytest.importorskip("transformers")
    one = instruments.Perplexity(tokens=64, length=64, device=str(device))
    two = instruments.Perplexity(tokens=128, length=64, device=str(device))
    for look, seen in ((one, False), (two, True)):
        with planted("stale_scale"):
            assert look().caught is seen
        with healthy("stale_scale"):
            assert not look().caught


def test_delays_come_in_both_streams_and_leave_the_order(monkeypatch):
    fake, slept = FakeCuda(), []
    monkeypatch.setattr(streams, "cuda", fake)
    monkeypatch.setattr(streams, "_thread", threading.local())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append(fake.current))
    with instruments.delays(random.Random(0)):
        for turn in range(20):
            with streams.join_on(0) as join:
                with join.beside():
                    fake.work(f"statistics{turn}")
                fake.work(f"product{turn}")
            fake.work(f"scale{turn}")
            assert fake.before(fake.place(f"statistics{turn}"), fake.place(f"scale{turn}"))
    assert {fake.default, streams.join_on(0).side} == set(slept) and 5 < len(slept) < 35


def test_a_plan_that_gave_way_is_an_error_and_not_a_pass(monkeypatch):
    def gives_way(case, launches):
        warnings.warn("flashnorm_triton: plan x/y failed for K = 1", RuntimeWarning, stacklevel=1)
        return instruments.Seen(1, False, "right")

    monkeypatch.setitem(instruments.RUN, "unit", gives_way)
    monkeypatch.setattr(instruments, "Case", lambda fault: None)
    with pytest.raises(RuntimeWarning, match="failed"):
        instruments.Looker(1)("unit", FAULTS["no_wait"], True)


def test_a_record_has_the_fault_and_its_control():
    said = iter([instruments.Seen(3, True, "wrong"), instruments.Seen(9, False, "right")])
    asked = []

    def look(instrument, fault, faulty):
        asked.append((instrument, faulty))
        return next(said)

    found = faults.record_of(FAULTS["stale_scale"], "unit", look, None)
    assert asked == [("unit", True), ("unit", False)]
    assert (found["caught"], found["launches"], found["false_alarm"]) == (True, 3, False)
    nothing = faults.record_of(FAULTS["stale_scale"], "lint", look, "no kernel of ours")
    assert nothing["caught"] is None and nothing["detail"] == "no kernel of ours"
    results.validate(HEAD, [found, nothing])


def test_merging_replaces_its_own_and_drops_what_was_seen_of_other_kernels(tmp_path):
    path = tmp_path / "faults.json"
    faults.merge(path, HEAD, [record("no_fork", "unit", False), record("no_wait", "unit", False)])
    faults.merge(path, HEAD, [record("no_wait", "unit", True), record("no_wait", "lag", None)])
    found = {(r["fault"], r["instrument"]): r["caught"] for r in results.load(path).records}
    assert found == {
        ("no_wait", "unit"): True,
        ("no_wait", "lag"): None,
        ("no_fork", "unit"): False,
    }
    assert results.load(path).records[0]["fault"] == "no_wait"  # in the order of the registry
    faults.merge(path, {**HEAD, "kernel_hash": "cd" * 20}, [record("no_wait", "lag", True)])
    assert len(results.load(path).records) == 1


def test_the_table_and_its_verdicts():
    records = [
        record("no_wait", "unit", False),
        record("no_wait", "bits", True),
        record("no_fork", "unit", False),
        record("no_fork", "bits", None),
    ]
    text = faults.table(records)
    assert text.splitlines()[0] == "| fault | unit | bits |"
    assert "| `no_wait` | missed | **seen** (7) |" in text
    assert "| `no_fork` | missed | – |" in text
    assert faults.verdicts(records) == ["no_fork: no instrument saw it"]
    alarm = record("no_wait", "bits", True, false_alarm=True)
    assert "complained of no_wait's plan without the fault" in faults.verdicts([alarm])[0]


def test_what_does_not_apply():
    lint = instruments.applies(FAULTS["stale_scale"], "lint")
    assert lint == "no kernel of ours"
    assert instruments.applies(FAULTS["stale_scale"], "unit") is None
    if not torch.cuda.is_available():
        assert instruments.applies(FAULTS["no_wait"], "bits") == "needs a GPU"
        assert faults.main([]) == 2
