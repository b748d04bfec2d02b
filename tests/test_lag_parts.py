"""The parts of the lag detector: limits, explanations, taps, texts, and what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from late_reads import as_a_user_runs_it  # noqa: F401  (a fixture of every test here)
from tiny_models import VOCABULARY, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.lag import noise, steps, verdict
from flashnorm_triton.lag.repeats import repeats
from flashnorm_triton.lag.sites import Site, scale_of, sites_to_watch, stock_output
from flashnorm_triton.lag.stepping import Decoder, Sampler
from flashnorm_triton.lag.taps import Taps
from flashnorm_triton.models.installers import sites_of


def test_limits_leave_clean_runs_alone() -> None:
    """Log-normal distances, a Gaussian scale: no run of two hundred is above its own limit."""
    draw = np.random.default_rng(int(torch.randint(1 << 30, ())))
    for _ in range(200):
        control, candidate = (np.exp(draw.normal(-5, 0.3, 2000)) for _ in range(2))
        limit = noise.limit_of_size(control, 2000, 0.0)
        assert (candidate <= limit).all() and limit < 12 * np.median(control)
        control, candidate = (draw.normal(0, 1e-4, 2000) for _ in range(2))
        assert (np.abs(candidate) <= noise.limit_of_scale(control, 2000, 0.0)).all()


def test_limits_have_a_floor_and_grow_with_the_looks() -> None:
    control = np.exp(np.random.default_rng(0).normal(-5, 0.3, 100))
    assert noise.limit_of_size(np.zeros(9), 9, 0.25) == 0.25
    assert noise.limit_of_size(control, 10**7, 0) > noise.limit_of_size(control, 10, 0)
    assert noise.limit_of_size(np.full(3, np.nan), 3, 0.1) == np.inf
    # Rows of zeros do not round, and say nothing of those that do.
    with_zeros = np.concatenate([control, np.zeros(5)])
    assert noise.limit_of_size(with_zeros, 10, 0) == noise.limit_of_size(control, 10, 0)


def test_rows_of_zeros_are_no_fault() -> None:
    """A padding token's embedding is zero: nothing over nothing is no distance."""
    model = tiny_model("llama", eos_token_id=None)
    with torch.no_grad():
        model.get_input_embeddings().weight[::2] = 0
    report = fn.find_lag(model, tokens=60, layers="sites", repeats=False)
    assert report.clean and all(np.isfinite(place.worst) for place in report.places)
    assert any(token % 2 == 0 for token in report.texts["patched"][:, 0])


def test_a_step_that_cannot_be_told_from_the_one_before_is_not_lagged() -> None:
    """Where stock says the same twice, t-1 explains everything that t does."""
    same = {name: np.full((5, 1), 0.01) for name in ("noise", "noise_before", "kl")}
    figures = steps.Steps(
        at_t=np.full((5, 1), 0.011), at_before=np.full((5, 1), 0.009), moved=np.full((5, 1), 1e-3),
        kl_back=same["kl"], kl_noise=same["kl"], **same,
    )  # fmt: skip
    marks = verdict.of_logits(figures, 5, 0.0)
    assert not marks.any(verdict.LAG).any() and not marks.decidable.any()


