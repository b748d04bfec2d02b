"""fold_checkpoint: check everything, then write a folded copy of a saved model in one pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton import __version__
from flashnorm_triton.checkpoints.card import make_card
from flashnorm_triton.checkpoints.guard import check_destination, check_foldable, check_space
from flashnorm_triton.checkpoints.hashing import choose, hash_bytes, hash_listing
from flashnorm_triton.checkpoints.passing import copy_hashed
from flashnorm_triton.checkpoints.plan import Plan, divided_bias, gain_of, make_plan
from flashnorm_triton.checkpoints.product import Scale
from flashnorm_triton.checkpoints.safefile import FLOATS, NAME_OF
from flashnorm_triton.checkpoints.source import (
    CARD,
    CONFIG,
    INDEX,
    RECORD,
    SOURCE_CARD,
    Source,
    locate,
    open_source,
)
from flashnorm_triton.checkpoints.stream import (
    Added,
    Drop,
    Edit,
    Replace,
    Rewriter,
)
from flashnorm_triton.checkpoints.workplace import clear_leftovers, workplace

_MARGIN = 1 << 20  # config, index, record and card, amply


@dataclass(frozen=True)
class FoldResult:
    """What was written: the folder, and the content of its flashnorm.json.

    ``cleared`` are temporary folders that killed folds to the same place had left; they are gone.
    """

    path: Path
    record: dict[str, Any]
    cleared: tuple[Path, ...] = ()

    def summary(self) -> str:
        """One line: how many norms were folded into how many weights, how many kept."""
        folds = self.record["folds"]
        weights = sum(len(fold["into"]) for fold in folds)
        return (
            f"{self.path}: {len(folds)} norms folded into {weights} weights, "
            f"{len(self.record['kept'])} norms left alone ({self.record['mode']})"
        )


def fold_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    strict: bool = False,
    dtype: torch.dtype | str | None = None,
    untie: bool = False,
    head: bool = True,
    max_crest: float | None = None,
    flags: bool = True,
    digest: str | None = None,
    progress: bool = True,
) -> FoldResult:
    """Write a copy of a saved model whose norm gains are multiplied into the weights that follow.

    ``W* = W·diag(g)`` (FlashNorm, arXiv 2407.09577, proposition 1), the product in float32 with
    one rounding; which norms fold into which weights is what :func:`flashnorm_triton.audit` says.
    A LayerNorm's bias β moves into the biases that follow, ``c* = c + Wβ``; where one of them
    is not stored it stays, divided by the gain.

    Args:
        src: a folder written by ``save_pretrained`` (safetensors, sharded or not), or a hub id.
        dst: the folder to write; absent, or empty. It appears whole, at the end, or not at all.
        strict: leave the folded norms' tensors out; such a folder is loaded by
            ``AutoFlashNormForCausalLM``. False keeps them as identities (ones, or zeros where the
            class adds one), and the files' layout with them: names, shapes, dtypes, shards.
        dtype: convert the weights to this dtype (a torch dtype, or its name); None keeps theirs.
        untie: give a head that is tied to the embedding a tensor of its own, to fold into.
        head: fold the final norm into the head, where that is not tied. The hidden states that the
            model returns are then without that norm's gain; logits are the same.
        max_crest: leave norms alone whose gain has a larger crest factor (max|g| / rms(g)): what
            is quantized afterwards then errs at most that many times more than the source would.
        flags: mark config.json (``flashnorm_folded``, ``flash_norm``) and the card's tags, where
            the marks are true: engines that read them drop the norms' tensors.
        digest: what the record names the source's files by: ``"blake3"`` or ``"sha256"`` (which the
            hub lists, at several times the cost); None: blake3, sha256 where it is not installed.
        progress: show a bar with bytes and remaining time.

    Returns:
        A FoldResult; its ``record`` is also in ``dst`` as flashnorm.json.

    Raises ValueError, FileNotFoundError, FileExistsError or OSError (too little disk), naming what
    is wrong and what to do, before anything is written; whatever happens later, an interrupt
    included, ``dst`` stays absent and ``src`` is only ever read.
    """
    folder, name = locate(src)
    destination = Path(dst).expanduser()
    check_destination(folder, destination)
    if max_crest is not None and not max_crest >= 1:
        raise ValueError(
            f"max_crest={max_crest}: a crest factor is at least 1; usual are 1.25 to 2"
        )
    wanted, digest = _dtype_name(dtype), choose(digest)
    source = open_source(folder, name)
    check_foldable(source)
    plan = make_plan(source, untie=untie, head=head, max_crest=max_crest)
    cast = _casts(source, wanted)
    total = sum(s.data_start + s.data_size for s in source.shards.values())
    total += sum((folder / file).stat().st_size for file in source.others)
    with _bar(total, progress) as advance:
        rewriter = Rewriter(
            _edits(source, plan, strict), _added(source, plan), cast, advance, digest
        )
        cleared = clear_leftovers(destination)
        parent = destination.resolve().parent
        existing = next(one for one in (parent, *parent.parents) if one.exists())
        check_space(existing, _needed(source, rewriter) + _MARGIN)
        with workplace(destination) as work:
            hashes = rewriter.write_shards(source.shards, work)
            rewriter.finish()
            hashes |= _copy_others(source, work, advance, digest)
            hashes[CONFIG] = hash_bytes(digest, (folder / CONFIG).read_bytes())
            record = _record(source, plan, digest, hashes, strict, wanted, cast)
            record["marks"] = list(plan.marks) if flags else []
            _write_texts(source, rewriter, plan, work, record, wanted)
    return FoldResult(destination, record, cleared)


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in NAME_OF:
        names = ", ".join(str(one).removeprefix("torch.") for one in NAME_OF)
        raise ValueError(f"dtype {dtype!r} is none that a checkpoint is folded to: use {names}")
    return NAME_OF[found]


def _casts(source: Source, wanted: str | None) -> dict[str, str]:
    """The dtype that most bytes have is converted; what is stored wider for a reason stays."""
    if wanted is None:
        return {}
    sizes: dict[str, int] = {}
    for entry in source.entries.values():
        if entry.dtype in FLOATS:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size
    main = max(sizes, key=lambda name: sizes[name])
    return {main: wanted} if main != wanted else {}


def _edits(source: Source, plan: Plan, strict: bool) -> dict[str, Edit]:
    edits: dict[str, Edit] = {}
    for fold in plan.folds:
        gain = gain_of(source, fold)
        beta = source.read(fold.norm_bias) if fold.bias == "moved" and fold.norm_bias else None
        for target in fold.targets:
            if target.tensor in source.entries:
                edits[target.tensor] = Scale(gain, target.axis, beta, target.bias)
        identity = torch.zeros if fold.convention == "1+w" else torch.ones
        edits[fold.gain] = Drop() if strict else Replace(identity(gain.shape))
        if fold.norm_bias is None:
            continue
        if fold.bias == "divided":
            edits[fold.norm_bias] = Replace(divided_bias(source.read(fold.norm_bias), gain))
        else:
            edits[fold.norm_bias] = Drop() if strict else Replace(torch.zeros(gain.shape))
    return edits


def _added(source: Source, plan: Plan) -> tuple[Added, ...]:
    if plan.untied is None:
        return ()
    name, embedding = plan.untied
    scale = None
    for fold in plan.folds:
        for target in fold.targets:
            if target.tensor == name:
                scale = Scale(gain_of(source, fold), target.axis)
    return (Added(name, embedding, scale),)


def _needed(source: Source, rewriter: Rewriter) -> int:
    """Bytes that the new folder takes."""
    layouts = [rewriter.layout(shard) for shard in source.shards.values()]
    weights = sum(len(header) + (e[-1].stop if e else 0) for header, e in layouts)
    return weights + sum((source.path / file).stat().st_size for file in source.others)


def _copy_others(
    source: Source, work: Path, advance: Callable[[int], object], digest: str
) -> dict[str, str]:
    hashes = {}
    for file in source.others:
        target = work / (SOURCE_CARD if str(file) == CARD else file)
        target.parent.mkdir(parents=True, exist_ok=True)
        hashes[file.as_posix()] = copy_hashed(source.path / file, target, advance, digest)
    return hashes


def _record(
    source: Source,
    plan: Plan,
    digest: str,
    hashes: dict[str, str],
    strict: bool,
    wanted: str | None,
    cast: dict[str, str],
) -> dict[str, Any]:
    files = dict(sorted(hashes.items()))
    widest = {"F64"} & {source.entries[fold.gain].dtype for fold in plan.folds}
    return {
        "schema": 2,
        "flashnorm_triton": __version__,
        "mode": "strict" if strict else "compat",
        "arithmetic": "float64" if widest else "float32",
        "source": {
            "name": source.name,
            "revision": source.revision,
            "digest": digest,
            "hash": hash_listing(digest, files),
            "files": files,
        },
        "dtype": str(FLOATS[wanted]).removeprefix("torch.") if wanted else None,
        "converted": cast,
        "untied": plan.untied[0] if plan.untied else None,
        "head": plan.head,
        "folds": [
            {
                "norm": fold.norm,
                "kind": fold.kind,
                "convention": fold.convention,
                "gain": fold.gain,
                "norm_bias": fold.norm_bias,
                "bias": fold.bias,
                "crest": round(fold.crest, 4),
                "into": [
                    {"tensor": t.tensor, "axis": t.axis, "bias": t.bias} for t in fold.targets
                ],
            }
            for fold in plan.folds
        ],
        "kept": [{"norm": norm, "reason": reason} for norm, reason in plan.kept],
        "removed": sorted(name for name, e in _edits(source, plan, strict).items() if e == Drop()),
        "left_out": [file.as_posix() for file in source.left_out],
    }


def _write_texts(
    source: Source,
    rewriter: Rewriter,
    plan: Plan,
    work: Path,
    record: dict[str, Any],
    wanted: str | None,
) -> None:
    config = dict(source.config)
    if plan.untied is not None:
        _set(config, "tie_word_embeddings", False, always=True)
    if record["converted"] and wanted:
        for key in ("dtype", "torch_dtype"):
            _set(config, key, str(FLOATS[wanted]).removeprefix("torch."))
    config |= dict.fromkeys(record["marks"], True)
    if config == source.config:
        shutil.copyfile(source.path / CONFIG, work / CONFIG)
    else:
        _dump(work / CONFIG, config)
    if source.index is not None:
        weight_map = {
            entry.name: name
            for name, shard in source.shards.items()
            for entry in rewriter.layout(shard)[1]
        }
        if weight_map == source.index["weight_map"] and not record["converted"]:
            shutil.copyfile(source.path / INDEX, work / INDEX)
        else:
            size = sum(e[-1].stop for s in source.shards.values() if (e := rewriter.layout(s)[1]))
            metadata = {**(source.index.get("metadata") or {}), "total_size": size}
            _dump(work / INDEX, {**source.index, "metadata": metadata, "weight_map": weight_map})
    _dump(work / RECORD, record)
    (work / CARD).write_text(make_card(source.path, record), encoding="utf-8")


def _set(config: dict[str, Any], key: str, value: Any, always: bool = False) -> None:
    """Set a key where it stands, in the config and in the configs nested in it."""
    for inner, nested in list(config.items()):
        if isinstance(nested, dict) and key in nested:
            config[inner] = {**nested, key: value}
    if always or key in config:
        config[key] = value


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[int], object]]:
    """A bar on stderr; yields what is to be told of the bytes done."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fold", total=total)
        yield lambda count: bar.advance(task, count)
