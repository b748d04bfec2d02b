"""How much memory and time does folding a large checkpoint take, beside copying it?

Writes a random Llama of several GB, once in shards and once in one file, then in turn copies the
folder (``cp -r``) and folds it, each in a process of its own; neither waits until the disk has it
all. The folds that are timed are forked from a process that has imported torch and transformers, so
each plans afresh; that process folds last, and its peak memory (ru_maxrss) counts.
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
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnorm_triton.atomic import write_text  # noqa: E402
from flashnorm_triton.checkpoints.hashing import ALGORITHMS, choose  # noqa: E402
from flashnorm_triton.checkpoints.safefile import make_header, tensor_bytes, to_bytes  # noqa: E402

WIDTH, INNER, HEADS, KV_HEADS, WORDS = 2560, 9728, 20, 5, 32000
MEMORY_LIMIT, TIME_LIMIT = 1.5, 2.0

# Imports once, then a fork for each line of stdin: what it folds (or takes apart), and how.
SERVER = """
import json, os, resource, sys, time
import torch, transformers
from transformers import LlamaForCausalLM
from flashnorm_triton.checkpoints import folding, hashing
from flashnorm_triton.checkpoints.passing import CHUNK, reserve, write_all
from flashnorm_triton.checkpoints.product import Product, Scale, Scratch
from flashnorm_triton.checkpoints.source import open_source
from pathlib import Path

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def memory(source, target, digest):
    folding.fold_checkpoint(source, target, digest=digest, progress=False)
    return {"peak_bytes": peak()}

def fold(source, target, digest):
    plan_seconds, make_plan = [0.0, 0.0], folding.make_plan
    def timed(*arguments, **options):
        started, busy = time.perf_counter(), time.process_time()
        plan = make_plan(*arguments, **options)
        plan_seconds[:] = time.perf_counter() - started, time.process_time() - busy
        return plan
    folding.make_plan = timed
    started, busy = time.perf_counter(), time.process_time()
    folding.fold_checkpoint(source, target, digest=digest, progress=False)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    return {"seconds": seconds, "cpu": cpu} | dict(zip(("plan", "plan_cpu"), plan_seconds))

def parts(source, target, digest):
    # Each part of a fold alone, in one thread: seconds of processor time for the whole model.
    torch.set_num_threads(1)
    spent = {}
    def part(name, work):
        since = time.process_time()
        result = work()
        spent[name] = spent.get(name, 0.0) + time.process_time() - since
        return result
    source = open_source(Path(source), "source")
    plan = part("plan", lambda: folding.make_plan(source))
    edits = folding._edits(source, plan, False)
    buffer, scratch = memoryview(bytearray(CHUNK)), Scratch()
    target = Path(target)
    for shard in source.shards.values():
        size = shard.data_start + shard.data_size
        def read():
            with shard.path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        part("read", read)
        for name in hashing.ALGORITHMS:
            def hashed():
                digest = hashing.new_digest(hashing.choose(name))
                for start in range(0, size, len(buffer)):
                    digest.update(buffer[: size - start])
            part(name, hashed)
        def multiplied():
            for entry in shard.entries:
                if isinstance(edits.get(entry.name), Scale):
                    product = Product(entry, entry.dtype, edits[entry.name])
                    rows = len(buffer) // product.row_bytes
                    for row in range(0, entry.size // product.row_bytes, rows):
                        left = entry.size - row * product.row_bytes
                        piece = buffer[: min(rows * product.row_bytes, left)]
                        product.piece(piece, row, scratch)
        part("product", multiplied)
        def written():
            with target.open("wb", buffering=0) as file:
                reserve(file, size)
                for start in range(0, size, len(buffer)):
                    write_all(file, buffer[: size - start], start)
        part("write", written)
        target.unlink()
    return spent

print(json.dumps({"peak_bytes": peak()}), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "memory":
        print(json.dumps(memory(*arguments)), flush=True)
        continue
    child = os.fork()
    if not child:
        print(json.dumps({"fold": fold, "parts": parts}[name](*arguments)), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name + " failed")
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


class Server:
    """The process that folds; ``imports`` is what it needed before."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.imports = self._answer()

    def ask(self, *request: str) -> dict[str, float]:
        """What one fork found."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that folds has ended")
        return json.loads(line)


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of a plain copy, and of processor time in them."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compared(
    server: Server, source: Path, target: Path, digests: list[str], rounds: int
) -> dict[str, Any]:
    """A copy and a fold for each digest, in turn: seconds of each round."""
    plain: list[tuple[float, float]] = []
    folds: dict[str, list[dict[str, float]]] = {digest: [] for digest in digests}
    for number in range(rounds):
        os.sync()
        plain.append(copy(source, target))
        shutil.rmtree(target)
        for digest in digests:
            os.sync()
            folds[digest].append(server.ask("fold", str(source), str(target), digest))
            shutil.rmtree(target)
        print(
            f"round {number + 1}: copy {plain[-1][0]:.2f} s, fold "
            + ", ".join(f"{d} {f[-1]['seconds']:.2f} s" for d, f in folds.items()),
            flush=True,
        )

    def against_copy(digest: str, key: str, place: int) -> float:
        return statistics.median(
            fold[key] / copied[place] for fold, copied in zip(folds[digest], plain, strict=True)
        )

    return {
        "copy_seconds": [copied[0] for copied in plain],
        "copy_cpu_seconds": [copied[1] for copied in plain],
        "folds": {
            digest: {
                "seconds": [fold["seconds"] for fold in found],
                "cpu_seconds": [fold["cpu"] for fold in found],
                "plan_seconds": [fold["plan"] for fold in found],
                "over_copy": against_copy(digest, "seconds", 0),
                "over_copy_cpu": against_copy(digest, "cpu", 1),
            }
            for digest, found in folds.items()
        },
    }