def test_distances_are_those_of_centred_logits() -> None:
    """A constant added to the logits is no distance; KL is torch's."""
    draw = [torch.randn(4, 2, 31, dtype=torch.float64) for _ in range(3)]
    ours, stock, wanted = draw
    before = torch.randn(2, 31, dtype=torch.float64)
    shifted = ours + torch.randn(4, 2, 1, dtype=torch.float64)
    one, other = (steps.compare(x, stock, wanted, before) for x in (ours, shifted))
    for name, values in vars(one).items():
        np.testing.assert_allclose(values, getattr(other, name), rtol=1e-9, err_msg=name)
        assert values.shape == (4, 2)
    last = torch.cat([before[None], wanted[:-1]])

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    at_before = (centred(ours) - centred(last)).norm(dim=-1) / centred(wanted).norm(dim=-1)
    np.testing.assert_allclose(one.at_before, at_before.numpy(), rtol=1e-12)
    kl = torch.nn.functional.kl_div(
        ours.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    np.testing.assert_allclose(one.kl, kl.numpy(), rtol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma"])
def test_a_sites_output_is_affine_in_its_scale(family: str) -> None:
    """Biases of linears and norms, gains of either kind, Conv1D: y = y0 + v, and v follows s."""
    model = tiny_model(family, torch.float64)
    patched = copy.deepcopy(model)
    report = fn.patch(patched).report
    site = next(s for s in sites_to_watch(patched, report, True) if len(s.outputs) >= 1)
    x = torch.randn(5, 64, dtype=torch.float64)
    norm = model.get_submodule(site.norm)
    wanted = torch.cat([model.get_submodule(path)(norm(x)) for path in site.outputs], -1)
    v, y0 = stock_output(model, site, x)
    torch.testing.assert_close(y0 + v, wanted)
    # Half the scale on the same row: half of v. (Stock norms compute s in float32.)
    shift = getattr(norm, "bias", torch.zeros(()))
    half = shift + (norm(x) - shift) / 2
    halved = torch.cat([model.get_submodule(path)(half) for path in site.outputs], -1)
    torch.testing.assert_close(y0 + v / 2, halved)
    if family != "gpt2":
        s = scale_of(site, x)
        torch.testing.assert_close(s, 1 / (x.square().mean(-1) + site.eps).sqrt())


def test_scales_of_other_norms_are_not_guessed() -> None:
    assert scale_of(Site("norm", (), "dyt", 0.0), torch.randn(2, 3)) is None


def test_repeats_of_known_texts() -> None:
    period = [1, 2, 3] * 10
    found = repeats([period])
    assert found.longest_run == 27 and found.doubled == 0
    assert found.distinct[1] == 3 / 30 and found.distinct[2] == 3 / 29
    assert repeats([[5, 5, 5, 5]]).longest_run == 3 and repeats([[5, 5, 5, 5]]).doubled == 1
    fresh = repeats([list(range(40))])
    assert fresh.longest_run == 0 and set(fresh.distinct.values()) == {1.0}
    # Texts of a batch do not run on into one another.
    assert repeats([[1, 2], [2, 3]]).doubled == 0


def test_sampling_is_the_seeds_and_follows_the_chances() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, 4)
    cpu = torch.device("cpu")
    one, other = (Sampler(1.0, None, 7, cpu)(logits) for _ in range(2))
    assert torch.equal(one, other)
    share = torch.bincount(one, minlength=4) / 4000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.04, rtol=0)
    assert set(Sampler(1.0, 2, 7, cpu)(logits).tolist()) == {1, 2}
    assert torch.equal(Sampler(0.0, None, 7, cpu)(logits), logits.argmax(-1))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps_are_those_of_generate(kind: str, device: torch.device) -> None:
    """Left padding and all: the logits of the model's own generate. (GPT-2's positions are
    learned; rotary ones would not tell that all have moved.)"""
    model = tiny_model("gpt2", eos_token_id=None).to(device)
    ids = token_ids(3, 9).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    wanted = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, disable_compile=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    decoder, sampler = Decoder(model, "eager", kind, 3, 21), Sampler(0, None, 0, device)
    with torch.no_grad():
        logits = [decoder.prefill(ids, mask)[:, -1]]
        while len(logits) < 12:
            logits.append(decoder.step(sampler(logits[-1])))
    torch.testing.assert_close(torch.stack(logits), torch.stack(wanted.logits))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_restarts_and_rows(kind: str, device: torch.device) -> None:
    """256 positions, 400 tokens, three rows of which two are padded: two windows, all clean."""
    model = tiny_model("llama", eos_token_id=None).to(device)
    ids = token_ids(3, 9).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :7] = 0, 0
    report = fn.find_lag(
        model,
        ids,
        mask,
        tokens=400,
        cache=kind,
        layers="sites",
        restart=True,
        repeats=False,
        chunk=90,
    )
    assert report.clean, report.summary()
    assert report.steps.at_t.shape == (400, 3) == report.texts["patched"].shape
    assert report.decidable > 0.99
    # A window's first step is its prompt's: nothing is judged at sites there.
    judged = [place.judged for place in report.places if place.side == "output"]
    assert set(judged) == {3 * (400 - 2)}


def test_taps_copy_and_leave_nothing_behind() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model(token_ids(2, 5), output_hidden_states=True)  # which leaves hooks of its own
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    taps = Taps(model, [("model.norm", True), ("model.norm", False)], 2, 3)
    with torch.no_grad():
        hidden = model(token_ids(2, 5), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(taps.by_place["model.norm", False].last, hidden[:, -1])
    held = taps.by_place["model.norm", False].last
    with torch.no_grad():
        model(token_ids(2, 1, seed=3))
    assert held is taps.by_place["model.norm", False].last  # a graph can rely on the address
    assert not torch.equal(held, hidden[:, -1])
    taps.remove()
    after = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert after == before


def test_compiled_steps_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by dynamo, taps included, in one graph that serves every step; inductor's code is the
    GPU's to test."""
    compiled = torch.compile
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        counts.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f: compiled(f, backend=backend))
    report = fn.find_lag(
        tiny_model("llama", eos_token_id=None), tokens=24, mode="compiled", layers="sites", chunk=8,
        repeats=False,
    )  # fmt: skip
    assert report.clean and len(counts) == 1, (report.summary(), counts)
    assert sum(place.side == "output" for place in report.places) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [False, True])
