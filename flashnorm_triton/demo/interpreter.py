"""The Triton kernels on a slice of real activations, in Triton's CPU interpreter.

Triton decides how to run a kernel when it is imported, so the slice is handed to a process of its
own that has TRITON_INTERPRET=1 from the start. Activations go in as fp32 and fp16: the
interpreter's bf16 products are wrong (raw bits are multiplied), which would say nothing of the
kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from flashnorm_triton.demo.accuracy import ERROR_RATIO
from flashnorm_triton.demo.checks import Check, at_most

ROWS = 5  # not a power of two: the kernels' edge handling is part of the slice
FEATURES = 200
TIMEOUT_S = 100


@dataclass(frozen=True)
class Site:
    """One norm with the linears it feeds: x (rows, K) as it enters the norm, weight (N, K)."""

    name: str
    x: Tensor
    weight: Tensor
    gain: Tensor
    eps: float


@dataclass(frozen=True)
class KernelError:
    """A kernel's relative Frobenius error against float64 beside that of norm, then linear."""

    site: str
    form: str
    dtype: str
    error: float
    stock_error: float

    @property
    def ratio(self) -> float:
        """Over the stock error, or over fp32's epsilon where stock is more exact than that."""
        return self.error / max(self.stock_error, torch.finfo(torch.float32).eps)


@torch.no_grad()
def capture(model: Module, tokens: Tensor) -> list[Site]:
    """First attention norm, a middle MLP norm and the final norm of a stock Llama, on tokens (T,).

    The rows are the last ``ROWS`` tokens; the weights are cut to ``FEATURES`` output features of
    the linears that share the norm, so that the interpreter needs seconds.
    """
    base = model.model
    middle = base.layers[len(base.layers) // 2]
    attention = base.layers[0].self_attn
    plan = [
        ("layer 0 attention", base.layers[0].input_layernorm, [attention.q_proj, attention.k_proj]),
        ("middle layer MLP", middle.post_attention_layernorm, [middle.mlp.gate_proj]),
        ("head", base.norm, [model.lm_head]),
    ]
    seen: dict[str, Tensor] = {}
    hooks = [
        norm.register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0][0, -ROWS:].clone())
        )
        for name, norm, _ in plan
    ]
    try:
        model(tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        Site(
            name,
            seen[name].float(),
            torch.cat([linear.weight for linear in linears])[:FEATURES].float(),
            norm.weight.float(),
            norm.variance_epsilon,
        )
        for name, norm, linears in plan
    ]


def run(sites: list[Site]) -> list[KernelError]:
    """Every interpretable plan on every site, in a process of its own.

    Raises RuntimeError with the process's last lines when it fails or runs past TIMEOUT_S.
    """
    with tempfile.TemporaryDirectory() as folder:
        slices = Path(folder) / "sites.pt"
        torch.save([site.__dict__ for site in sites], slices)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        package_parent = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name, str(slices)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the interpreter ran past {TIMEOUT_S} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"the interpreter's process ended with {done.returncode}:\n{tail}")
    return [KernelError(**record) for record in json.loads(done.stdout.splitlines()[-1])]


def checks(errors: list[KernelError]) -> list[Check]:
    """One check a kernel family and dtype: the worst site against the numerics contract."""
    worst: dict[tuple[str, str], float] = {}
    for e in errors:
        key = (e.form, e.dtype)
        # A NaN compares false with everything: it must win here, to fail the check.
        worst[key] = max(worst.get(key, 0.0), e.ratio) if e.ratio == e.ratio else e.ratio
    return [
        at_most(f"kernel {form} {dtype}, error / stock", ratio, ERROR_RATIO)
        for (form, dtype), ratio in worst.items()
    ]


def _errors_of(site: Site, dtype: torch.dtype) -> list[KernelError]:
    from flashnorm_triton import norm_linear, reference
    from flashnorm_triton.plans import interpretable_plans

    x, weight = site.x.to(dtype), site.weight.to(dtype)
    wide, wide_weight = x.double(), weight.double()
    s = torch.rsqrt(wide.square().mean(-1, keepdim=True) + site.eps)
    exact = (wide * s * site.gain.double()) @ wide_weight.T

    def error(y: Tensor) -> float:
        return ((y.double() - exact).norm() / exact.norm()).item()

    normed = reference.rms_norm(x, site.eps) * site.gain.to(dtype)
    stock_error = error(torch.nn.functional.linear(normed, weight))
    folded = (weight.float() * site.gain).to(dtype)
    found = []
    for plan in interpretable_plans():
        y = norm_linear(x, folded, site.eps, plan=plan)
        form = f"{plan.strategy}/{plan.form}"
        found.append(KernelError(site.name, form, str(dtype)[6:], error(y), stock_error))
    return found


def main(slices: str) -> None:
    """What the process runs: prints the errors as one line of JSON."""
    sites = [Site(**record) for record in torch.load(slices)]
    found = [
        e for site in sites for t in (torch.float32, torch.float16) for e in _errors_of(site, t)
    ]
    print(json.dumps([e.__dict__ for e in found]))


if __name__ == "__main__":
    main(sys.argv[1])