def described(source: Path) -> dict[str, Any]:
    """Sizes of a checkpoint, and how many weights lie in another shard than their norm."""
    from flashnorm_triton.checkpoints.folding import make_plan
    from flashnorm_triton.checkpoints.source import open_source

    opened = open_source(source, "source")
    sizes = [shard.data_start + shard.data_size for shard in opened.shards.values()]
    folds, files = make_plan(opened).folds, opened.weight_map
    return {
        "bytes": sum(sizes),
        "shards": len(sizes),
        "largest_shard_bytes": max(sizes),
        "norms_folded": len(folds),
        "weights_in_another_shard_than_their_norm": sum(
            files[fold.gain] != files[target.tensor] for fold in folds for target in fold.targets
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.2, help="size of the model")
    parser.add_argument("--shard-gigabytes", type=float, default=1.0, help="largest shard")
    parser.add_argument("--rounds", type=int, default=5, help="copies and folds, in turn")
    parser.add_argument("--quick", action="store_true", help="in shards and by default alone")
    parser.add_argument("--folder", type=Path, help="where it all is written, and removed again")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/cpu/fold.json")
    options = parser.parse_args()
    default = choose(None)
    digests = [default] if options.quick else sorted({default, *ALGORITHMS})
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, target = Path(name) / "source", Path(name) / "target"
        source.mkdir()
        print("writing the model", flush=True)
        generate(source, options.gigabytes, int(options.shard_gigabytes * 1e9))
        sharded = described(source)
        server = Server()
        sharded |= compared(server, source, target, digests, options.rounds)
        parts, single = [], None
        if not options.quick:
            parts = [server.ask("parts", str(source), str(target), default) for _ in range(2)]
        peak = server.ask("memory", str(source), str(target), default)["peak_bytes"]
        shutil.rmtree(target)
        if not options.quick:
            shutil.rmtree(source)
            source.mkdir()
            print("writing it in one file", flush=True)
            generate(source, options.gigabytes, 1 << 60)
            single = described(source)
            single |= compared(server, source, target, [default], max(options.rounds - 2, 1))
        server.close()
        load.append(os.getloadavg()[0])
    kept = {
        "peak_over_largest_shard": peak / sharded["largest_shard_bytes"],
        "fold_over_copy": sharded["folds"][default]["over_copy"],
    }
    limits = {"peak_over_largest_shard": MEMORY_LIMIT, "fold_over_copy": TIME_LIMIT}
    result = {
        "schema": 2,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": load,
        "digest": default,
        "peak_bytes": peak,
        "peak_bytes_of_imports": server.imports["peak_bytes"],
        **kept,
        "limits": limits,
        "cpu_seconds_by_part": {
            name: statistics.median(one[name] for one in parts) for name in (parts or [{}])[0]
        },
        "sharded": sharded,
        "single_file": single,
    }
    write_text(options.out, json.dumps(result, indent=1) + "\n")
    for key, value in kept.items():
        print(f"{key}: {value:.2f} (limit {limits[key]})")
    if single is not None:
        print(f"in one file: {single['folds'][default]['over_copy']:.2f}")
    return 0 if all(kept[key] <= limits[key] for key in limits) else 1


if __name__ == "__main__":
    sys.exit(main())