def test_a_captured_step_is_compared_too(layers: bool) -> None:
    model = tiny_model("llama", torch.bfloat16, eos_token_id=None).cuda()
    report = fn.find_lag(model, tokens=400, mode="graph", layers=layers, restart=True)
    assert report.clean, report.summary()
    assert report.decidable > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes(dtype: torch.dtype) -> None:
    model = tiny_model("qwen2", dtype, eos_token_id=None)
    report = fn.find_lag(model, tokens=40, layers="sites", repeats=False)
    assert report.clean and report.reference == "float64", report.summary()


def test_the_model_is_left_as_it_was() -> None:
    """Stock stays stock, patched stays patched, training stays training, no hook stays."""
    stock = tiny_model("llama", eos_token_id=None).train()
    fn.find_lag(stock, tokens=4, layers="sites")
    assert not sites_of(stock) and stock.training
    patched = stock.eval()
    fn.patch(patched)
    weights = {key: value.clone() for key, value in patched.state_dict().items()}
    report = fn.find_lag(patched, tokens=12, layers="sites")
    assert report.clean and sites_of(patched)
    assert all(torch.equal(value, patched.state_dict()[key]) for key, value in weights.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in patched.modules())


def test_hooks_go_when_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = tiny_model("llama", eos_token_id=None)
    stock = copy.deepcopy(patched)
    fn.patch(patched)
    monkeypatch.setattr(Decoder, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fn.find_lag((patched, stock), tokens=4, layers="sites")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in patched.modules())


def test_the_report_as_json_and_text() -> None:
    report = fn.find_lag(tiny_model("gpt2", eos_token_id=None), tokens=20, layers="sites")
    told = json.loads(report.to_json(series=True))
    assert told["clean"] and told["lag"] is None and len(told["steps"]["at_t"]) == 20
    assert len(told["places"]) == len(report.places) == 9
    assert "no lag" in report.summary() and "stock text" in report.summary()


def test_stock_against_stock_in_steps_gives_no_alarm() -> None:
    """The false alarms, measured: the control in the candidate's place, and its own order of sums
    (steps in a cache, where the reference reads chunks), over families and dtypes."""
    for family, dtype in (
        ("llama", torch.bfloat16),
        ("gpt2", torch.float16),
        ("gemma2", torch.float32),
    ):
        stock = tiny_model(family, dtype, eos_token_id=None)
        report = fn.find_lag((copy.deepcopy(stock), stock), tokens=200, repeats=False)
        assert report.clean and report.false_alarms == 0, report.summary()


T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


def _t5() -> nn.Module:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    return AutoModelForSeq2SeqLM.from_config(T5Config(**T5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 1}, "tokens=1: at least 2"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"cache": "paged"}, "cache='paged'"),
        ({"layers": "all"}, "layers='all'"),
        ({"mode": "graph", "cache": "dynamic"}, "cache='static'"),
        ({"prompt": torch.zeros(1, 1, dtype=torch.long)}, "at least two tokens"),
        ({"prompt": torch.full((1, 4), VOCABULARY)}, f"outside 0 … {VOCABULARY - 1}"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "pad on the left"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 1]])}, "two real tokens"),
        ({"tokens": 300}, "256.*at most 240.*--restart"),
        ({"tokens": 300, "prompt": token_ids(1, 250)}, "shorter prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_runs(
    options: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = "flashnorm_triton.lag.finder.trio_of"
    monkeypatch.setattr(nothing, lambda *_: pytest.fail("a copy was made"))
    if "attention_mask" in options:
        options = {"prompt": token_ids(1, 4), **options}
    with pytest.raises(ValueError, match=words):
        fn.find_lag(tiny_model("llama"), **{"tokens": 20, **options})


def test_models_that_are_not_served() -> None:
    with pytest.raises(ValueError, match="encoder-decoder"):
        fn.find_lag(_t5(), tokens=4)
    with pytest.raises(ValueError, match="no language-model head"):
        fn.find_lag(tiny_model("llama").model, tokens=4)
    freed = tiny_model("llama")
    fn.patch(freed, revertible=False)
    with pytest.raises(ValueError, match="pair"):
        fn.find_lag(freed, tokens=4)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="mode='graph' on cpu"):
            fn.find_lag(tiny_model("llama"), tokens=4, mode="graph")
