"""A whole model, stock and patched, through transformers' own ``generate``.

Question: how many tokens a second does ``patch`` add at batch 1, eager with the dynamic cache and
compiled with the static one, and does the model still say the same? Random weights (and random
gains) at the Llama-3.2-1B shape; both models stay on the GPU, and their runs alternate.

    python -m flashnorm_triton.bench.generate [--modes eager compiled] [--new 128] [--out FILE]

Before a patched model is timed, it is led along random tokens through the very decode path that is
timed, and its logits are compared with float64 step by step, at t and at t−1; its greedy tokens
are compared with stock's. A model that disagrees gets an ``error`` instead of a speed. Exit: 0 when
all is measured, 1 when anything failed, 2 for bad arguments or no GPU.

``--device cpu --layers 2 --hidden 64 ...`` tries the script on a tiny model, eager only; such a
file says that it is no benchmark and may not be written into bench/results.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from flashnorm_triton.bench import decoders, decoding, report, resuming, running
from flashnorm_triton.tuning import measure

REPEATS = {"eager": 5, "compiled": 15}
LEAST_REPEATS = 3


@dataclass(frozen=True)
class Size:
    """A Llama decoder's dimensions; the defaults are Llama-3.2-1B's."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 8192
    vocab: int = 128256
    tied: bool = True

    @property
    def name(self) -> str:
        known = {Size(): "llama-3.2-1b", EIGHT_B: "llama-3.1-8b"}
        return known.get(self, f"llama-{self.layers}x{self.hidden}")

    def config(self) -> transformers.LlamaConfig:
        return transformers.LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,  # every run is as long as it was asked to be
            pad_token_id=0,
        )


@dataclass(frozen=True)
class Named:
    """A model of ``decoders.config_of`` in a Size's place."""

    model: str

    @property
    def name(self) -> str:
        return decoders.label(self.model)

    @cached_property
    def _config(self) -> Any:
        return decoders.config_of(self.model)

    @property
    def vocab(self) -> int:
        return self._config.get_text_config().vocab_size


EIGHT_B = Size(32, 4096, 32, 8, 14336, tied=False)


