"""The bench generate: a speed is only reported for a model that agrees, step by step."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashnorm_triton import patch, results
from flashnorm_triton.bench import decoders, decoding, generate

SIZE = generate.Size(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=512)
HEAD = results.header(copy_tb_s=4.0, matmul_tflops=800.0, gpu="NVIDIA H200")


def options(**values):
    words = [("--" + name.replace("_", "-"), str(value)) for name, value in values.items()]
    return [word for pair in words for word in pair]


TINY = options(device="cpu", layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128)
TINY += options(vocab=512, new=8, prompt=6, repeats=1)


def bench_with(patch_function, new=8):
    torch.manual_seed(5)
    with torch.no_grad():
        return generate.Bench(SIZE, prompt=6, new=new, device="cpu", patch=patch_function)


@torch.no_grad()
def measured(patch_function, mode="eager"):
    bench = bench_with(patch_function)
    records = bench.measure(mode, repeats=1, copy_tb_s=4.0, log=Quiet(), budget_s=100.0)
    return {record["variant"]: record for record in records}


class Quiet:
    seconds = 0.0

    def __call__(self, text: str) -> None:
        pass


# --- faults that must not get a speed -----------------------------------------------------------


def scaled_gain(model):
    model.model.layers[1].post_attention_layernorm.weight.data.mul_(1.02)


class Lagging(torch.nn.Module):
    """A head that answers with the previous step's logits, as a stale graph would."""

    def __init__(self, head):
        super().__init__()
        self.head, self.last = head, None

    def forward(self, x):
        now = self.head(x)
        before, self.last = self.last, now
        return now if before is None or x.shape[1] > 1 else before[:, -1:]


def lagging(model):
    model.lm_head = Lagging(model.lm_head)


def never_moves(model):
    original = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: original(x, position_ids * 0)


def not_finite(model):
    model.lm_head.register_forward_hook(lambda module, args, out: out * math.nan)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (scaled_gain, "logits err by .* times the stock"),
        (lagging, "closer to step t than to t-1"),
        (never_moves, "logits err by|closer to step t"),
        (not_finite, "closer to step t than to t-1"),
    ],
)
def test_a_model_that_disagrees_gets_an_error_and_no_speed(fault, message):
    got = measured(fault)
    assert "tokens_per_s" not in got["patched"] and "speedup" not in got["patched"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(got["patched"]["error"])
    assert got["stock"]["tokens_per_s"] > 0
    results.validate(HEAD, list(got.values()))


def test_a_model_that_fails_is_recorded_and_stock_is_still_timed():
    def broken(model):
        def fail(*args):
            raise RuntimeError("no such plan")

        model.lm_head.register_forward_pre_hook(fail)

    got = measured(broken)
    assert got["patched"]["error"] == "RuntimeError: no such plan"
    assert got["stock"]["tokens_per_s"] > 0


def test_the_patched_model_agrees_and_both_get_valid_records():
    got = measured(patch)
    results.validate(HEAD, list(got.values()))
    patched = got["patched"]
    assert patched["agreement"]["ratio"] < 1.25 and patched["agreement"]["margin"] > 10
    assert patched["speedup"] > 0 and patched["tokens_per_s"] > 0
    assert patched["host_ms"] > 0
    assert 0 < patched["fraction_of_bandwidth"] < 1


def test_speedup_is_stock_over_patched_run_by_run(monkeypatch):
    times = {"stock": [2.0, 4.0, 9.0], "patched": [1.0, 2.0, 3.0]}
    monkeypatch.setattr(generate.Bench, "_time", lambda *args: (times, {}))
    got = measured(patch)
    assert got["patched"]["speedup"] == 2.0
    assert got["patched"]["tokens_per_s"] == 4.0 and got["patched"]["ms"] == 250.0
    assert got["stock"]["ms"] == 500.0


def test_greedy_tokens_that_part_for_no_reason_are_an_error(monkeypatch):
    monkeypatch.setattr(decoding, "tokens_problem", lambda *args: (3, "greedy tokens part"))
    got = measured(patch)["patched"]
    assert got["error"] == "greedy tokens part" and got["first_difference"] == 3
    assert "tokens_per_s" not in got


# --- the pieces ---------------------------------------------------------------------------------


def test_the_default_is_the_llama_1b_shape():
    config = generate.Size().config()
    assert (config.hidden_size, config.num_hidden_layers) == (2048, 16)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert (config.intermediate_size, config.vocab_size) == (8192, 128256)
    assert config.tie_word_embeddings
    assert generate.Size().name == "llama-3.2-1b" and SIZE.name == "llama-2x64"


def test_models_have_random_gains_and_bf16_weights():
    torch.manual_seed(0)
    model = generate.make_model(SIZE, "cpu")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for module in (model.model.norm, model.model.layers[0].input_layernorm):
        assert module.weight.float().std() > 0.3


def test_step_bytes_counts_a_tied_head_once_and_the_cache():
    model = generate.make_model(SIZE, "cpu")
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 128) + 2 * 64
    weights = 2 * (2 * layer + 512 * 64 + 64)
    assert decoders.step_bytes(model, 1, 0) == weights
    assert decoders.step_bytes(model, 1, 10) == weights + 10 * 2 * 2 * 2 * 16 * 2


