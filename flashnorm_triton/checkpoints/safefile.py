"""The safetensors container, read and written range by range.

``safetensors.torch.save_file`` wants all tensors of a file in memory at once. A fold has to keep
far less than that, and has to leave every byte that it does not change where it was, the header
included; so the eight bytes of length, the JSON header and the data ranges are handled here.
Files written this way are opened with the safetensors library in the tests.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MAX_HEADER = 100_000_000  # what the safetensors library accepts
_ALIGN = 8

FLOATS: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAME_OF = {dtype: name for name, dtype in FLOATS.items()}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64},
    **{"I64": 64, "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes are ``start`` to ``stop`` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """The header of one file; ``entries`` in the order of their data."""

    path: Path
    header: bytes
    metadata: Mapping[str, str] | None
    entries: tuple[Entry, ...]

    @property
    def data_start(self) -> int:
        """Where the first tensor's bytes begin in the file."""
        return len(self.header)

    @property
    def data_size(self) -> int:
        """Bytes of tensor data."""
        return self.entries[-1].stop if self.entries else 0


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes that a tensor of this safetensors dtype takes; raises KeyError for an unknown one."""
    return math.prod(shape) * _BITS[dtype] // 8


def read_shard(path: Path) -> Shard:
    """The header of the file at ``path``, checked against the file's size.

    Raises ValueError that names the file for one that is no safetensors file, is truncated or
    has bytes that belong to no tensor.
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= _MAX_HEADER:
            raise ValueError(f"{path.name} is not a safetensors file (header length {length})")
        if 8 + length > actual:
            raise ValueError(
                f"{path.name} is truncated: {actual} bytes, its header alone is {8 + length}"
            )
        text = file.read(length)
    try:
        parsed = json.loads(text)
        metadata = parsed.pop("__metadata__", None)
        entries = sorted(
            (
                Entry(name, one["dtype"], tuple(one["shape"]), *one["data_offsets"])
                for name, one in parsed.items()
            ),
            key=lambda entry: (entry.start, entry.stop),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a safetensors file (bad header: {error})") from error
    shard = Shard(path, prefix + text, metadata, tuple(entries))
    _check(shard, actual)
    return shard


def _check(shard: Shard, actual: int) -> None:
    place = 0
    for entry in shard.entries:
        if entry.dtype not in _BITS:
            raise ValueError(f"{shard.path.name}: {entry.name} has the unknown dtype {entry.dtype}")
        if entry.start != place or entry.size != tensor_bytes(entry.dtype, entry.shape):
            raise ValueError(
                f"{shard.path.name}: the byte range of {entry.name} does not fit its shape "
                f"{list(entry.shape)} and dtype {entry.dtype}"
            )
        place = entry.stop
    expected = shard.data_start + place
    if actual != expected:
        state = "truncated" if actual < expected else "too long"
        raise ValueError(
            f"{shard.path.name} is {state}: {actual} bytes, its header speaks of {expected}"
        )


def read_tensor(shard: Shard, entry: Entry) -> torch.Tensor:
    """One floating tensor, whole; for the small ones (gains and biases)."""
    with shard.path.open("rb") as file:
        file.seek(shard.data_start + entry.start)
        data = bytearray(file.read(entry.size))
    return torch.frombuffer(data, dtype=FLOATS[entry.dtype]).view(entry.shape)


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, tuple[Entry, ...]]:
    """A header for tensors (name, dtype, shape) whose data follow in this order, and its entries.

    Padded with spaces so that the data begin at a multiple of 8, as the format asks.
    """
    parsed: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    entries, place = [], 0
    for name, dtype, shape in tensors:
        stop = place + tensor_bytes(dtype, shape)
        parsed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}
        entries.append(Entry(name, dtype, shape, place, stop))
        place = stop
    text = json.dumps(parsed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text, tuple(entries)