def make_model(size: Size | Named, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with random weights and, unlike a fresh one, random gains; it never ends a text."""
    if isinstance(size, Named):
        name = str(dtype).removeprefix("torch.")
        model = decoders.make(size.model, device, seed=torch.initial_seed(), dtype=name)
        model.generation_config.eos_token_id = None
        return model
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(size.config(), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.copy_(1 + 0.5 * torch.randn_like(parameter, dtype=torch.float32))
    return model.eval().requires_grad_(False)


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one run, the GPU's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def identity(size: Size | Named, mode: str, variant: str, dtype: str) -> dict[str, Any]:
    """The fields that every record has, measured or not."""
    return {"model": size.name, "mode": mode, "variant": variant, "dtype": dtype}


class Bench:
    """Both models, the float64 reference, and one prompt; measures one mode at a time."""

    def __init__(
        self,
        size: Size | Named,
        *,
        prompt: int,
        new: int,
        device: str,
        patch: Callable[[Any], Any],
        dtype: str = "bfloat16",
    ) -> None:
        self.size, self.new, self.dtype = size, new, dtype
        self.stock = make_model(size, device, getattr(torch, dtype))
        self.patched = copy.deepcopy(self.stock)
        self.reference = copy.deepcopy(self.stock).double()
        self.bytes = decoders.step_bytes(self.stock, 1, prompt + new // 2)
        patch(self.patched)
        self.prompt = torch.randint(1, size.vocab, (1, prompt), device=device)
        self.forced = torch.randint(1, size.vocab, (new,), device=device)
        self.wanted = decoding.reference_logits(self.reference, self.prompt, self.forced)

    def identity(self, mode: str, variant: str) -> dict[str, Any]:
        return identity(self.size, mode, variant, self.dtype)

    def measure(
        self, mode: str, *, repeats: int, copy_tb_s: float, log: report.Log, budget_s: float
    ) -> list[dict[str, Any]]:
        """The stock and the patched record of one mode."""
        errors: dict[str, str] = {}
        logits: dict[str, Tensor] = {}
        models = {"stock": self.stock, "patched": self.patched}
        for variant, model in models.items():
            try:
                logits[variant] = decoding.forced_logits(model, self.prompt, self.forced, mode)
            except Exception as error:
                errors[variant] = f"{type(error).__name__}: {error}"[:2000]
            log(f"{mode} {variant}: led along {self.new} tokens, {errors.get(variant, 'ran')}")
        agreed = None
        if len(logits) == 2:
            agreed = decoding.agreement(logits["patched"], logits["stock"], self.wanted)
            if agreed.problem:
                errors["patched"] = agreed.problem
            log(f"{mode}: {agreed}")
        elif "patched" in logits:
            errors["patched"] = "not compared: the stock model failed"
        logits.clear()
        running = {name: model for name, model in models.items() if name not in errors}
        times, tokens = self._time(running, mode, repeats, log, budget_s)
        first_difference = None
        if agreed and len(tokens) == 2:
            first_difference, problem = decoding.tokens_problem(
                tokens["stock"],
                tokens["patched"],
                self.prompt,
                self.reference,
                agreed.max_err,
            )
            if problem:
                errors["patched"] = problem
        records = []
        for variant, model in models.items():
            record = self.identity(mode, variant)
            if variant == "patched" and agreed:
                record["agreement"] = agreed.fields()
                record["first_difference"] = first_difference
            if variant in errors:
                records.append({**record, "error": errors[variant]})
                continue
            record |= self._speed(times[variant], copy_tb_s)
            if variant == "patched":
                each = zip(times["stock"], times["patched"], strict=True)
                record["speedup"] = statistics.median(a / b for a, b in each)
            records.append(record | decoding.step_costs(model, self.prompt, self.new, mode))
            log(f"{mode} {variant}: {record['tokens_per_s']:.1f} tokens/s")
        return records

    def _time(
        self,
        models: dict[str, Any],
        mode: str,
        repeats: int,
        log: report.Log,
        budget_s: float,
    ) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
        """Seconds of every run, alternating which model goes first; and the greedy tokens."""
        times: dict[str, list[float]] = {name: [] for name in models}
        tokens: dict[str, Tensor] = {}
        for number in range(repeats + 1):
            if number > LEAST_REPEATS and log.seconds > budget_s:
                break
            for name in list(models)[:: -1 if number % 2 else 1]:
                out = []
                spent = seconds(
                    lambda name=name, out=out: out.append(
                        decoding.generate(models[name], self.prompt, self.new, mode)
                    )
                )
                tokens[name] = out[0][0, self.prompt.shape[1] :]
                if number:  # the first run of each is the warm-up
                    times[name].append(spent)
        return times, tokens

    def _speed(self, times: Sequence[float], copy_tb_s: float) -> dict[str, Any]:
        spent = statistics.median(times)
        ms = spent / self.new * 1e3
        floor_ms = self.bytes / (copy_tb_s * 1e12) * 1e3 if copy_tb_s else None
        return {
            "ms": ms,
            "ms_q20": measure.quantile(times, 0.2) / self.new * 1e3,
            "ms_q80": measure.quantile(times, 0.8) / self.new * 1e3,
            "tokens_per_s": self.new / spent,
            "fraction_of_bandwidth": floor_ms / ms if floor_ms else None,
            "floor_ms": floor_ms,
            "repeats": len(times),
            "batch": 1,
            "prompt": self.prompt.shape[1],
            "new_tokens": self.new,
        }


def table(records: Sequence[dict[str, Any]]) -> str:
    """One line a record."""
    lines = [
        f"{'mode':>9} {'variant':>8} {'tok/s':>8} {'ms':>8} {'step ms':>8} {'host ms':>8} "
        f"{'busy ms':>8} {'kernels':>8} {'of bw':>6} {'speedup':>8}"
    ]

    def number(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    for r in records:
        lead = f"{r['mode']:>9} {r['variant']:>8} "
        if r.get("error"):
            lines.append(lead + r["error"])
            continue
        lines.append(
            f"{lead}{r['tokens_per_s']:>8.1f} {r['ms']:>8.3f} {number(r['step_ms'], '.3f'):>8} "
            f"{number(r['host_ms'], '.3f'):>8} {number(r.get('gpu_busy_ms'), '.3f'):>8} "
            f"{number(r['launches'], 'd'):>8} {number(r['fraction_of_bandwidth'], '.2f'):>6} "
            f"{number(r.get('speedup'), '.3f'):>8}"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace, patch: Callable[[Any], Any]) -> int:
    log = report.Log()
    torch.manual_seed(args.seed)
    transformers.logging.set_verbosity_error()
    head = running.header(args.device)
    path = running.result_file(args.out, head["gpu"], "generate.json")
    log(f"{head['gpu']}, torch {head['torch']}, transformers {head['transformers']}")
    settings = {"prompt": args.prompt, "new": args.new, "seed": args.seed, "repeats": args.repeats}
    kept = resuming.begin(path, head, settings, resume=args.resume, log=log)
    bench = None
    for mode in report.progress(modes_left(args, kept), "generate"):
        if bench is None:
            bench = Bench(
                args.size, prompt=args.prompt, new=args.new, device=args.device, patch=patch,
                dtype=running.DTYPES[args.dtype],
            )  # fmt: skip
            log("stock, patched and float64 models ready")
        try:
            records = bench.measure(
                mode,
                repeats=args.repeats or REPEATS[mode],
                copy_tb_s=kept.head["copy_tb_s"],
                log=log,
                budget_s=args.budget,
            )
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:2000]
            records = [{**bench.identity(mode, v), "error": why} for v in ("stock", "patched")]
        kept.save(records)
    report.say(table(kept.records))
    return running.ended(log, path, failed=any(record.get("error") for record in kept.records))


def modes_left(args: argparse.Namespace, kept: resuming.Kept) -> list[str]:
    """The modes of which the file does not have both models; what it has of those is forgotten,
    for the two are timed in turn."""
    left = []
    for mode in args.modes:
        both = [
            identity(args.size, mode, variant, running.DTYPES[args.dtype])
            for variant in ("stock", "patched")
        ]
        if not all(kept.has(**one) for one in both):
            left.append(mode)
            for one in both:
                kept.forget(**one)
    return left


def parse(argv: Sequence[str]) -> argparse.Namespace:
    size = Size()
    parser = running.parser(__doc__, trial=True, resume=True)
    parser.add_argument("--modes", nargs="+", choices=decoding.MODES, default=decoding.MODES)
    parser.add_argument("--new", type=int, default=128, help="tokens to generate (128)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (64)")
    parser.add_argument("--repeats", type=int, help="timed runs of each model (5; 15 compiled)")
    parser.add_argument(
        "--budget", type=float, default=170, help="seconds after which repeats stop early (170)"
    )
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, dest=name, type=int, default=getattr(size, name))
    parser.add_argument(
        "--model", type=running.word(decoders.known),
        help="a named shape, a folder with a config.json, or a hub id, in place of these sizes",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=running.DTYPES, default="bf16")
    args = parser.parse_args(argv)
    if args.new < 4:
        parser.error(f"--new {args.new}: at least 4 tokens, to tell step t from t-1")
    if args.prompt < 1:
        parser.error(f"--prompt {args.prompt}: at least one token")
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    args.size = Size(
        args.layers, args.hidden, args.heads, args.kv_heads, args.intermediate, args.vocab
    )
    if args.model:
        args.size = Named(args.model)
    if args.device == "cpu":
        args.modes = ("eager",)
    running.check_trial(parser, args)
    return args


def main(argv: Sequence[str], patch: Callable[[Any], Any] | None = None) -> int:
    args = parse(argv)
    # A plan that gave way would be timed under the name of the plan that was chosen.
    warnings.filterwarnings("error", message="flashnorm_triton", category=RuntimeWarning)
    if patch is None:
        from flashnorm_triton import patch
    return running.on_gpu(
        "generate", lambda: run(args, patch), device=args.device, hint="or try it with --device cpu"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
