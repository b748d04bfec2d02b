"""bench/patching.py: what it calls patched, accurate and reverted must be so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import patching
from flashnorm_triton import patch, results
from flashnorm_triton.bench import generate

SIZE = generate.Size(2, 64, 4, 2, 128, 512, tied=False)
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "intermediate": 128, "vocab": 512}


def options(**values):
    words = [("--" + name.replace("_", "-"), str(value)) for name, value in values.items()]
    return [word for pair in words for word in pair]


TINY = options(device="cpu", tokens=24, **SIZES)


@pytest.fixture(scope="module")
def bench():
    with torch.no_grad():
        return patching.Bench(SIZE, device="cpu", tokens=24, seed=3)


@torch.no_grad()
def test_every_model_is_the_same_to_the_bit_and_that_is_what_same_sees(bench):
    first, second = bench.model(), bench.model()
    assert patching.same(first, second)
    gains = [m.weight for n, m in first.named_modules() if n.endswith("norm")]
    assert len(gains) == 5 and all(gain.float().std() > 0.3 for gain in gains)
    last = dict(second.named_parameters())["lm_head.weight"]
    last.view(torch.int16)[-1, -1] ^= 1  # one bit
    assert not patching.same(first, second)


@torch.no_grad()
def test_modules_and_buffers_count_as_well(bench):
    first, second = bench.model(), bench.model()
    second.model.rotary_emb.inv_freq = second.model.rotary_emb.inv_freq * 1.5
    assert not patching.same(first, second)
    third = bench.model()
    third.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert not patching.same(first, third)


def changing(forget):
    """A patch whose revert leaves something behind."""

    def faulty(model, **options):
        handle = patch(model, **options)
        revert = handle.revert

        def forgetful():
            revert()
            forget(model)

        handle.revert = forgetful
        return handle

    return faulty


leaves_a_gain_behind = changing(lambda model: model.model.norm.weight.data[:1].add_(0.25))
# token 0 is not among the ones that the logits are of
leaves_a_row_behind = changing(lambda model: model.model.embed_tokens.weight.data[0].neg_())


def spoils_a_gain(model, **options):
    model.model.layers[1].input_layernorm.weight.data.mul_(1.1)
    return patch(model, **options)


@pytest.mark.parametrize("fault", [leaves_a_gain_behind, leaves_a_row_behind])
@torch.no_grad()
def test_a_revert_that_loses_a_bit_is_a_goal_missed(bench, fault):
    record = bench.measure("patch()", fault)
    assert record["bit_equal"] is False
    assert record["missed"] == ["the reverted model is not the stock one bit for bit"]


@torch.no_grad()
def test_a_model_that_computes_something_else_misses_the_error_goal(bench):
    record = bench.measure("fold=False", spoils_a_gain)
    assert any(goal.startswith("error ") for goal in record["missed"])
    assert record["bit_equal"] is False


def test_goals():
    size = generate.EIGHT_B
    record = {"patch_s": 9.5, "peak_gb": 16.310, "peak_goal_gb": 16.319, "bit_equal": None}
    record |= {"rel_err": 0.0312, "rel_err_stock": 0.0250}
    assert patching.missed(record, size) == []
    for change, told in (
        ({"patch_s": 20.1}, "patching took 20.1 s"),
        ({"peak_gb": 16.32}, "peak 16.320 GB"),
        ({"rel_err": 0.0314}, "error 3.14e-02"),
        ({"rel_err": float("nan")}, "error nan"),
        ({"bit_equal": False}, "not the stock one"),
    ):
        (goal,) = patching.missed({**record, **change}, size)
        assert goal.startswith(told) or told in goal
    assert patching.missed({**record, "patch_s": 99.0}, SIZE) == []  # a goal for 8B alone
    assert patching.missed({**record, "peak_gb": None}, size) == []


def test_the_default_is_the_llama_8b_shape():
    args = patching.parse([])
    assert args.size == generate.EIGHT_B and args.size.name == "llama-3.1-8b"
    config = args.size.config()
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert (config.intermediate_size, config.vocab_size) == (14336, 128256)
    assert not config.tie_word_embeddings


def test_a_trial_on_a_cpu_measures_every_variant_and_says_what_it_is(tmp_path, capsys):
    path = tmp_path / "patching.json"
    assert patching.main([*TINY, "--out", str(path)]) == 0
    loaded = results.load(path)
    assert "no benchmark" in loaded.header["gpu"]
    records = {record["variant"]: record for record in loaded.records}
    assert list(records) == list(patching.VARIANTS)
    assert [r["sites"] for r in records.values()] == [4, 4, 4, 5]
    assert [r["bit_equal"] for r in records.values()] == [True, None, True, True]
    assert all(r["peak_gb"] is None and r["patch_s"] > 0 for r in records.values())
    assert "freed" in capsys.readouterr().out


def test_a_goal_missed_or_a_failure_is_the_exit_code(tmp_path, capsys):
    argv = [*TINY, "--variants", "patch()", "--out", str(tmp_path / "p.json")]
    assert patching.main(argv, patch=leaves_a_gain_behind) == 1
    assert "MISSED the reverted model" in capsys.readouterr().out

    def failing(model, **options):
        raise RuntimeError("no such site")

    assert patching.main(argv, patch=failing) == 1
    (record,) = results.load(tmp_path / "p.json").records
    assert record["error"] == "RuntimeError: no such site"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (TINY, "say where to write"),
        ([*TINY, "--out", "bench/results/x/patching.json"], "does not go into"),
        (["--tokens", "0"], "--tokens 0"),
        (["--variants", "twice"], "invalid choice: 'twice'"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    with pytest.raises(SystemExit) as stop:
        patching.main(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert patching.main(["--out", str(tmp_path / "p.json")]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_measured_and_within_its_goal(tmp_path):
    path = tmp_path / "p.json"
    argv = options(layers=2, hidden=1024, heads=8, kv_heads=4, intermediate=4096, vocab=4096)
    assert patching.main([*argv, "--out", str(path)]) == 0
    for record in results.load(path).records:
        assert record["weights_gb"] <= record["peak_gb"] <= record["peak_goal_gb"]
