"""Head norms of packed projections: the kernel and the torch form against float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from numerics import poisoned
from torch import Tensor

from flashnorm_triton import runtime
from flashnorm_triton.heads import Head, HeadNorms, Heads
from flashnorm_triton.launch import heads as launch_heads

pytest.importorskip("triton")

EPS, X_EPS, K = (1e-3, 2e-2, 5e-4, 1e-3), 3e-2, 37
LAYOUTS = {
    "q, k, v": (
        Heads(0, 5, (Head(16, (0,)),)),
        Heads(80, 2, (Head(16, (1,)),)),
        Heads(112, 1, (Head(48),)),
    ),
    "all normed": (
        Heads(0, 3, (Head(20, (0,)),)),
        Heads(60, 1, (Head(20, (1,)),)),
        Heads(80, 1, (Head(24, (2,)),)),
    ),
    "k is v": (Heads(0, 4, (Head(8, (0,)),)), Heads(32, 2, (Head(8, (1, 2)),))),
    "gates between": (Heads(0, 3, (Head(16, (0,)), Head(16))), Heads(96, 2, (Head(16, (3,)),))),
    "latent": (Heads(0, 1, (Head(70, (0,)),)), Heads(70, 1, (Head(33, (1,)), Head(9)))),
    "none normed": (Heads(0, 2, (Head(24),)), Heads(48, 1, (Head(9),))),
    "one": (Heads(0, 1, (Head(100, (2,)),)),),
}


def _case(layout: str, m: int, dtype: torch.dtype, device: Any) -> tuple[HeadNorms, Any, Any]:
    heads = LAYOUTS[layout]
    n = sum(group.columns for group in heads)
    norms = HeadNorms(heads, EPS, (False, True, False, False))
    size = torch.logspace(-2, 2, m)[:, None]
    x, weight = torch.randn(m, K) * size, torch.randn(n, K) * 0.2
    gains: list[Tensor | None] = [None] * 4
    for group in heads:
        for part in group.parts:
            for norm in part.norms:
                gains[norm] = torch.rand(part.width).add_(0.3).to(device, dtype)
    gains[2] = None
    z = (x @ weight.T).to(device, dtype)
    return norms, (z, tuple(gains)), x.to(device, dtype)


def _expected(norms: HeadNorms, z: Tensor, gains: Any, x: Tensor | None) -> Tensor:
    z, out = z.double(), []
    factor = torch.ones(len(z), 1, device=z.device, dtype=torch.float64)
    if x is not None:
        factor = x.double().square().mean(-1, keepdim=True) + X_EPS
    for group in norms.heads:
        results: list[list[Tensor]] = [[], []]
        column = group.start
        for _ in range(group.count):
            for part in group.parts:
                piece = z[:, column : column + part.width]
                column += part.width
                if not part.norms:
                    results[0].append(piece / factor.sqrt())
                for place, norm in enumerate(part.norms):
                    mean = piece.square().mean(-1, keepdim=True)
                    unit = piece / (mean + norms.eps[norm] * factor).sqrt()
                    gain = 1.0 if gains[norm] is None else gains[norm].double()
                    results[place].append(unit * (gain + 1 if norms.one_plus[norm] else gain))
        out += [torch.cat(parts, -1) for parts in results if parts]
    return torch.cat(out, -1)


def _by_kernel(norms: HeadNorms, z: Tensor, gains: Any, x: Tensor | None) -> Tensor:
    run = norms._prepare(z, gains, x, X_EPS)
    assert run is not None
    with poisoned():
        return run(z, x, gains)


DTYPES = (torch.float16, torch.float32) + ((torch.bfloat16,) if HAS_GPU else ())
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 4e-7}


@pytest.mark.parametrize("form", ["kernel", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_float64(layout: str, form: str, device: torch.device) -> None:
    for dtype in DTYPES if layout == "q, k, v" else DTYPES[:1]:
        for m, raw in ((1, True), (3, False), (300 if HAS_GPU else 5, True)):
            norms, (z, gains), x = _case(layout, m, dtype, device)
            x = x if raw else None
            expected = _expected(norms, z, gains, x)
            compute = _by_kernel if form == "kernel" else HeadNorms.in_torch
            ours = compute(norms, z, gains, x) if form == "kernel" else norms.in_torch(
                z, gains, x, X_EPS if raw else 0.0
            )  # fmt: skip
            assert ours.shape == expected.shape and ours.dtype == dtype
            off = (ours.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert off.max() < TOLERANCE[dtype], (dtype, m, raw)


def test_however_heads_are_spread_over_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program or in many: the same bits, which a tile of another shape may sum otherwise."""
    norms, (z, gains), x = _case("q, k, v", 3, torch.float32, device)
    whole, by_tile = _by_kernel(norms, z, gains, x), {}
    for tile, programs, groups in (
        (16, 1, 10), (16, 9, 10), (16, 264, 10), (32, 6, 5), (32, 264, 5), (64, 3, 3), (64, 264, 3)
    ):  # fmt: skip
        monkeypatch.setattr(launch_heads, "_TILE", tile)
        monkeypatch.setattr(launch_heads, "_PROGRAMS", programs)
        norms, *_ = _case("q, k, v", 3, torch.float32, device)
        ours = _by_kernel(norms, z, gains, x)
        assert torch.equal(ours, by_tile.setdefault(tile, ours)), (tile, programs)
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=0)
        assert next(iter(norms._kernels.values())).groups == groups