def logits(*, noise: float, steps=8, shift=0):
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(steps + 1, 50, generator=generator, dtype=torch.float64)
    noisy = clean + noise * torch.randn(steps + 1, 50, generator=generator, dtype=torch.float64)
    return clean[1:], noisy[1 - shift : steps + 1 - shift].float()


def test_agreement_tells_rounding_from_error_and_lag():
    wanted, stock = logits(noise=0.01)
    _, good = logits(noise=0.011)
    _, bad = logits(noise=0.02)
    _, late = logits(noise=0.01, shift=1)
    assert decoding.agreement(good, stock, wanted).problem is None
    assert "times the stock" in decoding.agreement(bad, stock, wanted).problem
    assert "t-1" in decoding.agreement(late, stock, wanted).problem
    assert decoding.agreement(late, stock, wanted).margin < 0.1
    assert "t-1" in decoding.agreement(good * math.nan, stock, wanted).problem
    one_late = good.clone()
    one_late[5] = good[4]
    assert "t-1" in decoding.agreement(one_late, stock, wanted).problem


class Judge:
    """Stands in for the float64 model: the same logits whatever the ids."""

    def __init__(self, row):
        self.row = torch.tensor(row, dtype=torch.float64)

    def __call__(self, ids, **options):
        self.ids = ids
        return SimpleNamespace(logits=self.row.view(1, 1, -1))


def test_greedy_tokens_may_part_only_at_a_tie():
    prompt = torch.tensor([[7, 8]])
    stock, patched = torch.tensor([1, 2, 0, 3]), torch.tensor([1, 2, 1, 0])
    judge = Judge([1.0, 1.01, -3.0, -3.0])
    assert decoding.tokens_problem(stock, stock, prompt, judge, 0.0) == (None, None)
    step, problem = decoding.tokens_problem(stock, patched, prompt, judge, 0.006)
    assert (step, problem) == (2, None)
    assert judge.ids.tolist() == [[7, 8, 1, 2]]
    step, problem = decoding.tokens_problem(stock, patched, prompt, judge, 0.004)
    assert step == 2 and "part at step 2" in problem


@torch.no_grad()
def test_forced_generation_sees_the_logits_of_the_forced_sequence():
    bench = bench_with(lambda model: None)
    got = decoding.forced_logits(bench.reference, bench.prompt, bench.forced, "eager")
    assert got.shape == (8, 512)
    error = (got - bench.wanted).norm() / bench.wanted.norm()
    assert error < 1e-5


@torch.no_grad()
def test_watching_sees_every_call_and_leaves_the_model_as_it_was():
    model = generate.make_model(SIZE, "cpu")
    prompt = torch.randint(1, 512, (1, 6))
    watch = decoding.Watch()
    with decoding.watching(model, "eager", watch):
        decoding.generate(model, prompt, 5, "eager")
    assert len(watch.host_s) == 5  # the prefill and four steps
    assert not model._forward_hooks and not model._forward_pre_hooks
    with decoding.watching(model, "compiled", watch):
        call = model.get_compiled_call(None)
    assert call.__name__ == "timed" and "get_compiled_call" not in vars(model)


def test_times_of_a_step_are_medians_over_the_later_half():
    watch = decoding.Watch(host_s=[9.0, 9.0, 9.0, 0.001, 0.002, 0.003])
    assert watch.medians_ms() == (pytest.approx(2.0), None)


# --- the command line ---------------------------------------------------------------------------


def test_a_trial_on_a_cpu_is_labelled_as_one(tmp_path, capsys):
    path = tmp_path / "generate.json"
    assert generate.main([*TINY, "--out", str(path)]) == 0
    loaded = results.load(path)
    assert "no benchmark" in loaded.header["gpu"]
    assert [(r["mode"], r["variant"]) for r in loaded.records] == [
        ("eager", "stock"),
        ("eager", "patched"),
    ]
    assert "speedup" in capsys.readouterr().out


def test_a_disagreement_is_the_exit_code(tmp_path, capsys):
    assert generate.main([*TINY, "--out", str(tmp_path / "g.json")], patch=lagging) == 1
    assert "closer to step t" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (TINY, "say where to write"),
        ([*TINY, "--out", "bench/results/x/generate.json"], "does not go into"),
        (["--new", "3"], "--new 3"),
        (["--prompt", "0"], "--prompt 0"),
        (["--repeats", "0"], "--repeats 0"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    with pytest.raises(SystemExit) as stop:
        generate.main(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert generate.main(["--out", str(tmp_path / "g.json")]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_tiny_model_is_measured(tmp_path):
    path = tmp_path / "g.json"
    argv = options(layers=2, hidden=512, heads=8, kv_heads=4, intermediate=1024, vocab=4096)
    argv += options(new=16, prompt=16, repeats=3, modes="eager", out=path)
    assert generate.main(argv) == 0
    stock, patched = results.load(path).records
    assert 0 < patched["launches"] < stock["launches"]
    assert patched["step_ms"] > 0 and patched["gpu_busy_ms"] > 0
