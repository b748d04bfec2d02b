"""The hash by which flashnorm.json names the source, byte for byte.

blake3 is as hard to forge as sha256 and takes a quarter to a third of its time, on a processor with
instructions for sha256 (docs/fold.md): with it a fold keeps up with a copy. ``sha256sum`` and the
hub's file list speak sha256, which is there for those who ask for it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol

try:
    import blake3
except ImportError:  # no wheel for this system: sha256 does it, slower
    blake3 = None  # type: ignore[assignment]

ALGORITHMS = ("blake3", "sha256")
_CHUNK = 1 << 20


class Digest(Protocol):
    """What both libraries return."""

    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


def choose(name: str | None) -> str:
    """The algorithm to use: ``name``, or (None) blake3 where its package is installed.

    Raises ValueError for an unknown one, or blake3 without its package.
    """
    if name is None:
        return "sha256" if blake3 is None else "blake3"
    if name not in ALGORITHMS:
        raise ValueError(f"digest {name!r} is unknown: use {' or '.join(ALGORITHMS)}")
    if name == "blake3" and blake3 is None:
        raise ValueError("digest 'blake3' needs its package (pip install blake3), or use sha256")
    return name


def new_digest(name: str) -> Digest:
    """An empty hash of the algorithm ``name``, as :func:`choose` returns it."""
    return blake3.blake3() if name == "blake3" else hashlib.sha256()


def hash_bytes(name: str, data: bytes) -> str:
    """The hash of ``data``, in hexadecimal."""
    digest = new_digest(name)
    digest.update(data)
    return digest.hexdigest()


def hash_file(name: str, path: str | os.PathLike[str]) -> str:
    """The hash of a file, read a piece at a time, in hexadecimal."""
    digest, buffer = new_digest(name), memoryview(bytearray(_CHUNK))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def hash_listing(name: str, files: dict[str, str]) -> str:
    """One hash for many files: over the lines that ``b3sum`` or ``sha256sum`` print of them."""
    listing = "".join(f"{digest}  {file}\n" for file, digest in sorted(files.items()))
    return hash_bytes(name, listing.encode())
