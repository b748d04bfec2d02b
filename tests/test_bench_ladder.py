"""bench/ablation.py: every rung computes what stock does, by the strategy that it is named for."""

from __future__ import annotations

import copy
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver as triton_driver

from flashnorm_triton import plans, results, tables
from flashnorm_triton.bench import ablation, accuracy, building, decoders, ladder_cases, rungs
from flashnorm_triton.bench.contenders import Contender, Group, Loaded, steps_of
from flashnorm_triton.limits import unfit
from flashnorm_triton.models.norm_only import NormOnly
from flashnorm_triton.plans import Problem
from flashnorm_triton.tuning.build import Built
from tests import fake_gpu

K, PARTS = 288, (48, 16)
# As many rows as a check looks at, so that it is one call a kind of input.
ROWS = accuracy.LEAST_ROWS
CASE = ladder_cases.Case("small.qkv", K, PARTS, 1e-5)
# The kernels that each rung launches for a norm and its packed linears on a GPU without Gluon.
KERNELS = {
    "packed": ["rms_norm_kernel"],
    "deferred": ["row_rstd_kernel", "norm_tiles_kernel"],
    "overlap": ["row_rstd_kernel", "scale_rows_kernel"],
    "fused": ["norm_gemv_kernel"],
}


@pytest.fixture(scope="module")
def small() -> ladder_cases.Weights:
    torch.manual_seed(3)
    with torch.no_grad():
        return ladder_cases.Weights(CASE, "cpu")


def _args(*words: str) -> Any:
    common = ["--device", "cpu", "--models", "tiny", "--context", "16", "--rounds", "3"]
    return ablation.parse([*common, "--out", "/tmp/x.json", *words])


@torch.no_grad()
def test_operations_keep_the_contract(small: ladder_cases.Weights) -> None:
    fields, best = ladder_cases.measure_cell(small, ROWS, _args("--seconds", "1"), {})
    assert list(fields) == list(rungs.RUNGS[:-1]) and best == {}
    for rung, record in fields.items():
        assert record.get("error") is None, rung
        assert record["us"] > 0 and record["contract_ok"] and record["err_ratio"] <= 1.25
    assert fields["stock"]["speedup"] == 1.0


@pytest.mark.parametrize("rung", ["fold_only", "weightless", "fused"])
@torch.no_grad()
def test_a_wrong_rung_gets_an_error_and_no_time(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs, "RUNGS", ("stock", rung, "block"))
    made = ladder_cases.Weights(CASE, "cpu")
    operation = made.operations[0]
    if rung == "fused":
        operation.packed = operation.packed * 1.02
    else:  # a gain that was applied twice
        operation.folded = tuple(w * made.gains[0] for w in operation.folded)
    fields, _ = ladder_cases.measure_cell(made, ROWS, _args("--seconds", "1"), {})
    assert "breaks the numerics contract" in fields[rung]["error"] and "us" not in fields[rung]
    assert "us" in fields["stock"]


