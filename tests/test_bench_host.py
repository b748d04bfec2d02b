"""The bench host: its bursts, records and table, on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flashnorm_triton import results
from flashnorm_triton.bench import host
from flashnorm_triton.bench.shapes import Shape
from flashnorm_triton.tuning import measure

HEAD = {
    "schema": 1, "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
    "transformers": "5.17.0", "driver": "580.1", "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z", "copy_tb_s": 4.0, "matmul_tflops": 800.0,
}  # fmt: skip
SHAPE = Shape("tiny", 64, 48)
PLAN = {"strategy": "single_pass", "form": "gemv"}


true_bursts = host.bursts


class Clock:
    """Seconds that pass only while something is called, and while it waits for the GPU."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, []

    def __call__(self) -> float:
        return self.now

    def spend(self, name: str, us: float):
        def call() -> None:
            self.order.append(name)
            self.now += us * 1e-6

        return call

    def wait(self) -> None:
        self.now += 1.0


def test_bursts_alternate_and_waiting_for_the_gpu_is_not_counted():
    clock = Clock()
    calls = {"ours": clock.spend("ours", 5.0), "linear": clock.spend("linear", 8.0)}
    timed = host.bursts(calls, repeats=3, each=4, synchronize=clock.wait, clock=clock)
    assert clock.order == (["ours"] * 4 + ["linear"] * 4) * 4
    assert timed["ours"].us == pytest.approx(5.0) and timed["linear"].us == pytest.approx(8.0)
    assert len(timed["ours"].rounds) == 3  # the warm-up is dropped


def test_every_callable_computes_what_it_stands_for():
    torch.manual_seed(1)
    x = torch.randn(3, SHAPE.k, dtype=torch.bfloat16)
    with torch.no_grad():
        made = {name: call() for name, call in host.callables(x, SHAPE).items()}
    assert list(made)[0] == host.OURS
    assert torch.equal(made[host.OURS], made["torch.ops"])
    assert torch.allclose(made["stock"].float(), made["rms_norm+linear"].float(), atol=0.1)
    assert made["F.linear"].shape == made[host.OURS].shape == (3, SHAPE.n)


def record(us: float, m: int = 1, plan=PLAN):
    return host.record_of(
        SHAPE, m, plan, {host.OURS: measure.timing([us] * 3), "F.linear": measure.timing([6.0])}
    )


@pytest.mark.parametrize(("us", "met"), [(11.9, True), (12.0, True), (12.1, False)])
def test_the_goal_is_judged_by_the_median(us, met):
    made = record(us)
    results.validate(HEAD, [made])
    assert made["goal_met"] is met


@pytest.mark.parametrize(("us", "met"), [(17.9, True), (18.1, False)])
def test_the_librarys_matmul_is_not_the_plans_own(us, met):
    made = record(us, 128, {"strategy": "unfused", "form": "library"})
    assert made["goal_met"] is met and made["host_us"][host.OURS] == us
    assert made["host_us_own"] == pytest.approx(us - 6.0)


def test_the_cells_of_a_run_alternate(tmp_path, monkeypatch):
    """No row count is measured at another time than the others."""
    order: list[int] = []
    monkeypatch.setattr(
        host, "callables", lambda x, shape: {host.OURS: lambda: order.append(len(x))}
    )
    monkeypatch.setattr(host, "bursts", partial(true_bursts, synchronize=lambda: None))
    monkeypatch.setattr(host, "inputs", lambda m, k: torch.zeros(m, 1))
    monkeypatch.setattr(host, "CALLS", 2)
    for name in ("copy_tb_s", "matmul_tflops"):
        monkeypatch.setattr(measure, name, lambda: 4.0)
    monkeypatch.setattr(results, "header", lambda **rates: {**HEAD, **rates})
    monkeypatch.setattr(host, "plan_of", lambda *_: PLAN)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(host.runtime, "device_facts", lambda index: None)
    path = str(tmp_path / "host.json")
    host.run(host.parse(["--out", path, "--tokens", "1", "4", "--repeats", "2"]))
    assert order == [1, 4] + [1, 1, 4, 4] * 3


def test_a_record_without_numbers_is_refused():
    made = record(5.0)
    made["host_us"]["stock"] = "fast"
    with pytest.raises(results.ResultsError, match="host_us has stock = 'fast'"):
        results.validate(HEAD, [made])


def test_the_table_counts_what_meets_the_goal():
    failed = {"call": host.OURS, "dtype": "bfloat16", "m": 64, "n": 48, "k": 64, "error": "boom"}
    results.validate(HEAD, [failed])
    text = host.table([record(5.0), record(14.0, m=16), failed])
    assert "within 12 µs a call: 1 of 3 cells" in text
    assert "single_pass/gemv" in text and "M=64: boom" in text


def test_the_command_writes_a_record_a_row_count(tmp_path, monkeypatch, capsys):
    """All but the GPU, a failing row count among the others."""
    true_randn = torch.randn

    def on_cpu(m, k, **more):
        if m == 16:
            raise RuntimeError("out of memory")
        return true_randn(m, k, dtype=torch.bfloat16)

    for name in ("require_gpu", "copy_tb_s", "matmul_tflops"):
        monkeypatch.setattr(measure, name, lambda: 4.0)
    monkeypatch.setattr(results, "header", lambda **rates: {**HEAD, **rates})
    monkeypatch.setattr(host, "inputs", on_cpu)
    monkeypatch.setattr(host, "plan_of", lambda *_: PLAN)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(host.runtime, "device_facts", lambda index: None)
    monkeypatch.setattr(host, "CALLS", 2)
    path = tmp_path / "host.json"
    argv = ["--out", str(path), "--tokens", "1", "16", "--repeats", "2"]
    assert host.main(argv) == 1  # one failed
    first, second = results.load(path).records
    assert first["host_us"][host.OURS] > 0 and set(first["host_us"]) == {
        host.OURS, "F.linear", "rms_norm+linear", "stock", "torch.ops",
    }  # fmt: skip
    assert "out of memory" in second["error"]
    assert "written" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert host.main(["--out", str(tmp_path / "h.json")]) == 2
    assert "needs a GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--repeats", "0"]])
def test_bad_arguments_are_refused(argv):
    with pytest.raises(SystemExit) as stop:
        host.main(argv)
    assert stop.value.code == 2


@pytest.mark.gpu
def test_on_a_gpu_it_writes_valid_results(tmp_path):
    path = tmp_path / "host.json"
    host.main(["--out", str(path), "--tokens", "1", "--repeats", "3"])
    (made,) = results.load(path).records
    assert made["host_us"][host.OURS] > 0 and "error" not in made
