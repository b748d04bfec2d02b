"""What patching a whole model takes: seconds, device memory, accuracy, and the way back.

Question: how long does ``patch`` take on a model of 8B parameters, how far does the device's memory
rise meanwhile above the weights, does the patched model compute as accurately as the stock one, and
does ``revert`` bring back every bit? Random weights (and random gains) at the Llama-3.1-8B shape in
bf16, on the GPU; an fp32 copy of them is the reference.

    python bench/patching.py [--out FILE] [--variants ...] [--layers 32] [--hidden 4096] ...

Each variant (a call of ``patch``) gets a model of its own, drawn from the same seed; so does the
model that a reverted one is compared with, parameter by parameter and logit by logit. Goals: 20 s
for the 8B shape, a peak within the weights and 1.1 times the largest site, an error within 1.25
times stock's, and not a bit that differs after revert. Exit: 0 when all is measured and no goal
missed, 1 otherwise, 2 for bad arguments or no GPU.

``--device cpu --layers 2 --hidden 64 ...`` tries the script on a tiny model, without figures of
memory; such a file says that it is no benchmark and may not be written into bench/results.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor

from flashnorm_triton import results
from flashnorm_triton.bench import report, running
from flashnorm_triton.bench.generate import EIGHT_B, Size, make_model, seconds

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
MOST_SECONDS = 20.0  # of patching the 8B shape
MOST_ERROR = 1.25  # times the stock model's own
GB = 1e9
VARIANTS: dict[str, dict[str, bool]] = {
    "patch()": {},
    "revertible=False": {"revertible": False},
    "fold=False": {"fold": False},
    "head=True": {"head": True},
}


class Bench:
    """Makes the same model over and over; holds its tokens, its stock and its fp32 logits."""

    def __init__(self, size: Size, *, device: str, tokens: int, seed: int) -> None:
        self.size, self.device, self.seed = size, device, seed
        draw = torch.Generator(device=device).manual_seed(seed)
        self.ids = torch.randint(1, size.vocab, (1, tokens), device=device, generator=draw)
        model = self.model()
        self.stock = self.logits(model)
        self.wanted = self.logits(model.float())
        self.stock_error = self.error(self.stock)

    def model(self) -> Any:
        """The model, bit for bit the same at every call."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(self.seed)
        return make_model(self.size, self.device)

    def logits(self, model: Any) -> Tensor:
        return model(self.ids, use_cache=False).logits.float()

    def error(self, logits: Tensor) -> float:
        """Relative Frobenius error against the fp32 copy."""
        wanted = self.wanted.double()
        return float((logits.double() - wanted).norm() / wanted.norm())

    def measure(self, variant: str, patch: Callable[..., Any]) -> dict[str, Any]:
        """The record of one variant."""
        model = self.model()
        self.logits(model)  # what the first forward loads and allocates is none of patch's
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        done: list[Any] = []
        patch_s = seconds(lambda: done.append(patch(model, **VARIANTS[variant])))
        handle = done.pop()
        memory = handle.memory
        if memory is None:
            raise RuntimeError(f"patch did nothing: {handle.report.summary()}")
        record = {
            "patching": self.size.name,
            "variant": variant,
            "dtype": str(model.dtype).removeprefix("torch."),
            "sites": len(handle.report.fused),
            "decisions": handle.report.to_dict()["decisions"],
            "patch_s": patch_s,
            "weights_gb": memory.weights / GB,
            "largest_site_gb": memory.largest_site / GB,
            "peak_gb": None if memory.peak is None else memory.peak / GB,
            "peak_goal_gb": (memory.weights + 1.1 * memory.largest_site) / GB,
            "rel_err": self.error(self.logits(model)),
            "rel_err_stock": self.stock_error,
            "tokens": self.ids.shape[1],
            **self._reverted(model, handle, VARIANTS[variant].get("revertible", True)),
        }
        return {**record, "missed": missed(record, self.size)}

    def _reverted(self, model: Any, handle: Any, revertible: bool) -> dict[str, Any]:
        """Seconds of ``revert``, and whether every bit is back; None where there is no way back."""
        if not revertible:
            return {"revert_s": None, "bit_equal": None}
        revert_s = seconds(handle.revert)
        equal = torch.equal(self.logits(model), self.stock) and same(model, self.model())
        return {"revert_s": revert_s, "bit_equal": equal}