@torch.no_grad()
def test_a_plan_that_was_refused_is_not_launched(
    small: ladder_cases.Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.Plan("single_pass", "hopper_swap", 16, 64, 64)
    monkeypatch.setattr(small, "tried", lambda m: ({"fused": (plan,), "packed": (None,)}, None))
    refused = {building.key(plan, CASE.problem(ROWS)): "the lint refuses it: too few buffers"}
    fields, best = ladder_cases.measure_cell(small, ROWS, _args("--seconds", "1"), refused)
    assert fields["fused"]["error"] == "ValueError: the lint refuses it: too few buffers"
    assert "us" in fields["packed"] and "fused" not in best


def test_plans_are_compiled_and_linted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, slow = (plans.Plan("single_pass", "gemv", 1, n, 256) for n in (1, 2, 4))
    answers = {good: Built(), bad: Built(findings=("kernel: one buffer",)), slow: None}
    closed = []

    class Pool:
        def __init__(self, jobs: int) -> None:
            pass

        def submit(self, job: Any) -> Future:
            future: Future = Future()
            if answers[job.plan] is not None:
                future.set_result(answers[job.plan])
            return future

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(building, "Pool", Pool)
    monkeypatch.setattr(building, "PATIENCE_S", 0.01)
    monkeypatch.setattr(building.runtime, "device_facts", lambda index: fake_gpu.HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_driver, "_active", _Driver())
    problem = Problem("bfloat16", 1, 3072, 2048)
    wanted = [(plan, problem) for plan in (good, bad, slow, plans.UNFUSED)]
    refused = building.compile_plans(wanted, lambda text: None)
    told = {plan: why for (plan, _), why in refused.items()}
    assert set(told) == {bad, slow} and closed
    assert told[bad] == "the lint refuses it: kernel: one buffer"
    assert "not compiled" in told[slow]


class _Driver:
    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cuda", arch=90, warp_size=32)


@pytest.mark.parametrize("rung", rungs.STRATEGY)
@torch.no_grad()
def test_an_operation_runs_the_strategy_of_its_rung(rung: str) -> None:
    gain = 1 + 0.5 * torch.randn(64)
    weights = [torch.randn(n, 64) * 64**-0.5 for n in (64, 32, 32)]
    made = rungs.Operation([w.half() for w in weights], gain.half(), 1e-5)
    x = torch.randn(1, 64).half()
    problem = Problem("float16", 1, 128, 64)
    (plan, *_) = rungs.plans_of(rung, problem, fake_gpu.AMPERE)
    assert plan.strategy == rungs.STRATEGY[rung]
    with fake_gpu.gpu() as patch:
        names = fake_gpu.launched(patch)
        (y,) = made(rung, x, plan)
    assert sorted(names) == sorted(KERNELS[rung])
    stock = torch.cat(made("stock", x), -1)
    wanted = accuracy.reference(x, gain.half(), torch.cat(weights).half(), 1e-5)
    assert (y.double() - wanted).norm() <= 1.5 * (stock.double() - wanted).norm()


@pytest.mark.parametrize("device", [fake_gpu.HOPPER, fake_gpu.AMPERE])
def test_plans_of_a_rung_are_of_its_strategy_and_fit(device: plans.Device) -> None:
    for m in (1, 16, 64, 256, 4096):
        problem = Problem("bfloat16", m, 3072, 2048)
        for rung, strategy in rungs.STRATEGY.items():
            found = rungs.plans_of(rung, problem, device, "NVIDIA H200")
            served = rung != "fused" or m == 1 or device.gluon
            assert bool(found) is served or m <= 64, (rung, m)
            assert len(found) <= 3 and len(set(found)) == len(found)
            for plan in found:
                assert plan.strategy == strategy and unfit(plan, problem, device) is None
    # What the package chooses leads where it is of the strategy.
    problem = Problem("bfloat16", 1, 3072, 2048)
    chosen = tables.lookup(problem, fake_gpu.HOPPER, "NVIDIA H200")
    assert rungs.plans_of("fused", problem, fake_gpu.HOPPER, "NVIDIA H200")[0] == chosen


@pytest.fixture(scope="module")
def stock() -> Any:
    """A tiny model in half precision, which the interpreter multiplies rightly."""
    return decoders.make("tiny", "cpu").half()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 128, (1, 1), generator=torch.Generator().manual_seed(1))


def _apart(model: Any, stock: Any, ids: torch.Tensor) -> float:
    wanted = copy.deepcopy(stock).double()(ids).logits
    off, off_stock = ((m(ids).logits.double() - wanted).norm() for m in (model, stock))
    return float(off / off_stock)


