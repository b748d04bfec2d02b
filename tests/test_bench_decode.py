"""The benches decode and prefill: what is compared, and that a wrong model gets no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashnorm_triton import results
from flashnorm_triton.bench import contenders, decode, decoders
from flashnorm_triton.bench.contenders import Contender, Loaded, Steps

TINY = Contender("tiny", "stock", "eager", 2, 16)


def _args(*words: str, task: str = "decode") -> Any:
    return decode.parse([*words, "--device", "cpu", "--out", "/tmp/x.json"], task)


@pytest.fixture
def steps() -> Steps:
    with torch.no_grad():
        return Steps(TINY, Loaded("tiny", "stock", "cpu"))


class Quiet:
    seconds = 0.0

    def __call__(self, text: str) -> None:
        pass


class Together:
    """A group whose contenders live in this process; ``spoil`` plants a fault in one's model."""

    def __init__(self, group: list[Contender], spoil: Any = None) -> None:
        self.errors: dict[Contender, str] = {}
        self.steps = {what: Steps(what, Loaded(what.model, what.level, "cpu")) for what in group}
        if spoil is not None:
            spoil(self.steps[group[-1]].model)

    def running(self, some: list[Contender]) -> list[Contender]:
        return list(some)

    def ask(self, what: Contender, *question: Any) -> Any:
        return getattr(self.steps[what], question[0])(*question[1:])

    def times(self, some: list[Contender], *how: Any) -> dict[Contender, list[float]]:
        return {what: [1.0 + 1.0 * (what.level == "stock")] * 3 for what in some}


@torch.no_grad()
def _measured(spoil: Any = None, level: str = "block") -> list[dict[str, Any]]:
    group = [TINY, Contender("tiny", level, "eager", 2, 16)]
    args = _args("--models", "tiny")
    return decode.measure_cell(Together(group, spoil), group, args, 4.0, Quiet())


def test_a_cell_is_measured_against_stock() -> None:
    stock, patched = _measured()
    assert patched["speedups"] == {"eager": 2.0} and stock["speedups"] == {}
    assert patched["apart"] < 0.03 and stock["apart"] is None
    assert patched["tokens_per_s"] == 2 * stock["tokens_per_s"] == 2000.0
    assert 0 < patched["fraction_of_bandwidth"] < 1e-3
    head = results.header(copy_tb_s=4.0, matmul_tflops=800.0, gpu="NVIDIA H200")
    results.validate(head, [stock, patched])


def _louder(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)


def _other_values(model: Any) -> None:
    """What goes into the cache is off, which one more key of fifteen hardly shows in the logits."""
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(0.9)


@pytest.mark.parametrize("spoil", [_louder, _other_values])
def test_a_wrong_model_gets_an_error_and_no_time(spoil: Any) -> None:
    stock, patched = _measured(spoil)
    assert "ms" in stock and "ms" not in patched
    assert "from the stock model's" in patched["error"]


@torch.no_grad()
def test_steps_go_back_to_the_prompts_end(steps: Steps) -> None:
    first = steps.logits()
    steps.step()
    again = steps.logits()
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert steps.most == 2 and steps.filled == 14
    assert steps.ms(2) > 0
    with pytest.raises(Exception):  # noqa: B017  a full cache has no further place
        steps.step()


def test_same_seed_same_model() -> None:
    one, other = (decoders.make("tiny", "cpu").state_dict() for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)
    norms = [key for key in one if key.endswith("norm.weight")]
    assert norms and all((one[key] - one[key].mean()).abs().max() > 0.1 for key in norms)


def test_least_bytes_of_a_step() -> None:
    model = decoders.make("tiny", "cpu")
    embedding = 128 * 64
    weights = sum(p.numel() for p in model.parameters()) - embedding
    assert decoders.step_bytes(model, 3, 10) == 2 * (weights + 3 * 10 * 2 * 2 * 2 * 16)