def same(model: Any, other: Any) -> bool:
    """Whether two models have the same modules, and parameters and buffers of the same bits."""
    kinds = ([type(m) for m in each.modules()] for each in (model, other))
    if len({str(kind) for kind in kinds}) > 1:
        return False
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, tensors)()) for each in (model, other))
        if ours.keys() != theirs.keys():
            return False
        if not all(_same_bits(tensor, theirs[name]) for name, tensor in ours.items()):
            return False
    return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        return False
    # As bytes: to torch.equal 0 is -0, and a NaN differs from itself.
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))


def missed(record: Mapping[str, Any], size: Size) -> list[str]:
    """The goals that a record misses, each in words."""
    told = []
    if size == EIGHT_B and record["patch_s"] > MOST_SECONDS:
        told.append(f"patching took {record['patch_s']:.1f} s, goal {MOST_SECONDS:.0f} s")
    if record["peak_gb"] is not None and record["peak_gb"] > record["peak_goal_gb"]:
        told.append(f"peak {record['peak_gb']:.3f} GB, goal {record['peak_goal_gb']:.3f} GB")
    # Written so that a NaN misses too.
    if not record["rel_err"] <= MOST_ERROR * record["rel_err_stock"]:
        told.append(f"error {record['rel_err']:.2e}, stock's {record['rel_err_stock']:.2e}")
    if record["bit_equal"] is False:
        told.append("the reverted model is not the stock one bit for bit")
    return told


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a record, and under it what was missed."""
    lines = [
        f"{'variant':>18} {'sites':>6} {'patch s':>8} {'weights':>8} {'site':>7} {'peak':>8} "
        f"{'goal':>8} {'error':>9} {'stock':>9} {'revert s':>9} {'bits':>6}"
    ]
    for r in records:
        lead = f"{r['variant']:>18} "
        if r.get("error"):
            lines.append(lead + r["error"])
            continue
        peak = "-" if r["peak_gb"] is None else f"{r['peak_gb']:.3f}"
        back = "-" if r["revert_s"] is None else f"{r['revert_s']:.2f}"
        bits = {True: "equal", False: "DIFFER", None: "freed"}[r["bit_equal"]]
        lines.append(
            f"{lead}{r['sites']:>6} {r['patch_s']:>8.2f} {r['weights_gb']:>8.3f} "
            f"{r['largest_site_gb']:>7.3f} {peak:>8} {r['peak_goal_gb']:>8.3f} "
            f"{r['rel_err']:>9.2e} {r['rel_err_stock']:>9.2e} {back:>9} {bits:>6}"
        )
        lines += [f"{'MISSED':>18} {goal}" for goal in r["missed"]]
    return "\n".join(lines)


def run(args: argparse.Namespace, patch: Callable[..., Any]) -> int:
    log = report.Log()
    transformers.logging.set_verbosity_error()
    head = running.header(args.device)
    path = running.result_file(args.out, head["gpu"], "patching.json", folder=RESULTS)
    log(f"{head['gpu']}, torch {head['torch']}, transformers {head['transformers']}")
    bench = Bench(args.size, device=args.device, tokens=args.tokens, seed=args.seed)
    log(f"{args.size.name}: stock and fp32 logits ready, stock errs by {bench.stock_error:.2e}")
    records: list[dict[str, Any]] = []
    for variant in args.variants:
        try:
            records.append(bench.measure(variant, patch))
            log(f"{variant}: patched in {records[-1]['patch_s']:.2f} s")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:2000]
            records.append({"patching": args.size.name, "variant": variant, "error": why})
            log(f"{variant}: {why}")
        results.save(path, head, records)
    print(table(records), flush=True)
    failed = any(record.get("error") or record["missed"] for record in records)
    return running.ended(log, path, failed=failed)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, trial=True, folder=RESULTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the forward (64)")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, dest=name, type=int, default=getattr(EIGHT_B, name))
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least one token")
    args.size = Size(
        args.layers,
        args.hidden,
        args.heads,
        args.kv_heads,
        args.intermediate,
        args.vocab,
        tied=False,
    )
    running.check_trial(parser, args)
    return args


def main(argv: Sequence[str], patch: Callable[..., Any] | None = None) -> int:
    args = parse(argv)
    # A plan that gave way, or a site that failed, would be reported as if all had gone well.
    for message in ("flashnorm_triton", ".*could not be patched"):
        warnings.filterwarnings("error", message=message, category=RuntimeWarning)
    if patch is None:
        from flashnorm_triton import patch
    return running.on_gpu(
        "patching", lambda: run(args, patch), device=args.device, hint="or try it with --device cpu"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
