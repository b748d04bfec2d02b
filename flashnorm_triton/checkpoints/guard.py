"""Everything that is refused before a byte is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashnorm_triton.checkpoints.flags import is_folded
from flashnorm_triton.checkpoints.source import RECORD, Source

# What quantizers store beside, or in place of, a plain weight.
_QUANTIZED = (
    *(".qweight", ".qzeros", ".scales", ".weight_scale", ".weight_scale_inv", ".absmax"),
    *(".quant_map", ".weight_packed", "_blocks", "_scales", ".SCB", ":qdata", ".weight_zero_point"),
)


def check_destination(source: Path, destination: Path) -> None:
    """Raises ValueError or FileExistsError unless ``destination`` is absent or an empty folder."""
    if destination.is_symlink():
        raise FileExistsError(f"{destination} is a link: give the folder itself")
    target, origin = destination.resolve(), source.resolve()
    if target == origin:
        raise ValueError(f"{destination} is the source itself: a fold is written to a new folder")
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise ValueError(f"{destination} and the source {source} lie inside each other")
    if destination.is_dir():
        if destination.is_mount():
            raise FileExistsError(
                f"{destination} is a mount point, and the result is renamed into its place at the "
                f"end: give a folder in it, {destination / source.name}"
            )
        if any(destination.iterdir()):
            raise FileExistsError(f"{destination} is not empty: give a new folder")
    elif destination.exists():
        raise FileExistsError(f"{destination} is a file: give a new folder")


def check_foldable(source: Source) -> None:
    """Raises ValueError for a checkpoint that is folded or quantized already."""
    if is_folded(source.config) or (source.path / RECORD).exists():
        raise ValueError(
            f"{source.name} is already folded (config.json or {RECORD} says so): fold the model "
            "that it was made from"
        )
    method = _quantization(source.config)
    strange = [name for name in source.weight_map if name.endswith(_QUANTIZED)]
    if method or strange:
        raise ValueError(
            f"{source.name} is already quantized ({method or strange[0]}), and a gain cannot be "
            "folded into quantized weights. The order is: fold first, then quantize. Give the "
            "unquantized checkpoint, and quantize what this writes"
        )


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError when the disk of ``folder`` has less than ``needed`` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"too little disk in {folder}: the folded checkpoint takes {size_text(needed)}, "
            f"{size_text(free)} are free, {size_text(needed - free)} are missing"
        )


def size_text(count: int) -> str:
    """Bytes for people: 1.2 GB."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def _quantization(config: Mapping[str, Any]) -> str:
    nested = [value for value in config.values() if isinstance(value, dict)]
    for one in (config, *nested):
        for key in ("quantization_config", "compression_config"):
            if one.get(key):
                return str(one[key].get("quant_method", key))
    return ""
