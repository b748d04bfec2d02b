"""The lag detector on the shipped model: silent on a clean one, and each planted fault is found at
its step, layer and site."""

from __future__ import annotations

import copy
from collections.abc import Callable

import late_reads
import pytest
import torch
from late_reads import as_a_user_runs_it  # noqa: F401  (a fixture of every test here)
from planted_faults import planted
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton import demo_model
from flashnorm_triton.demo import accuracy, greedy
from flashnorm_triton.lag import verdict
from flashnorm_triton.models.installers import sites_of
from flashnorm_triton.reference import norm_linear as exact_norm_linear

ATTENTION, MLP = "input_layernorm", "post_attention_layernorm"


@pytest.fixture(scope="module")
def stock(device: torch.device) -> nn.Module:
    return demo_model.load(device=str(device))


@pytest.fixture(scope="module")
def text() -> Tensor:
    ids = demo_model.tokenizer()(demo_model.heldout_text(), verbose=False)["input_ids"]
    return torch.tensor(ids)


def patched_with(stock: nn.Module, plant: Callable[[nn.Module], object]) -> nn.Module:
    model = copy.deepcopy(stock)
    fn.patch(model)
    plant(model)
    return model


def site(model: nn.Module, layer: int, name: str) -> nn.Module:
    return getattr(model.model.layers[layer], name)


def look(stock: nn.Module, text: Tensor, plant, tokens: int = 60, **options) -> fn.LagReport:
    model = patched_with(stock, plant)
    options = {"layers": "sites", "repeats": False, "chunk": 25, **options}
    return fn.find_lag((model, stock), text[None, :20], tokens=tokens, **options)


def test_a_clean_model_over_1024_tokens(stock: nn.Module, text: Tensor) -> None:
    """All of them in one cache: the model has 2,048 positions."""
    report = fn.find_lag(stock, text[None, 700:764], tokens=1024, layers="sites")
    assert report.clean and report.lag is None, report.summary()
    assert len(report.steps.at_t) == 1024 and report.prompt == 64
    assert report.false_alarms == 0 and report.lagged_steps == report.departed_steps == 0
    # Silent for a reason: nearly every step and site could have told t-1 from t.
    assert report.decidable > 0.99
    sites = [place for place in report.places if place.side == "output"]
    assert len(sites) == 13 and not report.unseen
    assert all(place.judged == 1023 and place.decidable > 0.9 * 1023 for place in sites)
    # Rounding, and no more of it than the limits leave room for.
    assert all(place.worst < 0.9 for place in report.places)
    assert report.kl < 1.25 * report.kl_noise
    repeats = report.repeats
    assert repeats["patched"].distinct[4] > repeats["stock"].distinct[4] - 0.05
    assert not sites_of(stock)


def test_one_stale_scale_in_600_steps(stock: nn.Module, text: Tensor) -> None:
    """What no average shows: one layer, one step."""
    report = look(
        stock,
        text,
        lambda m: late_reads.stale_scale(site(m, 3, MLP), {437}, 1e-5),
        tokens=600,
        chunk=64,
    )
    found = report.lag
    assert (found.step, found.layer, found.kind) == (437, 3, verdict.SCALE), report.summary()
    assert found.site == f"model.layers.3.{MLP}" and found.side == "output"
    assert found.distance == pytest.approx(found.expected, abs=found.limit)
    place = next(p for p in report.places if (p.site, p.side) == (found.site, "output"))
    assert place.counts[verdict.SCALE] == 1 == sum(place.counts.values())


@pytest.mark.parametrize(
    ("name", "plant", "layer", "norm", "kind"),
    [
        ("scale", late_reads.stale_scale, 0, ATTENTION, verdict.SCALE),
        ("scale", late_reads.stale_scale, 5, MLP, verdict.SCALE),
        ("output", late_reads.stale_output, 2, ATTENTION, verdict.OUTPUT),
        ("product", late_reads.stale_product, 4, MLP, verdict.PRODUCT),
    ],
)
def test_what_is_stale_is_told(
    stock: nn.Module, text: Tensor, name: str, plant, layer: int, norm: str, kind: str
) -> None:
    extra = () if plant is late_reads.stale_output else (1e-5,)
    report = look(stock, text, lambda m: plant(site(m, layer, norm), {31, 40}, *extra))
    found = report.lag
    assert (found.step, found.layer, found.kind) == (31, layer, kind), report.summary()
    assert found.site == f"model.layers.{layer}.{norm}"
    assert report.departure == found


@pytest.mark.parametrize(
    ("layer", "norm", "before"), [(3, MLP, (3, ATTENTION)), (0, ATTENTION, (5, MLP))]
)
def test_a_buffer_that_all_sites_share(
    stock: nn.Module, text: Tensor, layer: int, norm: str, before: tuple[int, str]
) -> None:
    """The scale of the site that ran before; before the first one, of the step before, the last."""

    def plant(model: nn.Module) -> None:
        late_reads.scale_of_the_site_before(
            site(model, layer, norm), site(model, *before), {21}, 1e-5
        )

    found = look(stock, text, plant, tokens=30).lag
    assert (found.step, found.layer, found.kind) == (21, layer, verdict.OTHER)


