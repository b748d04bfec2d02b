"""Train the small Llama shipped as the demo's and the tests' real model.

The text is what every Python installation carries: the standard library's own .py files (code,
comments and docstrings). Files are split by a hash of their relative name into training,
validation (picks the checkpoint) and held-out (reported, never looked at before the end).

    python bench/train_demo_model.py --out flashnorm_triton/demo_model            # on a GPU
    python bench/train_demo_model.py --out /tmp/m --device cpu --steps 5          # smoke test

Needs torch, transformers, tokenizers, safetensors and numpy; no network.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FILE_TOKEN = "<|file|>"  # opens every file: bos, eos and pad in one
VOCAB = 2048
CONTEXT = 2048
EXCERPT_BYTES = 60_000
# Folders left out: installed packages, tests, and the generated code-page tables, whose near
# duplicates on both sides of the split would flatter the held-out figure.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SKIPPED |= {"encodings", "lib2to3", "lib-dynload"}


def stdlib_files() -> dict[str, str]:
    """Relative name -> text of the standard library's sources, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata and config-* describe the machine on which this Python was built.
        if SKIPPED & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        if name.parts[0].startswith("config-"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 200:
            texts[name.as_posix()] = text
    return texts


def part_of(name: str) -> str:
    """Which of the three parts a file belongs to, from its name alone."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big") / 65536
    return "heldout" if bucket < 0.05 else "validation" if bucket < 0.08 else "train"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE: any text round-trips, there is no unknown token."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[FILE_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def encode(tok: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All files one after another, each opened by the file token, as one int64 row."""
    start = tok.token_to_id(FILE_TOKEN)
    pieces = [[start, *e.ids] for e in tok.encode_batch(texts)]
    return torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in pieces]))


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def is_gain(name: str) -> bool:
    return "norm" in name


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss (nats) of rows (B, L + 1)."""
    hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def batches(data: torch.Tensor, tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows: three batches of 512-token rows, then one of rows of the full context."""
    rng = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        length = CONTEXT if step % 4 == 3 else CONTEXT // 4
        count = max(1, tokens // length)
        at = torch.randint(0, len(data) - length - 1, (count, 1), generator=rng).to(data.device)
        yield data[at + torch.arange(length + 1, device=data.device)]
        step += 1


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, data: torch.Tensor, limit: int | None = None) -> float:
    """Mean loss (nats a token) over rows of 1,024 tokens without overlap."""
    total, count = 0.0, 0
    for at in range(0, min(len(data) - 1, limit or len(data)), 1024):
        row = data[None, at : at + 1025]
        if row.shape[1] > 1:
            total += loss_of(model, row).item() * (row.shape[1] - 1)
            count += row.shape[1] - 1
    return total / count


def gain_statistics(model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
    stats = {}
    for name, p in model.named_parameters():
        if is_gain(name):
            g = p.detach().float()
            values = {"mean": g.mean(), "std": g.std(), "min": g.min(), "max": g.max()}
            stats[name] = {k: round(v.item(), 4) for k, v in values.items()}
    return stats


def optimiser(model: LlamaForCausalLM, args: argparse.Namespace, cuda: bool) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not is_gain(n)], "weight_decay": 0.1, "peak": args.lr},
        # A gain is one number among 128; at the matrices' rate it would hardly leave 1.
        {"params": [p for n, p in named if is_gain(n)], "weight_decay": 0.0, "peak": args.gain_lr},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=cuda or None)


def compiled_loss(
    model: LlamaForCausalLM, shapes: list[torch.Tensor], enabled: bool
) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """loss_of through torch.compile when that works on this machine, else as it is.

    Every shape of batch is compiled here, before the clock of the training starts.
    """
    if enabled:
        try:
            fn = torch.compile(lambda r: loss_of(model, r), dynamic=False)
            for rows in shapes:
                with torch.autocast(rows.device.type, dtype=torch.bfloat16):
                    fn(rows).backward()
            return fn, True
        except Exception as error:  # no compiler, no headers, an unsupported graph: train eagerly
            print(f"torch.compile not used: {type(error).__name__}: {str(error)[:200]}", flush=True)
        finally:
            model.zero_grad(set_to_none=True)
    return (lambda r: loss_of(model, r)), False