@pytest.mark.parametrize("rung", rungs.RUNGS)
@torch.no_grad()
def test_models_on_every_rung(rung: str, stock: Any, ids: torch.Tensor) -> None:
    model = copy.deepcopy(stock)
    handle = rungs.install(model, rung)
    norms = [m for name, m in model.named_modules() if name.endswith("norm")]
    assert len(norms) == 5
    kinds = {type(norm).__name__ for norm in norms}
    if rung in ("stock", "fold_only"):
        assert kinds == {"LlamaRMSNorm"}
        ones = [bool((norm.weight == 1).all()) for norm in norms]
        # The final norm's output leaves the model: its gain stays.
        assert ones == ([False] * 5 if rung == "stock" else [True] * 4 + [False])
    elif rung == "weightless":
        assert kinds == {"OneLaunch"}
        assert [norm.gain is None for norm in norms] == [True] * 4 + [False]
        assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    else:
        assert kinds == {"FusedNormLinear", "NormOnly"} and isinstance(norms[-1], NormOnly)
        whole = [block.level == "block" for block in handle.report.blocks]
        assert whole == [rung == "block"] * 2
    assert _apart(model, stock, ids) <= 2.0


@pytest.mark.parametrize("rung", rungs.STRATEGY)
@torch.no_grad()
def test_a_model_is_run_with_the_plans_of_its_rung(
    rung: str, stock: Any, ids: torch.Tensor
) -> None:
    model = copy.deepcopy(stock)
    problems = rungs.problems_of(model, [1])
    assert {(p.n, p.k) for p in problems} == {(128, 64), (192, 64)}
    rungs.install(model, rung)
    before = dict(os.environ)
    device, name = fake_gpu.AMPERE, "a GPU that is none"
    # Wide blocks: fewer of them for the interpreter.
    listed = [rungs.plans_of(rung, p, device, name) for p in problems]
    forced = tuple(
        (p, max(some, key=lambda plan: plan.block_n))
        for p, some in zip(problems, listed, strict=True)
    )
    with fake_gpu.gpu() as patch, rungs.only(forced, device, name):
        for problem, plan in forced:
            found = tables.choice(problem, device, name)
            assert (found.plan, found.source) == (plan, "user")
        names = fake_gpu.launched(patch)
        off = _apart(model, stock, ids)
    launched = [kernel for kernel in names if kernel != "rms_norm_kernel" or rung == "packed"]
    final = ["rms_norm_kernel"] if rung == "packed" else []
    assert sorted(launched) == sorted(4 * KERNELS[rung] + final)
    assert off <= 2.0 and dict(os.environ) == before
    assert tables.choice(forced[0][0], device, name).source == "heuristic"


def test_a_plan_that_cannot_run_is_no_silent_other(stock: Any, ids: torch.Tensor) -> None:
    model = copy.deepcopy(stock)
    rungs.install(model, "fused")
    device, name = fake_gpu.AMPERE, "a GPU that is none"
    plan = plans.Plan("single_pass", "gemv", 1, 16, 64)
    forced = tuple((problem, plan) for problem in rungs.problems_of(model, [1])) or tuple(
        (Problem("float16", 1, n, 64), plan) for n in (128, 192)
    )
    with fake_gpu.gpu() as patch, rungs.only(forced, device, name), torch.no_grad():
        fake_gpu.break_kernels(patch, lambda: RuntimeError("no such kernel"), "gemv")
        with pytest.raises(RuntimeWarning, match="no such kernel"):
            model(ids)


def test_cases_of_a_model() -> None:
    found = {case.name: case for case in ladder_cases.cases("llama-3.2-1b")}
    qkv, gate_up = found["llama-3.2-1b.qkv"], found["llama-3.2-1b.gate_up"]
    assert (qkv.k, qkv.parts) == (2048, (2048, 512, 512)) and qkv.n == 3072
    assert (gate_up.k, gate_up.parts) == (2048, (8192, 8192)) and gate_up.eps == 1e-5
    with pytest.raises(ValueError, match="rung 'none' is unknown"):
        rungs.install(decoders.make("tiny", "meta"), "none")