def test_what_the_kernel_does_not_serve() -> None:
    norms, (z, gains), x = _case("q, k, v", 2, torch.float32, "cpu")
    assert norms._prepare(z.double(), gains, x, X_EPS) is None
    assert norms._prepare(z.T.contiguous().T, gains, x, X_EPS) is None
    assert norms._prepare(z, gains, x.T.contiguous().T, X_EPS) is None
    assert norms._prepare(z[:0], gains, x[:0], X_EPS) is None
    wide = HeadNorms((Heads(0, 1, (Head(9000, (0,)),)),), (1e-3,), (False,))
    assert wide._prepare(torch.randn(2, 9000), (None,), None, 0.0) is None
    five = tuple(Heads(4 * i, 1, (Head(4, (i,)),)) for i in range(5))
    many = HeadNorms(five, (1e-3,) * 5, (False,) * 5)
    assert many._prepare(torch.randn(2, 20), (torch.randn(4),) * 5, None, 0.0) is None


def test_a_copy_leaves_what_was_compiled_behind(device: torch.device) -> None:
    norms, (z, gains), x = _case("latent", 3, torch.float32, device)
    expected = _by_kernel(norms, z, gains, x)
    for twin in (copy.deepcopy(norms), pickle.loads(pickle.dumps(norms))):
        assert not twin._kernels and twin.heads == norms.heads
        assert torch.equal(_by_kernel(twin, z, gains, x), expected)


@pytest.mark.gpu
def test_a_call_on_a_gpu_is_the_kernel(device: torch.device, monkeypatch) -> None:
    assert runtime.triton_unavailable() is None
    monkeypatch.delattr(HeadNorms, "in_torch")  # the same bits, more often than not
    norms, (z, gains), x = _case("k is v", 70, torch.bfloat16, device)
    assert torch.equal(norms(z, gains, x, X_EPS), _by_kernel(norms, z, gains, x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norms(z, gains, x, X_EPS)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, _by_kernel(norms, z, gains, x))


@pytest.mark.gpu
def test_a_gpu_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    norms, (z, gains), x = _case("q, k, v", 7, torch.bfloat16, "cuda:1")
    y = norms(z, gains, x, X_EPS)
    assert y.device == z.device and torch.cuda.current_device() == 0
    here = [None if gain is None else gain.to("cuda:0") for gain in gains]
    expected = norms(z.to("cuda:0"), tuple(here), x.to("cuda:0"), X_EPS)
    assert torch.equal(y.to("cuda:0"), expected)