def train(model: LlamaForCausalLM, data: dict[str, torch.Tensor], args: argparse.Namespace) -> dict:
    """Train in place; ends with the weights of the best validation loss. Returns the figures."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    opt = optimiser(model, args, cuda)
    stream = batches(data["train"], args.tokens_per_step, args.seed)
    loss_fn, compiled = compiled_loss(
        model, [next(stream) for _ in range(4)], cuda and not args.no_compile
    )
    best, best_loss, best_step, seen, tick = None, math.inf, 0, 0, (time.perf_counter(), 0)
    began, step = time.perf_counter(), 0
    while True:
        # Whichever runs out first, steps or seconds, ends the cosine.
        done = max(step / args.steps, (time.perf_counter() - began) / args.seconds)
        if done >= 1:
            break
        shape = min(1.0, (step + 1) / args.warmup) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
        )
        for group in opt.param_groups:
            group["lr"] = group["peak"] * shape
        rows = next(stream)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            loss = loss_fn(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        seen += rows.shape[0] * (rows.shape[1] - 1)
        if step % args.log_every == 0 or step == args.steps:
            value = loss.item()
            now = time.perf_counter()
            rate = (seen - tick[1]) / (now - tick[0])
            tick = (now, seen)
            print(f"step {step:5d}  loss {value:.3f}  {rate:,.0f} tokens/s", flush=True)
            if not math.isfinite(value):
                raise SystemExit(f"loss is {value} at step {step}: lower --lr (now {args.lr})")
        if step % args.eval_every == 0 and done > 0.5:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
                val = evaluate(model, data["validation"], limit=200_000)
            print(f"step {step:5d}  validation {val:.4f}", flush=True)
            if val < best_loss:
                best, best_loss, best_step = copy.deepcopy(model.state_dict()), val, step
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
        last = evaluate(model, data["validation"], limit=200_000)
    if best is None or last < best_loss:
        best_loss, best_step = last, step
    else:
        model.load_state_dict(best)
    return {
        "steps": step,
        "best_step": best_step,
        "tokens_seen": seen,
        "validation_loss": round(best_loss, 4),
        "compiled": compiled,
        "train_seconds": round(time.perf_counter() - began, 1),
    }


def excerpt_of(texts: dict[str, str]) -> str:
    """Whole paragraphs from several held-out files, at most EXCERPT_BYTES of ASCII text."""
    out, room = [], EXCERPT_BYTES
    for text in texts.values():
        if not text.isascii() or len(text) < 2_000:
            continue
        piece = text[:8_000].rsplit("\n\n", 1)[0] + "\n"
        if len(piece) > room:
            break
        out.append(piece)
        room -= len(piece)
    return "\n".join(out)[:EXCERPT_BYTES]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--out", type=Path, required=True, help="folder that gets the model")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--steps", type=int, default=900)
    ap.add_argument("--seconds", type=float, default=130, help="training time at most")
    ap.add_argument("--tokens-per-step", type=int, default=32768)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--gain-lr", type=float, default=8e-2)
    ap.add_argument("--warmup", type=int, default=100)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--log-every", type=int, default=100)
    ap.add_argument("--eval-every", type=int, default=250)
    ap.add_argument("--no-compile", action="store_true")
    return ap.parse_args(argv)


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    files = stdlib_files()
    parts = {
        p: {n: t for n, t in files.items() if part_of(n) == p}
        for p in ("train", "validation", "heldout")
    }
    tok = train_tokenizer(iter(parts["train"].values()))
    data = {p: encode(tok, list(texts.values())).to(args.device) for p, texts in parts.items()}
    sizes = {
        p: {
            "files": len(t),
            "bytes": sum(len(x.encode()) for x in t.values()),
            "tokens": len(data[p]),
        }
        for p, t in parts.items()
    }
    print(f"data {json.dumps(sizes)}", flush=True)

    model = LlamaForCausalLM(model_config()).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters on {args.device}", flush=True)
    figures = train(model, data, args)

    model = model.to(torch.bfloat16).eval()
    train_loss = evaluate(model, data["train"], limit=200_000)
    held_loss = evaluate(model, data["heldout"])
    excerpt = excerpt_of(parts["heldout"])
    excerpt_loss = evaluate(model, encode(tok, [excerpt]).to(args.device))
    per_byte = held_loss * sizes["heldout"]["tokens"] / sizes["heldout"]["bytes"]
    gains = gain_statistics(model)

    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.cpu().save_pretrained(args.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=FILE_TOKEN,
        eos_token=FILE_TOKEN,
        pad_token=FILE_TOKEN,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    (args.out / "heldout.txt").write_text(excerpt, encoding="utf-8")
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "parameters": parameters,
        "seed": args.seed,
        "lr": args.lr,
        "gain_lr": args.gain_lr,
        "tokens_per_step": args.tokens_per_step,
        "data": sizes,
        **figures,
        "total_seconds": round(time.perf_counter() - began, 1),
        "train_loss": round(train_loss, 4),
        "heldout_loss": round(held_loss, 4),
        "heldout_perplexity": round(math.exp(held_loss), 3),
        "heldout_perplexity_per_byte": round(math.exp(per_byte), 4),
        "excerpt_perplexity": round(math.exp(excerpt_loss), 3),
        "gains": gains,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "gains"}))
    print("gains (std): " + ", ".join(f"{v['std']:.2f}" for v in gains.values()))
    size = (args.out / "model.safetensors").stat().st_size
    print(f"model.safetensors {size / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
