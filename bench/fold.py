"""How much memory and time does folding a large checkpoint take, beside copying it?

Writes a random Llama of several GB in shards, then in turn copies the folder (``cp -r``) and folds
it, each in a process of its own; neither waits until the disk has it all. The peak memory is the
child's own (ru_maxrss); what importing torch and transformers takes is measured in a child that
stops before folding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnorm_triton.atomic import write_text  # noqa: E402
from flashnorm_triton.checkpoints.safefile import make_header, tensor_bytes, to_bytes  # noqa: E402

WIDTH, INNER, HEADS, KV_HEADS, WORDS = 2560, 9728, 20, 5, 32000
MEMORY_LIMIT, TIME_LIMIT = 1.5, 2.0

CHILD = """
import json, resource, sys, time
import torch, transformers
from transformers import LlamaForCausalLM
from flashnorm_triton.checkpoints import folding
folds, plan_seconds, make_plan = 0, [0.0, 0.0], folding.make_plan
def timed(*arguments, **options):
    started, busy = time.perf_counter(), time.process_time()
    plan = make_plan(*arguments, **options)
    plan_seconds[:] = time.perf_counter() - started, time.process_time() - busy
    return plan
folding.make_plan = timed
started, busy = time.perf_counter(), time.process_time()
if len(sys.argv) > 2:
    record = folding.fold_checkpoint(sys.argv[1], sys.argv[2], progress=False).record
    folds = len(record["folds"])
seconds, cpu = time.perf_counter() - started, time.process_time() - busy
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {"seconds": seconds, "cpu": cpu, "peak_bytes": peak, "folds": folds}
print(json.dumps(found | dict(zip(("plan", "plan_cpu"), plan_seconds))))
"""


# Each part of a fold alone, in one thread: seconds of processor time for the whole model.
PARTS = """
import hashlib, json, os, pathlib, sys, time
import torch, transformers
from transformers import LlamaForCausalLM
from flashnorm_triton.checkpoints import folding, stream
from flashnorm_triton.checkpoints.source import open_source
torch.set_num_threads(1)
spent, since = {}, time.process_time()
def part(name):
    global since
    now = time.process_time()
    spent[name] = spent.get(name, 0.0) + now - since
    since = time.process_time()
source = open_source(pathlib.Path(sys.argv[1]), "source")
plan = folding.make_plan(source, untie=False, head=True, max_crest=None)
part("plan")
edits = folding._edits(source, plan, False)
buffer = memoryview(bytearray(1 << 20))
target = pathlib.Path(sys.argv[2])
for shard in source.shards.values():
    size = shard.data_start + shard.data_size
    with shard.path.open("rb", buffering=0) as file:
        since = time.process_time()
        while file.readinto(buffer):
            pass
        part("read")
    digest = hashlib.sha256()
    for start in range(0, size, len(buffer)):
        digest.update(buffer[: size - start])
    part("sha256")
    for entry in shard.entries:
        if isinstance(edits.get(entry.name), stream.Scale):
            product = stream.Product(entry, entry.dtype, edits[entry.name])
            step = len(buffer) // product.row_bytes * product.row_bytes
            for start in range(0, entry.size, step):
                product(buffer[: min(step, entry.size - start)])
    part("product")
    with target.open("wb", buffering=0) as file:
        since = time.process_time()
        stream.reserve(file, size)
        for start in range(0, size, len(buffer)):
            stream.write_all(file, buffer[: size - start])
        part("write")
    target.unlink()
