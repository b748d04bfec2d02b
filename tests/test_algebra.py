"""The fold W* = W·diag(g) and the gain conventions, against float64."""

from __future__ import annotations

import pytest
import torch

from flashnorm_triton import algebra


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("convention", algebra.CONVENTIONS)
def test_fold_gives_the_same_function(convention: str) -> None:
    x = torch.randn(5, 33, dtype=torch.float64)
    weight, norm_weight = torch.randn(21, 33).double(), (torch.rand(33) + 0.5).double()
    gain = algebra.effective_gain(norm_weight, convention)
    factor = {"w": norm_weight, "1+w": 1 + norm_weight, "none": torch.ones(33)}[convention]
    expected = (_rms(x, 1e-6) * factor) @ weight.T
    actual = _rms(x, 1e-6) @ algebra.fold(weight, gain).T
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fold_rounds_once(dtype: torch.dtype) -> None:
    weight, gain = torch.randn(19, 45).to(dtype), torch.rand(45) + 0.5
    once = (weight.double() * gain.double()).to(dtype)
    folded = algebra.fold(weight, gain)
    assert folded.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(folded, weight * gain)
    else:
        # The float32 product is itself rounded: a tie can fall the other way, now and then.
        assert (folded != once).float().mean() < 0.01
        twice = weight * gain.to(dtype)
        assert (folded.double() - once).norm() < 0.1 * (twice.double() - once).norm()


def test_fold_in_chunks_and_into_a_given_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gain = torch.randn(23, 10), torch.rand(10)
    monkeypatch.setattr(algebra, "_FOLD_CHUNK", 40)
    packed = torch.full((30, 10), 7.0)
    algebra.fold(weight, gain, out=packed[3:26])
    assert torch.equal(packed[3:26], weight * gain)
    assert (packed[:3] == 7).all() and (packed[26:] == 7).all()
    assert torch.equal(algebra.fold(weight, None), weight)


def test_fold_error_sees_a_fold_that_leaves_float16() -> None:
    weight = torch.randn(16, 32).half()
    for gain, healthy in ((torch.rand(32) + 0.5, True), (torch.full((32,), 1e5), False),
                          (torch.full((32,), 3e-7), False)):  # fmt: skip
        error = algebra.fold_error(weight, gain, algebra.fold(weight, gain))
        assert (error < 5e-4) == healthy, (float(gain[0]), error)


def _layer(x: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms(x - x.mean(-1, keepdim=True), eps)


@pytest.mark.parametrize("centre", [False, True])
def test_layer_norm_in_the_weights(centre: bool) -> None:
    """s·(x W**ᵀ - mean(x)·row_sums) + c* is the LayerNorm and the linear, centred or not."""
    x, weight = (torch.randn(5, 33) + 2).double(), torch.randn(21, 33).double()
    gain, shift, bias = (torch.randn(size).double() for size in (33, 33, 21))
    expected = (_layer(x, 1e-5) * gain + shift) @ weight.T + bias
    folded = algebra.fold(weight, gain, centre=centre)
    sums, moved = algebra.row_sums(folded), algebra.move_bias(weight, shift, bias)
    s = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    actual = s * (x @ folded.T - x.mean(-1, keepdim=True) * sums) + moved
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert (sums.abs().max() < 1e-12) == centre
    in_kernel = algebra.row_sums(weight, gain)
    torch.testing.assert_close(in_kernel, (weight * gain).sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_and_moved_bias_are_wide(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_FOLD_CHUNK", 40)
    weight, shift, bias = (torch.randn(size).to(dtype) for size in ((23, 300), (300,), (23,)))
    moved, sums = algebra.move_bias(weight, shift, bias), algebra.row_sums(weight)
    assert moved.dtype == sums.dtype == torch.float32
    exact = bias.double() + weight.double() @ shift.double()
    assert (moved - exact).norm() < 1e-6 * exact.norm()
    assert (sums - weight.double().sum(-1)).norm() < 1e-6 * sums.norm()
    without = algebra.move_bias(weight, shift)
    torch.testing.assert_close(without, moved - bias.float(), rtol=1e-5, atol=1e-4)


def test_centring_rounds_once_and_is_seen_by_fold_error() -> None:
    weight, gain = torch.randn(19, 45).half(), torch.rand(45) + 0.5
    exact = weight.double() * gain.double()
    exact = exact - exact.mean(-1, keepdim=True)
    folded = algebra.fold(weight, gain, centre=True)
    assert (folded != exact.half()).float().mean() < 0.01
    assert algebra.fold_error(weight, gain, folded, centre=True) < 3e-4
    assert algebra.fold_error(weight, gain, folded) > 1e-2
    assert not torch.equal(algebra.fold(weight, None, centre=True), weight)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"norm bias of shape \(4,\) does not fit .* \(2, 3\)"):
        algebra.move_bias(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(ValueError, match=r"unknown gain convention '2\+w'"):
        algebra.effective_gain(torch.ones(3), "2+w")
    with pytest.raises(ValueError, match="needs the norm's weight"):
        algebra.effective_gain(None, "1+w")
    with pytest.raises(ValueError, match=r"gain of shape \(4,\) does not fit .* \(2, 3\)"):
        algebra.fold(torch.ones(2, 3), torch.ones(4))