@pytest.mark.parametrize("name", decoders.NAMES)
def test_named_shapes(name: str) -> None:
    config = decoders.config_of(name)
    assert config.head_dim * config.num_attention_heads >= config.hidden_size * 0.8


def test_cells_and_their_order() -> None:
    cells = [cell for wave in decode.waves(_args()) for cell in wave]
    named = [(cell[0].model, cell[0].batch) for cell in cells]
    assert named[:2] == [("llama-3.2-1b", 1), ("llama-3.1-8b", 1)]
    assert set(named) >= {("gemma-3-1b", 1), ("llama-3.1-8b", 16), ("llama-3.2-1b", 32)}
    first = {(what.level, what.mode) for what in cells[0]}
    assert ("norm", "reduce-overhead") in first and ("block", "max-autotune") in first
    for cell in cells:
        assert cell[0].level == "stock"
        assert cell[0].batch == 1 or all(what.mode != "max-autotune" for what in cell)
    (only,) = [c for w in decode.waves(_args("--models", "tiny", "--batches", "2")) for c in w]
    assert {what.batch for what in only} == {2}
    prefill = [c for w in decode.waves(_args(task="prefill")) for c in w]
    assert [{what.mode for what in cell} for cell in prefill] == [{"eager", "compiled"}]


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "0"],
        ["--batches", "0"],
        ["--models", "tiny", "--batches", "8"],
        ["--tokens", "4"],
        ["--out", "bench/results/x.json"],
    ],
)
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        decode.parse(["--device", "cpu", "--out", "/tmp/x.json", *words], "decode")
    assert stopped.value.code == 2 and capsys.readouterr().err


class _Process:
    """One that compiles for ever, until it is killed."""

    def __init__(self) -> None:
        self.alive, self.waited = True, 0.0

    def join(self, timeout: float | None = None) -> None:
        self.waited += timeout or 0.0

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.alive = False

    def send(self, message: Any) -> None:
        raise OSError("it does not listen")


@pytest.mark.parametrize("when", ["while they get ready", "while they are timed"])
def test_an_interrupt_ends_every_process(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Process] = []

    def start(self: Any, sharing: Any, lock: Any) -> None:
        made.append(_Process())
        self._processes.append((made[-1], made[-1]))

    def gather(self: Any, ended: float) -> None:
        if when == "while they get ready":
            raise KeyboardInterrupt

    monkeypatch.setattr(contenders.Group, "_start", start)
    monkeypatch.setattr(contenders.Group, "_gather", gather)
    with pytest.raises(KeyboardInterrupt), contenders.Group([TINY], "cpu"):
        raise KeyboardInterrupt
    assert made and not any(each.alive for each in made)
    assert all(each.waited < 1 for each in made)


def test_a_group_of_processes() -> None:
    """Two share a process and are timed; reasons of one that fails and of one that is late are
    kept."""
    good, too, bad = TINY, Contender("tiny", "stock", "eager", 1, 16), Contender(
        "tiny", "no such level", "eager", 2, 16
    )  # fmt: skip
    said: list[str] = []
    with contenders.Group([good, bad, too], "cpu", log=said.append) as group:
        assert group.running([good, bad, too]) == [good, too] and len(group._processes) == 2
        assert "level" in group.errors[bad]
        times = group.times([good, bad, too], 2, 2, lambda: False)
        assert group.ask(good, "no such question") is None
        assert "no such question" in group.errors[good]
    assert list(times) == [good, too] and len(times[good]) == 2
    assert any("batch 1" in line and "ready" in line for line in said)
    with contenders.Group([good], "cpu", patience=0.0) as group:
        assert group.errors == {good: "not ready after 0 s"} and not group.running([good])


@pytest.mark.parametrize("task", ["decode", "prefill"])
def test_without_a_gpu(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode.main([], task) == 2
    assert "--device cpu" in capsys.readouterr().err
