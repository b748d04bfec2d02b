"""The folder that is folded: its config, its shards, and the files that go along."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from flashnorm_triton.checkpoints.safefile import Entry, Shard, read_shard, read_tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
RECORD = "flashnorm.json"
CARD = "README.md"
SOURCE_CARD = "README.source.md"

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# The same weights again in another format: they would be the unfolded ones.
OTHER_WEIGHTS = (
    *PICKLED,
    *("*.msgpack", "*.h5", "*.gguf", "*.onnx", "*.onnx_data", "*.ot"),
    "consolidated*.safetensors",
    "*.index.json",
)


@dataclass(frozen=True)
class Source:
    """A checked checkpoint. ``shards`` by file name; ``weight_map`` names each tensor's file.

    ``others`` are the files to copy, ``left_out`` those that hold weights in other formats;
    both relative to ``path``. ``name`` is the hub id, or the folder's name.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    index: Mapping[str, Any] | None
    shards: Mapping[str, Shard]
    weight_map: Mapping[str, str]
    entries: Mapping[str, Entry]
    others: tuple[Path, ...]
    left_out: tuple[Path, ...]

    def read(self, tensor: str) -> Tensor:
        """One small floating tensor (a gain or a bias)."""
        return read_tensor(self.shards[self.weight_map[tensor]], self.entries[tensor])

    @property
    def revision(self) -> str | None:
        """The commit, of a snapshot in the hub's cache: on the hub it names every file."""
        return self.path.name if _cached_id(self.path) else None


def locate(source: str | Path) -> tuple[Path, str]:
    """The local folder of ``source`` (a folder, or a hub id that is downloaded) and its name.

    Raises FileNotFoundError for something that is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return folder, _cached_id(folder) or folder.name
    text = str(source)
    if folder.is_file():
        raise FileNotFoundError(f"{source} is a file: give the folder that holds config.json")
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {source}")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(text, ignore_patterns=[*OTHER_WEIGHTS[:-1], "original/*"])
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{source!r} is no folder here and could not be fetched from the hub ({first})"
        ) from error
    return Path(found), text


def _cached_id(folder: Path) -> str | None:
    """The hub id of a snapshot in the hub's cache (models--org--name/snapshots/commit)."""
    cache = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not cache.startswith("models--"):
        return None
    return cache.removeprefix("models--").replace("--", "/")


def open_source(path: Path, name: str) -> Source:
    """Read every header of the checkpoint in the folder ``path``; nothing is written.

    Raises FileNotFoundError or ValueError, saying which file is wrong and what to do about it.
    """
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(
            f"{path} has no {CONFIG}: give a folder written by save_pretrained, or a hub id"
        )
    _check_links(path)
    config = _json(path / CONFIG)
    index, files = _weight_files(path)
    shards = {file: read_shard(path / file) for file in files}
    weight_map: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for file, shard in shards.items():
        for entry in shard.entries:
            if entry.name in weight_map:
                raise ValueError(f"{entry.name} is stored twice: {weight_map[entry.name]}, {file}")
            weight_map[entry.name], entries[entry.name] = file, entry
    if index is not None:
        _compare(index["weight_map"], weight_map)
    others, left_out = [], []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not file.is_file() or str(relative) in (*files, INDEX, CONFIG, RECORD):
            continue
        is_weights = file.suffix == ".safetensors" or any(
            fnmatch(file.name, pattern) for pattern in OTHER_WEIGHTS
        )
        (left_out if is_weights else others).append(relative)
    return Source(
        path, name, config, index, shards, weight_map, entries, tuple(others), tuple(left_out)
    )


def _check_links(path: Path) -> None:
    """Every link leads to a file, as those of the hub's cache do."""
    for file in sorted(path.rglob("*")):
        if not file.is_symlink() or any(p.startswith(".") for p in file.relative_to(path).parts):
            continue
        if not file.exists():
            raise FileNotFoundError(
                f"{file.relative_to(path)} is a link to {os.readlink(file)}, which is not there: "
                "download the checkpoint again"
            )
        if file.is_dir():
            raise ValueError(
                f"{file.relative_to(path)} is a link to a folder, which is not followed: put the "
                "folder itself there, or remove the link"
            )


def _weight_files(path: Path) -> tuple[Mapping[str, Any] | None, list[str]]:
    present = {
        file.name
        for file in path.glob("*.safetensors")
        if not any(fnmatch(file.name, pattern) for pattern in OTHER_WEIGHTS)
    }
    if not (path / INDEX).is_file():
        if SINGLE not in present:
            _refuse_without_weights(path, present)
        listed, index = {SINGLE}, None
    else:
        index = _json(path / INDEX)
        if not isinstance(index.get("weight_map"), dict) or not index["weight_map"]:
            raise ValueError(f"{INDEX} has no weight_map")
        listed = set(index["weight_map"].values())
    missing, extra = sorted(listed - present), sorted(present - listed)
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(listed)} shards are missing in {path}, first {missing[0]}: "
            "download the checkpoint again"
        )
    if extra:
        raise ValueError(
            f"{path} holds weight files that its index does not list, first {extra[0]}: they may "
            "belong to another model; move them away"
        )
    return index, sorted(listed)


def _refuse_without_weights(path: Path, present: set[str]) -> None:
    if present:
        raise ValueError(
            f"{path} has neither {SINGLE} nor {INDEX}, but {sorted(present)[0]}: save the model "
            "again with save_pretrained"
        )
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if pickled:
        raise ValueError(
            f"the weights are pickled ({pickled[0]}), and loading a pickle runs code: only "
            "safetensors are folded. Load the model where you trust it and write it with "
            "save_pretrained"
        )
    raise FileNotFoundError(f"{path} holds no safetensors weights ({SINGLE} or {INDEX})")


def _compare(listed: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in sorted(listed.keys() | found.keys()):
        if listed.get(name) != found.get(name):
            raise ValueError(
                f"{INDEX} and the shards disagree on {name}: index {listed.get(name)}, "
                f"file {found.get(name)}; download the checkpoint again"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return parsed
