"""The demo: passes on the shipped model, and ends non-zero for each kind of planted fault."""

from __future__ import annotations

import inspect
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flashnorm_triton
from flashnorm_triton import demo_model
from flashnorm_triton.demo import accuracy, greedy, interpreter, run
from flashnorm_triton.demo.checks import at_least, at_most

SMALL = run.Sizes(heldout=1024, window=512, prompt_at=700, greedy=40, timed=4, rounds=1)
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in for a GPU, and there is one"
)


def go(tmp_path: Path, sizes: run.Sizes = SMALL) -> tuple[bool, str]:
    text = io.StringIO()
    console = Console(file=text, width=120)
    return run.run(None, tmp_path / "picture.png", console, sizes), text.getvalue()


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "run", lambda sites: [])


def test_demo_passes_and_draws(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        passed, text = go(tmp_path)
        assert passed, text
        assert torch.get_num_threads() == 3, "the demo left its own thread count behind"
    finally:
        torch.set_num_threads(threads)
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 20_000
    for part in ("q_proj, k_proj, v_proj", "gate_proj, up_proj", "held-out perplexity", "tokens/s"):
        assert part in text
    if torch.cuda.is_available():
        assert "with the Triton kernels" in text and "no GPU" not in text
    else:
        assert "flashnorm's torch path" in text and "interpreter" in text
        for form in ("single_pass/gemv", "single_pass/tiles", "stats_then_gemm/tiles"):
            assert f"kernel {form} float16" in text


def wrong_scale(model: torch.nn.Module) -> None:
    """One packed weight off by 3 %: a cosine would not see it."""
    model.model.layers[3].input_layernorm._buffers["packed_weight"].mul_(1.03)


def wrong_eps(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.site.source.eps = 0.1


def forgotten_fold(model: torch.nn.Module) -> None:
    """The gain of one norm is dropped instead of folded."""
    norm = model.model.layers[2].post_attention_layernorm
    norm._buffers["packed_weight"].div_(norm.weight.detach().where(norm.weight != 0, 1))


def not_a_number(model: torch.nn.Module) -> None:
    model.model.layers[0].input_layernorm._buffers["packed_weight"][0, 0] = math.nan


def lagging(model: torch.nn.Module) -> None:
    """In a cached step, the logits of the step before."""
    stock, last = model.forward, {}

    def forward(input_ids: torch.Tensor, **kwargs: object):
        out = stock(input_ids, **kwargs)
        now = out.logits
        if now.shape[1] == 1 and "logits" in last:
            out.logits = last["logits"]
        last["logits"] = now[:, -1:]
        return out

    forward.__signature__ = inspect.signature(stock)
    model.forward = forward


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        (wrong_scale, "logit error"),
        (wrong_eps, "logit error"),
        (forgotten_fold, "held-out perplexity"),
        (not_a_number, "largest error of all"),
        (lagging, "decode error at t-1 / at t"),
    ],
)
def test_a_planted_fault_fails_the_demo(
    fault, caught_by: str, tmp_path: Path, no_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = flashnorm_triton.patch

    def faulty(model: torch.nn.Module):
        handle = patch(model)
        fault(model)
        return handle

    monkeypatch.setattr(flashnorm_triton, "patch", faulty)
    passed, text = go(tmp_path, replace(SMALL, timed=1))
    assert not passed
    failures = " ".join(text.rsplit("failed:", 1)[1].split())
    assert caught_by in failures, text


@NO_GPU
def test_a_kernel_fault_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks on the slice see a kernel that uses another eps; all of them fail."""
    model = demo_model.load()
    ids = demo_model.tokenizer()(demo_model.heldout_text()[:400])["input_ids"]
    sites = interpreter.capture(model, torch.tensor(ids))
    assert [site.x.shape for site in sites] == [(interpreter.ROWS, 128)] * 3
    norm_linear = flashnorm_triton.norm_linear
    monkeypatch.setattr(
        flashnorm_triton,
        "norm_linear",
        lambda x, w, eps, **kwargs: norm_linear(x, w, 0.05, **kwargs),
    )
    # The first site alone: after the embedding, where eps weighs most.
    checks = interpreter.checks(interpreter._errors_of(sites[0], torch.float16))
    assert len(checks) >= 4 and not any(check.passed for check in checks)
    monkeypatch.setattr(flashnorm_triton, "norm_linear", norm_linear)
    checks = interpreter.checks(interpreter._errors_of(sites[0], torch.float16))
    assert all(check.passed for check in checks)


@NO_GPU
def test_a_broken_interpreter_is_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = interpreter.Site("broken", torch.ones(2, 8), torch.ones(3, 7), torch.ones(8), 1e-5)
    with pytest.raises(RuntimeError, match="ended with 1"):
        interpreter.run([site])

    def raises(sites: object) -> None:
        raise RuntimeError("no [bold] interpreter")

    monkeypatch.setattr(interpreter, "run", raises)
    passed, text = go(tmp_path, replace(SMALL, timed=1))
    assert not passed and "failed: no [bold] interpreter" in text


def test_nan_passes_no_check() -> None:
    assert not at_most("x", math.nan, 1.0).passed
    assert not at_least("x", math.nan, 1.0).passed
    errors = [interpreter.KernelError("a", "f", "float16", e, 1e-4) for e in (1e-4, math.nan, 1e-5)]
    (check,) = interpreter.checks(errors)
    assert not check.passed


def test_errors_are_the_frobenius_error_and_the_perplexity() -> None:
    exact, off = torch.randn(6, 11, dtype=torch.float64), torch.randn(6, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (6,))
    errors = accuracy.Errors()
    for rows in (slice(0, 4), slice(4, 6)):
        errors.add((exact + 0.01 * off)[rows], exact[rows], targets[rows])
    assert errors.relative == pytest.approx((0.01 * off.norm() / exact.norm()).item())
    each = 0.01 * off.abs().amax(-1)
    assert errors.token_largest == pytest.approx(each.mean().item())
    assert errors.largest == pytest.approx(0.01 * off.abs().max().item())
    nll = -(exact + 0.01 * off).log_softmax(-1)[torch.arange(6), targets].mean()
    assert errors.perplexity == pytest.approx(nll.exp().item())
    assert errors.profile().shape == (4,)
    for logits in (exact.where(exact != exact[2, 3], math.nan), exact):
        errors.add(logits, exact, targets)
    assert math.isnan(errors.largest) and math.isnan(errors.token_largest)
    assert math.isnan(errors.relative) and math.isnan(errors.perplexity)


def test_judge_scores_each_token_given_the_text_so_far(device: torch.device) -> None:
    exact = demo_model.load(torch.float64, str(device))
    ids = demo_model.tokenizer()(demo_model.heldout_text()[:300])["input_ids"]
    prompt = torch.tensor(ids[:48], device=device)
    text = greedy.generate(exact, prompt, 24)
    assert len(text) == 24
    assert greedy.judge(exact, prompt, text, 0) == greedy.Choices(agree=1.0, gap=0.0)
    spoiled = text.clone()
    spoiled[9] = (spoiled[9] + 1) % 2048
    verdict = greedy.judge(exact, prompt, spoiled, 0)
    assert verdict.agree < 1 and verdict.gap > 0.1
    assert greedy.first_difference(text, spoiled) == 9
    assert greedy.first_difference(text, text) is None


@pytest.mark.parametrize(
    ("out", "device", "words"),
    [
        ("picture.jpg", None, "ending in .png"),
        ("no/such/folder/picture.png", None, "folder does not exist"),
        ("picture.png", "tpu", "must be cpu or cuda"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(
    out: str, device: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        run.run(device, tmp_path / out, Console(file=io.StringIO()))


@NO_GPU
def test_cuda_is_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torch sees no GPU"):
        run.run("cuda", tmp_path / "picture.png", Console(file=io.StringIO()))
