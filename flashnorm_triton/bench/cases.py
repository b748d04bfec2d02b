"""One shape of norm_linear.py: its weights, and everything that can be timed on them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flashnorm_triton import algebra, ops
from flashnorm_triton.bench.shapes import Shape
from flashnorm_triton.tuning import measure

EPS = 1e-5
DTYPE = torch.bfloat16
# What compiles something at its first call.
COMPILED_FIRST = (
    "ours", "triton_norm+linear", "liger_norm+linear", "flashinfer_norm+linear", "compiled",
)  # fmt: skip


class Stock(nn.Module):
    """transformers' LlamaRMSNorm, then ``nn.Linear``: what a patched model replaces."""

    def __init__(self, gain: Tensor, weight: Tensor) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        n, k = weight.shape
        with torch.device("meta"):
            self.norm = LlamaRMSNorm(k, eps=EPS)
            self.linear = nn.Linear(k, n, bias=False)
        self.norm.weight = nn.Parameter(gain, requires_grad=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Case:
    """The weights of one shape: as many copies as one row needs to get past the L2 cache."""

    def __init__(
        self,
        shape: Shape,
        *,
        cache_bytes: int,
        memory_bytes: int,
        device: str = "cuda",
        dtype: torch.dtype = DTYPE,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.device = torch.device(device)
        self._cache, self._memory = cache_bytes, memory_bytes
        copies = self.copies(1)
        n, k = shape.n, shape.k
        self.gains = [(1 + 0.5 * torch.randn(k, device=device)).to(dtype) for _ in range(copies)]
        self.weights = [
            (torch.randn(n, k, device=device) * k**-0.5).to(dtype) for _ in range(copies)
        ]
        self.folded = [
            algebra.fold(w, g.float()) for w, g in zip(self.weights, self.gains, strict=True)
        ]
        self.stock = [Stock(g, w) for g, w in zip(self.gains, self.weights, strict=True)]
        self.weight64 = self.weights[0].double()

    def copies(self, m: int) -> int:
        bytes_per_call = 2 * self.shape.k * (self.shape.n + m)
        return measure.copies_past_cache(
            bytes_per_call, cache_bytes=self._cache, memory_bytes=self._memory
        )

    def candidates(self, x: Sequence[Tensor], *, compiled: bool) -> dict[str, Callable]:
        """Ours first; every callable takes the rotation index."""
        linear, rms_norm = nn.functional.linear, nn.functional.rms_norm
        gains, weights, folded, stock = self.gains, self.weights, self.folded, self.stock
        k = self.shape.k
        found: dict[str, Callable[[int], Tensor]] = {
            "ours": lambda i: ops.norm_linear(x[i], folded[i], EPS),
            "ours again": lambda i: ops.norm_linear(x[i], folded[i], EPS),
            "gemm_only": lambda i: linear(x[i], weights[i]),
            "triton_norm+linear": lambda i: linear(ops.rms_norm(x[i], EPS, gains[i]), weights[i]),
            "rms_norm+linear": lambda i: linear(rms_norm(x[i], (k,), gains[i], EPS), weights[i]),
            "stock": lambda i: stock[i](x[i]),
        }
        if importlib.util.find_spec("liger_kernel") is not None:
            found["liger_norm+linear"] = lambda i: linear(liger_norm(x[i], gains[i]), weights[i])
        if importlib.util.find_spec("flashinfer") is not None:
            found["flashinfer_norm+linear"] = lambda i: linear(
                flashinfer_norm(x[i], gains[i]), weights[i]
            )
        if compiled:
            torch._dynamo.reset()  # or a shape too many makes it fall back to eager
            call = torch.compile(self._functional, dynamic=False)
            found["compiled"] = lambda i: call(x[i], gains[i], weights[i])
        return found

    def _functional(self, x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        parameters = {"norm.weight": gain, "linear.weight": weight}
        return torch.func.functional_call(self.stock[0], parameters, (x,))


def liger_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Liger's RMSNorm with its casting as in Llama. Imported here: where that fails, this baseline
    fails alone."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, gain, EPS, 0.0, "llama", False)


def flashinfer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """FlashInfer's RMSNorm, imported here as Liger's is. It is compiled at its first call, which
    is tried once a process: RuntimeError says why it cannot be."""
    if why := _no_flashinfer(x.device):
        raise RuntimeError(why)
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, gain, EPS)


@functools.cache
def _no_flashinfer(device: torch.device) -> str | None:
    try:
        from flashinfer.norm import rmsnorm

        rmsnorm(*(torch.ones(shape, device=device).half() for shape in ((2, 64), (64,))), EPS)
    except Exception as error:
        return f"FlashInfer's rmsnorm: {type(error).__name__}: {str(error)[-400:]}"
    return None


def warm(cells: Sequence[tuple[Shape, int]], dtype: torch.dtype, *, compiled: bool) -> None:
    """Compile these cells' kernels, so that the disk caches of Triton and of torch hold them."""
    for shape, m in cells:
        case = Case(shape, cache_bytes=1, memory_bytes=1, dtype=dtype)
        x = torch.randn(m, shape.k, dtype=dtype, device="cuda")
        for name, call in case.candidates([x], compiled=compiled).items():
            if name in COMPILED_FIRST:
                call(0)
    torch.cuda.synchronize()
