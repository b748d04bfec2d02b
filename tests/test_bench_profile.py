"""bench/profile.py: what a trace's launches are told to be, marks, and the records of a profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import flashnorm_triton
from flashnorm_triton import patch, results
from flashnorm_triton.bench import decoders, launch_groups, marks, profile, profiling, quantizing
from flashnorm_triton.bench.contenders import Contender, Loaded, Steps
from flashnorm_triton.bench.launch_groups import Launch, group_of
from flashnorm_triton.models.block.layer import Runner

KERNELS = Path(flashnorm_triton.__file__).parent / "kernels"


def _event(cat: str, name: str, ts: float, dur: float, tid: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def _trace() -> dict[str, Any]:
    """Two threads; kernels run long after they are launched, in the order of their launches."""
    spans = [
        ("user_annotation", "flashnorm|layer|layers.0", 0, 100, 7),
        ("user_annotation", "flashnorm|norm|layers.0.norm", 1, 9, 7),
        ("cpu_op", "aten::mul", 2, 3, 7),
        ("user_annotation", "flashnorm|matmul|layers.0.q", 11, 9, 7),
        ("cpu_op", "aten::linear", 12, 7, 7),
        ("cpu_op", "aten::mm", 13, 5, 7),
        ("cpu_op", "aten::add", 30, 5, 7),
        ("cpu_op", "aten::scaled_dot_product_attention", 40, 9, 7),
        ("cpu_op", "aten::bmm", 41, 3, 7),
        # Another thread's operation at the same time as the first thread's norm.
        ("cpu_op", "aten::embedding", 1, 9, 8),
    ]
    events = [_event(cat, name, ts, dur, tid) for cat, name, ts, dur, tid in spans]
    calls = [(3, 7, "mul"), (14, 7, "gemm"), (31, 7, "add"), (42, 7, "bmm"), (4, 8, "gather")]
    for number, (ts, tid, name) in enumerate(calls):
        events.append(_event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation=number))
        kernel = _event("kernel", name, 500 + 10 * ts, 2 + number, 0, correlation=number)
        events.append(kernel)
    events.append(_event("cuda_runtime", "cudaMemcpyAsync", 50, 1, 7, correlation=9))
    events.append(_event("gpu_memcpy", "Memcpy HtoD", 1100, 1.5, 0, correlation=9))
    events.append({"ph": "M", "name": "process_name", "args": {}})
    return {"traceEvents": events[::-1]}


def test_launches_are_told_by_what_was_around_them() -> None:
    launches = launch_groups.launches_in(_trace())
    told = {launch.name: group_of(launch) for launch in launches}
    assert told == {
        "mul": "norm", "gemm": "matmul", "add": "residual", "bmm": "attention",
        "gather": "other", "Memcpy HtoD": "copy",
    }  # fmt: skip
    summary = launch_groups.summary(launches)
    assert summary["launches"] == 5 and summary["norms_launched"] == 1
    assert summary["norm_ms"] == 0.002 and summary["busy_ms"] == pytest.approx(0.0215)
    assert summary["norm_share"] == pytest.approx(2 / 21.5)
    assert sum(group["us"] for group in summary["groups"]) == pytest.approx(21.5)
    assert {"group": "copy", "launches": 0, "us": 1.5} in summary["groups"]


@pytest.mark.parametrize(
    ("launch", "group"),
    [
        # In the place of a patched norm its linears' product is launched, and its statistics.
        (Launch("gemm", 1, (("norm", "a"),), ("mm",)), "matmul"),
        (Launch("rms_norm_kernel", 1, (("norm", "a"),)), "norm"),
        (Launch("norm_gemv_kernel", 1, (("norm", "a"),)), "matmul"),
        (Launch("scale_rows_kernel", 1), "norm"),
        (Launch("norm_swap_kernel_0d1d", 1), "matmul"),
        (Launch("elementwise", 1, (("mlp", "m"),), ("mul",)), "activation"),
        (Launch("elementwise", 1, (("attention", "m"),), ("mul",)), "attention"),
        (Launch("copy", 1, (("attention", "m"),), ("reshape", "clone", "copy_")), "copy"),
        (Launch("write", 1, (), ("index_copy_",)), "cache"),
        (Launch("flash_fwd", 1, (), ("_scaled_dot_product_flash_attention",)), "attention"),
        (Launch("int4", 1, (), ("_weight_int4pack_mm",)), "matmul"),
        (Launch("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", 1), "norm"),
        (Launch("triton_red_fused_mm_mean_rsqrt_1", 1), "matmul"),
        (Launch("triton_poi_fused_mul_silu_5", 1), "activation"),
        (Launch("triton_poi_fused_add_cat_cos_mul_neg_sin", 1), "rotary"),
        (Launch("triton_poi_fused_index_put_2", 1), "cache"),
        (Launch("who_knows", 1), "other"),
    ],
)
def test_groups(launch: Launch, group: str) -> None:
    assert group_of(launch) == group


def test_every_kernel_of_the_package_has_a_group() -> None:
    named = [
        name
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    ]
    assert sorted(named) == sorted(launch_groups.OWN)
    assert set(launch_groups.OWN.values()) <= set(launch_groups.GROUPS)


def test_a_replay_is_told_by_the_calls_it_was_captured_from() -> None:
    called = [Launch("mul", 9, (("norm", "a"),)), Launch("mul", 9, (("mlp", "m"),), ("mul",)),
              Launch("gemm", 9, (), ("mm",))]  # fmt: skip
    replayed = [Launch("mul", 1), Launch("mul", 2), Launch("gemm", 3)]
    copied = [Launch("Memcpy", 1, copy=True), *replayed]
    assert launch_groups.groups_of_replay(copied, called) == [
        "copy", "norm", "activation", "matmul",
    ]  # fmt: skip
    # Another order: by name, where a name is mostly one thing.
    swapped = [replayed[2], replayed[0]]
    assert launch_groups.groups_of_replay(swapped, called)[0] == "matmul"


def _steps(level: str, quantization: str = "none") -> Steps:
    what = Contender("tiny", level, "eager", 1, 16, quantization=quantization)
    return Steps(what, Loaded("tiny", level, "cpu", "bfloat16", quantization))


@pytest.mark.parametrize("level", ["stock", "norm", "block"])
@torch.no_grad()
def test_a_real_trace_of_a_step(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _steps(level)
    ran: list[Any] = []
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda *args: ran.append(args) or run(*args))
    before = {name: dict(m._forward_hooks) for name, m in steps.model.named_modules()}
    fields = profiling.of(steps)
    groups = {group["group"]: group["launches"] for group in fields["groups"]}
    assert fields["norms"] == 5
    # Marks make no block its layer's own code again; one step before the traced one.
    assert len(ran) == (4 if level == "block" else 0)
    assert fields["norms_launched"] == (None if level == "block" else 5)
    # q, k, v, o, gate, up and down of two layers and the head; q | k | v and gate | up are one.
    assert groups["matmul"] == {"stock": 15, "norm": 9, "block": 9}[level]
    assert groups["norm"] >= 5 and groups["attention"] >= 2
    if level != "block":
        assert groups["residual"] == 4 and groups["activation"] == 4
        assert groups["rotary"] >= 8 and groups["cache"] >= 2
    after = {name: dict(m._forward_hooks) for name, m in steps.model.named_modules()}
    assert before == after and "update" not in vars(steps.cache)
    assert not hasattr(modeling_llama.apply_rotary_pos_emb, "__wrapped__")


@torch.no_grad()
def test_marks_go_with_an_exception() -> None:
    model = decoders.make("tiny", "cpu")
    norms = marks.norm_paths(model)
    with pytest.raises(IndexError), marks.marked(model, norms):
        model(torch.tensor([[10_000]]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_norms_of_llama_3_2_1b() -> None:
    model = decoders.make("llama-3.2-1b", "meta")
    assert len(marks.norm_paths(model)) == 33 == 2 * model.config.num_hidden_layers + 1


def test_quantizing() -> None:
    model = decoders.make("tiny", "cpu")
    head = model.lm_head.weight
    assert quantizing.quantize(model, "none") is None
    assert len(quantizing.linears(model)) == 14
    pytest.importorskip("torchao")
    assert quantizing.quantize(model, "int8") == "torchao"
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
    assert model.lm_head.weight is head
    report = patch(model, level="norm").report
    assert len(report.fused) == 0 and sum(s.decision == "norm_only" for s in report.sites) == 5
    with pytest.raises(ValueError, match="quantization 'int2' is unknown"):
        quantizing.quantize(model, "int2")


def test_a_library_that_leaves_the_weights_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "_LIBRARIES", {"torch": lambda model, kind: None, "no_such": 0})
    with pytest.raises(quantizing.Unavailable, match="torch left 14 linears.*no_such is not inst"):
        quantizing.quantize(decoders.make("tiny", "cpu"), "int4")


groups: list[list[Contender]] = []


class Together:
    """``contenders.Group`` in this process; the contenders of ``failing`` are not ready."""

    failing: tuple[str, ...] = ()

    def __init__(self, group: list[Contender], *_: Any, **__: Any) -> None:
        groups.append(list(group))
        self.errors = {what: "Unavailable: no library" for what in group if self._fails(what)}
        self.steps = {what: _steps(what.level) for what in group if what not in self.errors}

    def _fails(self, what: Contender) -> bool:
        return what.quantization in self.failing

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def running(self, some: list[Contender]) -> list[Contender]:
        return [what for what in some if what in self.steps]

    def ask(self, what: Contender, name: str) -> Any:
        return getattr(self.steps[what], name)()

    def times(self, some: list[Contender], *_: Any) -> dict[Contender, list[float]]:
        return {w: [2.0 if w.level == "stock" else 1.0] * 3 for w in self.running(some)}


def _main(path: Path, *words: str) -> int:
    common = ["--device", "cpu", "--models", "tiny", "--context", "16", "--modes", "eager"]
    return profile.main([*common, "--out", str(path), *words])


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "Group", Together)
    monkeypatch.setattr(Together, "failing", ("int8",))
    path = tmp_path / "profile.json"
    assert _main(path, "--quantization", "none", "int8") == 0
    records = results.load(path).records
    told = {(r["variant"], r["quantization"]): r for r in records}
    assert len(told) == 6 and told["norm", "none"]["speedup"] == 2.0
    assert told["stock", "none"]["norm_share"] > 0
    assert told["block", "int8"]["error"] == profile.NO_BLOCKS
    assert told["norm", "int8"]["error"] == "Unavailable: no library"
    # All that memory holds is there at the same time.
    assert len(groups[-1]) == 5
    measured = len(groups)
    assert _main(path, "--quantization", "none", "--resume") == 0
    assert len(groups) == measured and len(results.load(path).records) == 3
    assert "Unavailable: no library" in capsys.readouterr().out


def test_the_budget_and_what_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "Group", Together)
    spent = iter([False, True])
    monkeypatch.setattr(profile.ladder_options, "spent", lambda args, seconds: next(spent))
    path = tmp_path / "profile.json"
    monkeypatch.setattr(profile.ladder_cases, "waves", lambda some, device: [[w] for w in some])
    words = ["--quantization", "none", "int8", "--variants", "stock", "--budget", "5"]
    assert _main(path, *words) == 1
    assert [r["quantization"] for r in results.load(path).records] == ["none"]
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert profile.main([]) == 2
        assert "needs a GPU" in capsys.readouterr().err
    for words, message in (
        (["--budget", "-1"], "--budget -1"),
        (["--context", "8"], "at least 16"),
    ):
        with pytest.raises(SystemExit):
            profile.parse(words)
        assert message in capsys.readouterr().err