def test_waves_have_the_baseline_each(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _args()
    everyone = [
        ablation.contender(args, "tiny", level, rung)
        for rung in rungs.RUNGS
        for level in ("decode", "generate")
    ]
    assert ladder_cases.waves(everyone, "cpu") == [everyone]
    room = 3 * ladder_cases._CONTEXT_BYTES * 1.2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room, room))
    found = ladder_cases.waves(everyone, "cuda")
    assert [len(wave) for wave in found] == [6, 6, 6, 4]
    assert all({w.task for w in wave if w.level == "stock"} == {"decode", "generate"}
               for wave in found)  # fmt: skip
    assert {what for wave in found for what in wave} == set(everyone)
    # A compiled contender has a process, and so a model, of its own.
    many = [replace(w, mode=mode) for w in everyone[::2] for mode in ("graph", "compiled")]
    assert [len(wave) for wave in ladder_cases.waves(many, "cuda")] == [4] * 7


def test_who_went_down_with_another_answers_nothing() -> None:
    """Contenders that compile nothing share a process."""
    gone = ablation.contender(_args(), "tiny", "decode", "stock")
    group = Group([gone], "cpu")
    assert group.ask(gone, "ms", 1) is None and group.running([gone]) == []


class Together:
    """``contenders.Group`` in this process; ``spoiled`` rungs have a fault in their model."""

    spoiled: tuple[str, ...] = ()

    def __init__(self, group: list[Contender], *_: Any, **__: Any) -> None:
        self.errors: dict[Contender, str] = {}
        loaded = {w.level: Loaded(w.model, w.level, "cpu") for w in group}
        for rung in self.spoiled:
            loaded[rung].model.model.layers[1].mlp.down_proj.weight.data.mul_(2.5)
        self.steps = {what: steps_of(what, loaded[what.level]) for what in group}

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def running(self, some: list[Contender]) -> list[Contender]:
        return list(some)

    def ask(self, what: Contender, *question: Any) -> Any:
        return getattr(self.steps[what], question[0])(*question[1:])

    def times(self, some: list[Contender], *_: Any) -> dict[Contender, list[float]]:
        return {what: [3.0 if what.level == "stock" else 1.5] * 3 for what in some}


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "Group", Together)
    monkeypatch.setattr(Together, "spoiled", ("block",))
    monkeypatch.setattr(rungs, "RUNGS", ("stock", "fold_only", "block"))
    path = tmp_path / "ablation.json"
    words = ["--device", "cpu", "--models", "tiny", "--context", "16", "--rounds", "3"]
    words += ["--levels", "decode", "generate", "--new", "4", "--out", str(path)]
    assert ablation.main(words) == 1
    records = results.load(path).records
    levels = [r["level"] for r in records]
    assert levels == ["decode"] * 3 + ["generate"] * 3
    for record in records:
        if record["rung"] == "block":
            assert "from the stock model's" in record["error"] and "ms" not in record
        else:
            assert record["speedup"] == (1.0 if record["rung"] == "stock" else 2.0)
            assert record["tokens_per_s"] == 1e3 / record["ms"]
    out = capsys.readouterr().out
    assert "tiny: stock / rung" in out and "from the stock model's" in out


def test_the_budget_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = iter([False, True])
    monkeypatch.setattr(ablation.ladder_options, "spent", lambda args, seconds: next(spent))
    path = tmp_path / "ablation.json"
    words = ["--device", "cpu", "--models", "tiny", "--rounds", "3", "--seconds", "1"]
    words += ["--tokens", str(ROWS), "256", "--out", str(path), "--budget", "9"]
    assert ablation.main(words) == 1
    kept = results.load(path).records
    assert {r["m"] for r in kept} == {ROWS} and len(kept) == len(rungs.RUNGS)
    assert [r["error"] for r in kept if r.get("error")] == [ablation.WHOLE]
    assert "stopped at the budget of 9 s" in capsys.readouterr().out
    for wrong, message in ((["--tokens", "0"], "--tokens 0"), (["--new", "2"], "at least 4 tokens"),
                           (["--rounds", "0"], "--rounds 0")):  # fmt: skip
        with pytest.raises(SystemExit):
            ablation.parse(wrong)
        assert message in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert ablation.main([]) == 2
        assert "ablation: timing needs a GPU" in capsys.readouterr().err
