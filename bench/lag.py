"""Does a patched model on the GPU answer with what belongs to the step before?

Question: over 4,096 tokens in one cache, eager, compiled and as a replayed CUDA graph, is any step
of the patched model (six layers as Llama-3.2-1B's, random weights and gains, bf16) off by more than
rounding, at its logits or at any site; and of the shipped model, whose 2,048 positions begin anew
when they run out? And which faults of tests/planted_faults.py does the lag detector see?

    python bench/lag.py [--parts modes faults] [--tokens 4096] [--seconds 85] [--out DIR]

Writes lag.json and, as lag.png and .svg, the figure of its first run; ``faults`` merges its records
(instrument "lag") into faults.json, and draws a single late read of the shipped model (lag_fault).
Exit: 0 when the runs were clean and the controls silent, 1 otherwise, 2 without a GPU. ``--device
cpu`` tries the script on a tiny model, eager only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import late_reads
import torch
import transformers
from planted_faults import FAULTS, Fault, healthy, planted, serves
from torch import Tensor, nn

from bench.fault_instruments import delays
from bench.faults import merge
from flashnorm_triton import LagReport, demo_model, find_lag, results
from flashnorm_triton import patch as patch_model
from flashnorm_triton.bench import report, running
from flashnorm_triton.bench.generate import Size, make_model
from flashnorm_triton.lag.picture import draw
from flashnorm_triton.plans import Problem

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 64
SIX_LAYERS = Size(layers=6, vocab=4096, tied=False)
TWO_LAYERS = Size(layers=2, vocab=4096, tied=False)
TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=512, tied=False)
# (model, mode, what is watched): "logits" alone, "layers" as they run (blocks as blocks), "sites"
# (blocks run site by site for that). Taps copy rows between kernels: so, runs without them as well.
RUNS = (
    ("six", "graph", "sites"),
    ("six", "graph", "layers"),
    ("six", "graph", "logits"),
    ("shipped", "graph", "sites"),
    ("six", "compiled", "logits"),
    ("six", "eager", "layers"),
)
WATCH = {"logits": False, "layers": True, "sites": "sites"}
_BEHIND = 4_000_000  # cycles: longer than the host takes for a step
ROWS_OF_TILES = 64  # the racing form serves whole tiles of rows only


def llama(size: Size, device: str) -> nn.Module:
    """Random weights whose rows differ in size from token to token, as a trained model's do: else
    a scale of the step before would be right as often as not."""
    model = make_model(size, device)
    rows = model.get_input_embeddings().weight
    spread = torch.exp(0.5 * torch.randn(len(rows), 1, device=device))
    rows.data.copy_(rows.float() * spread)
    return model


def prompt_of(size: Size, rows: int, device: str) -> Tensor:
    """Random tokens."""
    return torch.randint(1, size.vocab, (rows, PROMPT), device=device)


def record_of(name: str, mode: str, watch: str, found: LagReport, seconds: float) -> dict:
    """What a run came to, as a record of lag.json."""
    sites = [place for place in found.places if place.site is not None]
    shown, judged = (sum(getattr(p, k) for p in sites) for k in ("decidable", "judged"))
    record = {
        "lag": name,
        "mode": mode,
        "watched": watch,
        "tokens": found.tokens,
        "rows": found.batch,
        "clean": found.clean,
        "found": None if found.departure is None else str(found.departure),
        "lagged_steps": found.lagged_steps,
        "departed_steps": found.departed_steps,
        "decidable": found.decidable,
        "site_steps": judged,
        "sites_decidable": shown / judged if judged else None,
        "false_alarms": found.false_alarms,
        "worst": max(place.worst for place in found.places),
        "kl": found.kl,
        "kl_stock": found.kl_noise,
        "kl_largest": found.kl_largest,
        "seconds": round(seconds, 2),
    }
    for text, figures in found.repeats.items():
        record[f"distinct_4_{text}"] = figures.distinct[4]
        record[f"longest_repetition_{text}"] = figures.longest_run
    # Infinite distances (a NaN was found) have no place in JSON; ``found`` says where they are.
    lost = {k: None for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return record | lost


def run_modes(args: argparse.Namespace, head: dict, log: report.Log) -> list[dict]:
    """Every run of ``RUNS``; the figure is the first one's."""
    device, size = args.device, SIX_LAYERS if args.device == "cuda" else TINY
    stock = {"six": llama(size, device), "shipped": demo_model.load(device=device)}
    names = {"six": size.name, "shipped": "shipped"}
    patched = {}
    for name, model in stock.items():
        patched[name] = copy.deepcopy(model)
        patch_model(patched[name])
    ids = demo_model.tokenizer()(demo_model.heldout_text(), verbose=False)["input_ids"]
    prompts = {
        "six": prompt_of(size, 1, device),
        "shipped": torch.tensor([ids[700 : 700 + PROMPT]], device=device),
    }
    records = []
    for name, mode, watch in RUNS:
        if device == "cpu" and mode != "eager":
            continue
        if mode not in args.modes or log.seconds > args.seconds:
            log(f"{name} {mode}: left out")
            continue
        started = time.monotonic()
        record: dict[str, Any] = {"lag": names[name], "mode": mode, "watched": watch}
        try:
            found = find_lag(
                (patched[name], stock[name]),
                prompts[name],
                tokens=args.tokens,
                mode=mode,
                layers=WATCH[watch],
                chunk=128,
                restart=name == "shipped",
                repeats=name == "shipped",
            )
            record = record_of(names[name], mode, watch, found, time.monotonic() - started)
            if not (args.out / "lag.png").exists():
                draw(found, args.out / "lag.png")
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"[:1000]
        records.append(record)
        log(str(record))
        results.save(args.out / "lag.json", head, records)
    return records


