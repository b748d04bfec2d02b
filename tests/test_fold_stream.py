"""The pass over the shards: memory, the bar, products in every layout, headers."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from folders import saved
from safetensors import safe_open
from safetensors.torch import save_file

import flashnorm_triton as fn
from flashnorm_triton.checkpoints import passing, product
from flashnorm_triton.checkpoints.hashing import choose, hash_bytes, new_digest
from flashnorm_triton.checkpoints.product import Product, Scale, Scratch
from flashnorm_triton.checkpoints.safefile import Entry, make_header, read_shard, to_bytes
from flashnorm_triton.checkpoints.stream import Added, Drop, Replace, Rewriter

ROOT = Path(__file__).resolve().parents[1]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench at a tenth of its size; peak memory above what the imports take."""
    spec = importlib.util.spec_from_file_location("bench_fold", ROOT / "bench" / "fold.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    out = tmp_path / "fold.json"
    arguments = ["--gigabytes", "0.4", "--shard-gigabytes", "0.1", "--rounds", "1", "--quick"]
    monkeypatch.setattr(
        sys, "argv", ["fold.py", *arguments, "--folder", str(tmp_path), "--out", str(out)]
    )
    bench.main()  # its verdict on time is the machine's mood at this size
    small = json.loads(out.read_text())
    grown = small["peak_bytes"] - small["peak_bytes_of_imports"]
    assert grown <= 1.5 * small["sharded"]["largest_shard_bytes"]
    assert (
        small["sharded"]["norms_folded"] > 2
        and small["sharded"]["weights_in_another_shard_than_their_norm"] > 2
    )


def test_the_figures_in_the_docs_are_the_result_files() -> None:
    made = json.loads((ROOT / "bench" / "results" / "cpu" / "fold.json").read_text())
    text = (ROOT / "docs" / "fold.md").read_text()
    sharded, single = made["sharded"], made["single_file"]
    assert sharded["bytes"] >= 4e9 and sharded["shards"] > 3 and single["shards"] == 1
    assert made["peak_over_largest_shard"] <= 1.5 and made["fold_over_copy"] <= 2
    assert made["fold_over_copy"] == sharded["folds"]["blake3"]["over_copy"]
    rows = []
    for name, part in ((f"{sharded['shards']} shards", sharded), ("one file", single)):
        for digest, fold in part["folds"].items():
            seconds = (part["copy_seconds"], fold["seconds"])
            busy = (part["copy_cpu_seconds"], fold["cpu_seconds"])
            copy, ours, copy_busy, busy = (f"{median(one):.1f}" for one in (*seconds, *busy))
            ratio = f"**{fold['over_copy']:.2f}**"
            rows.append(f"| {name} | {digest} | {copy} | {ours} | {ratio} | {copy_busy} | {busy} |")
    rows += [f"| {name} | {value:.1f} |" for name, value in made["cpu_seconds_by_part"].items()]
    rows += [
        f"A random bfloat16 model of {sharded['bytes'] / 1e9:.1f} GB",
        f"in {sharded['shards']} shards took {made['peak_bytes'] / 1e6:.0f} MB at the peak, "
        f"{made['peak_bytes_of_imports'] / 1e6:.0f} MB of which",
        f"transformers takes: {made['peak_over_largest_shard']:.2f} of",
    ]
    assert len(rows) > 10
    for row in rows:
        assert row in text, row


def test_the_bar_shows_bytes_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "src")
    capsys.readouterr()
    fn.fold_checkpoint(source, tmp_path / "dst")
    shown = capsys.readouterr().err
    copied = {*source.glob("*.safetensors"), source / "tokenizer.json"}
    copied.add(source / "generation_config.json")
    size = f"{sum(file.stat().st_size for file in copied) / 1e3:.1f}"
    assert f"{size}/{size} kB" in shown and "0:00:00" in shown
    fn.fold_checkpoint(source, tmp_path / "again", progress=False)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_along_every_axis_in_pieces_of_any_size(
    tmp_path: Path, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "CHUNK", chunk)
    algorithm = choose(None if dtype == torch.float32 else "sha256")
    monkeypatch.setattr(product, "_PIECE", max(chunk // 8, 1))
    gain, beta = torch.randn(6), torch.randn(6)
    held = {
        "a_bias": torch.randn(5),
        "b_bias": torch.randn(7),
        "linear": torch.randn(5, 6),
        "conv1d": torch.randn(6, 7),
        "experts": torch.randn(3, 4, 6),
        "transposed": torch.randn(3, 6, 4),
        "norm": torch.randn(6),
        "gone": torch.randn(2),
        "other": torch.randn(3, 3),
    }
    held = {name: tensor.to(dtype) for name, tensor in held.items()}
    save_file(held, tmp_path / "in.safetensors", metadata={"format": "pt"})
    edits = {
        "linear": Scale(gain, 1, beta, "a_bias"),
        "conv1d": Scale(gain, 0, beta, "b_bias"),
        "experts": Scale(gain, 2),
        "transposed": Scale(gain, 1),
        "norm": Replace(torch.ones(6)),
        "gone": Drop(),
    }
    seen: list[int] = []
    added = (Added("new", "linear", Scale(gain * 2, 1)), Added("copy", "other", None))
    rewriter = Rewriter(edits, added, advance=seen.append, digest=algorithm)
    shard = read_shard(tmp_path / "in.safetensors")
    (tmp_path / "out").mkdir()
    (digest,) = rewriter.write_shards({"x.safetensors": shard}, tmp_path / "out").values()
    rewriter.finish()
    data = (tmp_path / "in.safetensors").read_bytes()
    assert digest == hash_bytes(algorithm, data) and sum(seen) == len(data)
    with safe_open(tmp_path / "out" / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        new = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert new.keys() == (held.keys() - {"gone"}) | {"new", "copy"}
    wide = {name: tensor.float() for name, tensor in held.items()}
    wanted = {
        "linear": wide["linear"] * gain,
        "conv1d": wide["conv1d"] * gain[:, None],
        "experts": wide["experts"] * gain,
        "transposed": wide["transposed"] * gain[None, :, None],
        "norm": torch.ones(6),
        "new": wide["linear"] * (gain * 2),
        "copy": wide["other"],
        "other": wide["other"],
    }
    for name, tensor in wanted.items():
        assert torch.equal(new[name], tensor.to(dtype)), name
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    sums = {"a_bias": wide["linear"] @ beta, "b_bias": beta @ wide["conv1d"]}
    for name, moved in sums.items():
        torch.testing.assert_close(new[name], (wide[name] + moved).to(dtype), **close)


def test_threads_that_share_a_file_write_what_one_alone_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash has the bytes in their order, every product its rows, every sum its terms."""
    gain, beta = torch.randn(6), torch.randn(6)
    held = {
        "a_bias": torch.randn(40),
        "b_bias": torch.randn(7),
        "linear": torch.randn(40, 6),
        "conv1d": torch.randn(6, 7),
        "other": torch.randn(50),
    }
    save_file(held, tmp_path / "x.safetensors")
    shards = {"x.safetensors": read_shard(tmp_path / "x.safetensors")}
    edits = {
        "linear": Scale(gain, 1, beta, "a_bias"),
        "conv1d": Scale(gain, 0, beta, "b_bias"),
    }
    monkeypatch.setattr(passing, "CHUNK", 64)
    at_work: list[int] = []

    def now_and_then(real: Any, late: float = 1e-3) -> Any:
        """The same, but many a call comes late."""

        def slow(*arguments: Any) -> Any:
            at_work.append(threading.get_ident())
            time.sleep(random.choice((0, 0, late)))
            return real(*arguments)

        return slow

    class Slow:
        def __init__(self, name: str) -> None:
            digest = new_digest(name)
            self.update, self.hexdigest = now_and_then(digest.update), digest.hexdigest

    monkeypatch.setattr(passing, "new_digest", Slow)
    for name, late in (("_read", 1e-3), ("_write", 4e-3)):
        monkeypatch.setattr(passing.Pass, name, now_and_then(getattr(passing.Pass, name), late))
    written, hashes, threads = [], [], []
    for cores in (1, 2):
        monkeypatch.setattr(passing, "_cores", lambda cores=cores: cores)
        folder = tmp_path / str(cores)
        folder.mkdir()
        at_work.clear()
        rewriter = Rewriter(edits)
        hashes += rewriter.write_shards(shards, folder).values()
        rewriter.finish()
        written.append((folder / "x.safetensors").read_bytes())
        threads.append(len(set(at_work)))
    assert threads == [1, 2]
    assert written[0] == written[1]
    data = (tmp_path / "x.safetensors").read_bytes()
    assert hashes == [hash_bytes("sha256", data)] * 2


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_every_bfloat16_weight_is_multiplied_in_float32_and_rounded_once(
    axis: int, shift: float
) -> None:
    """To the bit, subnormal and infinite ones too; a gain 1+w that bfloat16 cannot hold as well."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    picked = torch.randint(1 << 16, (64,))
    gain = shift + torch.where(picked % 2 == 0, every[picked], torch.randn(64).bfloat16()).float()
    gain = gain.nan_to_num(0.7)
    weight = every[:, None].expand(-1, 64) if axis else every.expand(64, -1)
    weight = weight.contiguous()
    entry = Entry("w", "BF16", tuple(weight.shape), 0, weight.numel() * 2)
    made, scratch = Product(entry, "BF16", Scale(gain, axis)), Scratch()
    data, found = to_bytes(weight), {}
    starts = torch.arange(0, len(data), 8 * made.row_bytes)
    for start in starts[torch.randperm(len(starts))].tolist():  # threads come in any order
        piece = bytearray(data[start : start + 8 * made.row_bytes])
        row = start // made.row_bytes
        found[start] = bytes(made.piece(memoryview(piece), row, scratch))
    joined = bytearray(b"".join(found[start] for start in sorted(found)))
    result = torch.frombuffer(joined, dtype=torch.bfloat16).view_as(weight)
    wanted = (weight.float() * (gain if axis else gain[:, None])).bfloat16()
    same = result.view(torch.int16) == wanted.view(torch.int16)
    assert bool((same | (result.isnan() & wanted.isnan())).all())


def test_the_number_of_threads_is_left_as_it_was(tmp_path: Path) -> None:
    """In this thread, and for those that start later."""
    source, before = saved(tmp_path / "src"), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        fn.fold_checkpoint(source, tmp_path / "dst", progress=False)
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_cast_leaves_other_dtypes_alone(tmp_path: Path) -> None:
    held = {"half": torch.randn(4, 4).bfloat16(), "wide": torch.randn(3), "ids": torch.arange(5)}
    save_file(held, tmp_path / "in.safetensors")
    rewriter = Rewriter({}, cast={"BF16": "F32"})
    shards = {"out.safetensors": read_shard(tmp_path / "in.safetensors")}
    rewriter.write_shards(shards, tmp_path)
    with safe_open(tmp_path / "out.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("half"), held["half"].float())
        assert torch.equal(opened.get_tensor("wide"), held["wide"])
        assert torch.equal(opened.get_tensor("ids"), held["ids"])


@pytest.mark.parametrize("name", ["a", "model.layers.0.größe", "x" * 300])
def test_headers_that_the_library_reads(tmp_path: Path, name: str) -> None:
    header, entries = make_header([(name, "F32", (2, 3)), ("scalar", "I64", ())], {"k": "v"})
    assert len(header) % 8 == 0 and [entry.size for entry in entries] == [24, 8]
    (tmp_path / "made.safetensors").write_bytes(header + bytes(range(32)))
    with safe_open(tmp_path / "made.safetensors", "pt") as opened:
        assert set(opened.keys()) == {name, "scalar"} and opened.metadata() == {"k": "v"}
        assert opened.get_tensor(name).shape == (2, 3)
    assert read_shard(tmp_path / "made.safetensors").entries == entries