def test_layers_that_run_as_blocks(stock: nn.Module, text: Tensor) -> None:
    """As blocks they have no sites to watch: what enters each is compared. One hands on, at step
    12, what it made at step 11."""

    def plant(model: nn.Module) -> None:
        runner = model.model.layers[2].runner
        real, made = runner.run, []

        def late(x: Tensor, kwargs: dict) -> Tensor:
            made.append(real(x, kwargs))
            return made[-2] if len(made) == 13 else made[-1]

        runner.run = late

    report = look(stock, text, lambda model: None, tokens=20, layers=True)
    assert report.clean, report.summary()
    watched = [place.site for place in report.places if place.side == "input"]
    assert watched == [*(f"model.layers.{n}" for n in range(6)), "model.norm"]
    found = look(stock, text, plant, tokens=20, layers=True).departure
    assert (found.step, found.site, found.kind) == (12, "model.layers.3", verdict.INPUT)


def test_the_switch_of_the_planted_faults(stock: nn.Module, text: Tensor) -> None:
    """Every layer's scale is late from the first step on; the first layer is named."""
    model = patched_with(stock, lambda model: None)
    options = {"tokens": 30, "layers": "sites", "repeats": False}
    with planted("stale_scale"):
        report = fn.find_lag((model, stock), text[None, :20], **options)
    assert (report.lag.step, report.lag.layer, report.lag.kind) == (1, 0, verdict.SCALE)
    late = [p.site for p in report.places if p.side == "output" and p.counts[verdict.SCALE]]
    assert len(late) == 12, report.summary()


def test_stale_keys(stock: nn.Module, text: Tensor) -> None:
    """k_proj's place takes its columns of the site's output; both are watched."""
    report = look(stock, text, lambda m: late_reads.stale_keys(m.model.layers[2].self_attn, {30}))
    found = report.departure
    assert (found.step, found.layer) == (30, 2), report.summary()
    assert found.site == f"model.layers.2.{ATTENTION}" and found.side == "output"


def test_a_cache_that_was_not_written(stock: nn.Module, text: Tensor) -> None:
    """The cache is no site: what enters the next one is off, and all sites are right."""
    from transformers import DynamicCache

    class Forgetful(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            if layer == 1 and self.get_seq_length(1) == 20 + 29:
                keys = torch.roll(keys, 1, -1)
            return super().update(keys, values, layer, *args, **kwargs)

    report = look(
        stock, text, lambda m: None, cache=lambda model, *sizes: Forgetful(config=model.config)
    )
    found = report.departure
    assert (found.step, found.layer, found.side) == (30, 1, "input"), report.summary()
    assert found.site == f"model.layers.1.{MLP}"


def test_another_sites_buffer(stock: nn.Module, text: Tensor) -> None:
    report = look(
        stock,
        text,
        lambda m: late_reads.swapped_outputs(site(m, 4, ATTENTION), site(m, 1, ATTENTION), {17}),
    )
    found = report.departure
    assert (found.step, found.layer, found.kind) == (17, 4, verdict.DEPARTS), report.summary()
    assert found.site == f"model.layers.4.{ATTENTION}" and found.side == "output"


def test_logits_of_the_step_before(stock: nn.Module, text: Tensor) -> None:
    """Seen without watching any layer."""
    report = look(stock, text, lambda m: late_reads.stale_logits(m, {44}), layers=False)
    found = report.lag
    assert (found.step, found.kind, found.site) == (44, verdict.LAG, None), report.summary()
    assert report.lagged_steps == 1 and len(report.places) == 1


def test_a_wrong_weight_is_no_lag(stock: nn.Module, text: Tensor) -> None:
    report = look(stock, text, lambda m: late_reads.wrong_weight(site(m, 3, MLP), 1.03), tokens=12)
    assert report.lag is None and not report.clean
    assert (report.departure.step, report.departure.side) == (0, "logits")  # in the prompt already
    (place,) = [p for p in report.places if p.first and p.side == "output"]
    assert (place.layer, place.counts[verdict.DEPARTS]) == (3, 11)


def test_not_a_number_is_off(stock: nn.Module, text: Tensor) -> None:
    report = look(
        stock, text, lambda m: late_reads.wrong_weight(site(m, 5, MLP), float("nan")), tokens=4
    )
    assert report.departure.step == 0 and report.lag is None
    (place,) = [p for p in report.places if p.first and p.side == "output"]
    assert place.layer == 5 and place.first.step == 1
    assert '"distance": null' in report.to_json(series=True)


def test_what_perplexity_and_a_unit_test_miss(
    stock: nn.Module, text: Tensor, device: torch.device
) -> None:
    """One stale scale in 250 steps: both pass, within their limits; the detector names the step."""
    steps = {150}

    def plant(model: nn.Module) -> None:
        late_reads.stale_scale(site(model, 2, MLP), steps, 1e-5)

    faulty = patched_with(stock, plant)
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16)
    module = site(faulty, 2, MLP)
    weight = module._buffers["packed_weight"].double()
    wanted = exact_norm_linear(x.double(), weight, 1e-5)
    got = module(x).double()
    unit = float((got - wanted).norm() / wanted.norm())
    assert unit < 0.01

    piece = text[:272].to(device)
    prompt, targets = 20, piece[21:]
    losses = {}
    for name, model in {"stock": stock, "faulty": patched_with(stock, plant)}.items():
        logits = greedy.decode(model, piece[:-1], prompt)
        losses[name] = torch.nn.functional.cross_entropy(logits.double(), targets).item()
    ratio = torch.tensor(losses["faulty"] - losses["stock"]).exp().item()
    assert ratio < accuracy.PERPLEXITY_RATIO

    report = look(stock, text, plant, tokens=160)
    assert (report.lag.step, report.lag.layer) == (150, 2)