print(json.dumps(spent))
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the model, in the order of their names."""
    head = WIDTH // HEADS
    found = {
        "lm_head.weight": (WORDS, WIDTH),
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = (WIDTH,)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows * head, WIDTH)
        found[f"{at}self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        for name in ("gate", "up"):
            found[f"{at}mlp.{name}_proj.weight"] = (INNER, WIDTH)
        found[f"{at}mlp.down_proj.weight"] = (WIDTH, INNER)
    return dict(sorted(found.items()))


def generate(folder: Path, gigabytes: float, shard_bytes: int) -> None:
    """A random bf16 model of at least that size, in shards of at most ``shard_bytes``."""
    from transformers import LlamaConfig

    layers = 1
    while sum(tensor_bytes("BF16", shape) for shape in shapes(layers).values()) < gigabytes * 1e9:
        layers += 1
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=WORDS,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(layers).items():
        size += tensor_bytes("BF16", shape)
        if shards[-1] and size > shard_bytes:
            shards.append({})
            size = tensor_bytes("BF16", shape)
        shards[-1][name] = shape
    weight_map = {}
    noise = torch.randn(1 << 22).mul_(0.02).bfloat16()
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, entries = make_header(
            [(name, "BF16", shape) for name, shape in shard.items()], {"format": "pt"}
        )
        with (folder / file).open("wb") as sink:
            sink.write(header)
            for entry in entries:
                left = entry.size // 2
                while left:
                    part = noise.roll(left % 9973)[:left]
                    sink.write(to_bytes(part if len(entry.shape) > 1 else part.abs() * 50 + 0.2))
                    left -= len(part)
                weight_map[entry.name] = file
    total = sum(tensor_bytes("BF16", shape) for shape in shapes(layers).values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def child(code: str, *arguments: str) -> dict[str, float]:
    """Run ``code`` in a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout.splitlines()[-1])


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of a plain copy, and of processor time in them."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.2, help="size of the model")
    parser.add_argument("--shard-gigabytes", type=float, default=1.0, help="largest shard")
    parser.add_argument("--rounds", type=int, default=5, help="copies and folds, in turn")
    parser.add_argument("--no-parts", action="store_true", help="do not time each part by itself")
    parser.add_argument("--folder", type=Path, help="where it all is written, and removed again")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/cpu/fold.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source, target = folder / "source", folder / "target"
        source.mkdir()
        print("writing the model", flush=True)
        generate(source, options.gigabytes, int(options.shard_gigabytes * 1e9))
        sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        imports = child(CHILD, str(source))
        copies, folds, parts = [], [], []
        load = [os.getloadavg()[0]]
        for number in range(options.rounds):
            os.sync()
            copies.append(copy(source, target))
            shutil.rmtree(target)
            os.sync()
            folds.append(child(CHILD, str(source), str(target)))
            record = json.loads((target / "flashnorm.json").read_text())
            shutil.rmtree(target)
            os.sync()
            if not options.no_parts:
                parts.append(child(PARTS, str(source), str(target)))
            print(
                f"round {number + 1}: copy {copies[-1][0]:.1f} s, "
                f"fold {folds[-1]['seconds']:.1f} s, peak {folds[-1]['peak_bytes'] / 1e6:.0f} MB",
                flush=True,
            )
            load.append(os.getloadavg()[0])
        apart = sum(
            index[fold["gain"]] != index[target["tensor"]]
            for fold in record["folds"]
            for target in fold["into"]
        )
    seconds = [fold["seconds"] for fold in folds]
    plain = [copied[0] for copied in copies]
    peak = max(fold["peak_bytes"] for fold in folds)
    result = {
        "schema": 1,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "bytes": sum(sizes),
        "shards": len(sizes),
        "largest_shard_bytes": max(sizes),
        "norms_folded": len(record["folds"]),
        "weights_in_another_shard_than_their_norm": apart,
        "peak_bytes": peak,
        "peak_bytes_of_imports": imports["peak_bytes"],
        "peak_over_largest_shard": peak / max(sizes),
        "fold_seconds": seconds,
        "copy_seconds": plain,
        "fold_cpu_seconds": [fold["cpu"] for fold in folds],
        "copy_cpu_seconds": [copied[1] for copied in copies],
        "plan_seconds": [fold["plan"] for fold in folds],
        "plan_cpu_seconds": [fold["plan_cpu"] for fold in folds],
        "cpu_seconds_by_part": {
            name: statistics.median(one[name] for one in parts) for name in (parts or [{}])[0]
        },
        "load_average": load,
        "fold_over_copy": statistics.median(f / c for f, c in zip(seconds, plain, strict=True)),
        "fold_over_copy_cpu": statistics.median(
            fold["cpu"] / copied[1] for fold, copied in zip(folds, copies, strict=True)
        ),
        "limits": {"peak_over_largest_shard": MEMORY_LIMIT, "fold_over_copy": TIME_LIMIT},
    }
    write_text(options.out, json.dumps(result, indent=1) + "\n")
    for key in ("peak_over_largest_shard", "fold_over_copy"):
        print(f"{key}: {result[key]:.2f} (limit {result['limits'][key]})")
    kept = all(result[key] <= result["limits"][key] for key in result["limits"])
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