@contextlib.contextmanager
def _loaded(model: nn.Module, device: str) -> Iterator[None]:
    """Copies and matmuls on another stream beside every step of ``model``, whose launches are
    enqueued behind a sleep: else the host is slow enough to keep two streams apart."""
    if device != "cuda":
        yield
        return
    from flashnorm_triton.tuning.rig import Load

    load = Load()

    def disturb(*_: Any) -> None:
        torch.cuda._sleep(_BEHIND)
        load(20)

    hook = model.register_forward_pre_hook(disturb)
    try:
        yield
    finally:
        hook.remove()


def look(fault: Fault, within: Any, late: bool, device: str, tokens: int) -> LagReport:
    """The detector on a model that is patched and generates within a fault, beside a load; ``late``
    also puts delays into the streams of a fork and its join."""
    size = TWO_LAYERS if device == "cuda" else TINY
    torch.manual_seed(1)
    stock = llama(size, device)
    rows = ROWS_OF_TILES if fault.plan.form == "tiles" else 1
    with within(fault.name), delays(random.Random(0)) if late else contextlib.nullcontext():
        model = copy.deepcopy(stock)
        patch_model(model)
        with _loaded(model, device):
            return find_lag(
                (model, stock),
                prompt_of(size, rows, device),
                tokens=tokens // (8 if rows > 1 else 1),
                layers="sites",
                chunk=16 if rows > 1 else 64,
                repeats=False,
            )


def why_not(fault: Fault, device: str) -> str | None:
    """Why a fault cannot be put to the detector here."""
    if fault.where != "any" and device != "cuda":
        return "needs a GPU"
    rows = ROWS_OF_TILES if fault.plan.form == "tiles" else 1
    size = TWO_LAYERS if device == "cuda" else TINY
    width = size.hidden // size.heads
    problems = (
        Problem("bfloat16", rows, (size.heads + 2 * size.kv_heads) * width, size.hidden),
        Problem("bfloat16", rows, 2 * size.intermediate, size.hidden),
    )
    if not any(serves(fault.plan, problem, device == "cuda") for problem in problems):
        return "its plan serves no site of the model here"
    if fault.name.startswith("shared_"):
        return "a generation runs on one stream"
    return None


def fault_record(fault: Fault, device: str, tokens: int) -> dict[str, Any]:
    """The detector on one fault and on the same plan without it, as a record of faults.json."""
    record: dict[str, Any] = {"fault": fault.name, "instrument": "lag"}
    reason = why_not(fault, device)
    if reason is not None:
        nothing = {"caught": None, "launches": None, "seconds": None, "false_alarm": None}
        return {**record, **nothing, "detail": reason}
    started = time.monotonic()
    found, told = look(fault, planted, False, device, tokens), ""
    if found.clean and fault.plan.form == "two_streams":
        told = f"nothing in {tokens} steps; with delays in the streams: "
        found = look(fault, planted, True, device, tokens)
    seconds = time.monotonic() - started
    control = look(fault, healthy, False, device, tokens // 2)
    first = found.lag or found.departure
    return {
        **record,
        "caught": not found.clean,
        "launches": found.tokens if first is None else first.step + 1,
        "seconds": round(seconds, 3),
        "detail": told + ("nothing beyond rounding" if first is None else str(first)),
        "false_alarm": not control.clean,
        "control": str(control.departure or "nothing beyond rounding"),
    }


def run_faults(args: argparse.Namespace, head: dict, log: report.Log) -> list[dict]:
    """Every fault that is left time for."""
    records = []
    for fault in (FAULTS[name] for name in args.faults):
        if log.seconds > args.seconds:
            log(f"{fault.name}: left out, no time")
            continue
        try:
            record = fault_record(fault, args.device, args.fault_tokens)
        except Exception as error:
            record = {"fault": fault.name, "instrument": "lag"}
            record["error"] = f"{type(error).__name__}: {error}"[:500]
        records.append(record)
        log(str(record))
        merge(args.out / "faults.json", head, records)
    return records


def draw_one_late_read(out: Path, device: str) -> None:
    """lag_fault.png and .svg: the shipped model, one layer's scale late at one step of 600."""
    stock = demo_model.load(device=device)
    model = copy.deepcopy(stock)
    patch_model(model)
    late = model.model.layers[3].post_attention_layernorm
    late_reads.stale_scale(late, {437}, stock.config.rms_norm_eps)
    ids = demo_model.tokenizer()(demo_model.heldout_text(), verbose=False)["input_ids"]
    prompt = torch.tensor([ids[:PROMPT]], device=device)
    draw(
        find_lag((model, stock), prompt, tokens=600, layers="sites", repeats=False),
        out / "lag_fault.png",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=("modes", "faults"), default=["modes"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled", "graph"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--fault-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins after that")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<gpu>/)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.fault_tokens < 32:
        parser.error("--tokens at least 2, --fault-tokens at least 32")
    if args.device == "cpu" and args.out is None:
        parser.error("--device cpu is a trial of the script: say where to write with --out")
    return args


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    gpu = None if args.device == "cuda" else running.NO_BENCHMARK
    head = results.header(copy_tb_s=0.0, matmul_tflops=0.0, gpu=gpu)
    args.out = args.out or ROOT / "bench" / "results" / results.gpu_slug(head["gpu"])
    args.out.mkdir(parents=True, exist_ok=True)
    records: list[dict] = []
    if "modes" in args.parts:
        records += run_modes(args, head, log)
    if "faults" in args.parts:
        records += run_faults(args, head, log)
        draw_one_late_read(args.out, args.device)
    bad = [r for r in records if r.get("error") or r.get("false_alarm") or r.get("clean") is False]
    log(f"{len(records)} runs, {len(bad)} not as they should be")
    return running.ended(log, args.out, failed=bool(bad))


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    # A plan that gave way would be looked at under the name of the faulty one.
    warnings.filterwarnings("error", message="flashnorm_triton", category=RuntimeWarning)
    return running.on_gpu(
        "lag", lambda: run(args), device=args.device, hint="or try it with --device cpu"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
