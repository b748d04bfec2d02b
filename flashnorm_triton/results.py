"""The benchmark result file: one header of where and with what, then records.

A file is ``bench/results/<gpu_slug>/<name>.json``. Its records are all of one kind: timed
operations (``norm_linear``: keys ``OPERATION_FIELDS``), whole models (``generate``, ``decode``,
``prefill``: keys ``MODEL_FIELDS``), host time a call (``host``: keys ``HOST_FIELDS``), plan
families launched over and over (``soak``: keys ``SOAK_FIELDS``), models patched and reverted
(``patching``: keys ``PATCHING_FIELDS``), planted faults and what was seen of them (``faults``:
keys ``FAULT_FIELDS``), generations compared step by step (``lag``: keys ``LAG_FIELDS``), rungs of
the ladder (``ablation``: keys ``RUNG_FIELDS``), decode steps by what they launch (``profile``: keys
``PROFILE_FIELDS``) or cells of the paper's tables (``paper``: keys ``PAPER_FIELDS``). A record that
could not be measured says so in ``error`` and needs only its identity. Unknown extra keys are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton import atomic

SCHEMA = 1
PACKAGE = Path(__file__).resolve().parent
# Where the package's own measurements lie: in an installed package, and in its repository.
SHIPPED = (PACKAGE / "shipped_results", PACKAGE.parent / "bench" / "results")
KERNEL_SOURCES = ("kernels", "ops.py")

HEADER_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "gpu": (str,),
    "torch": (str,),
    "triton": (str,),
    "transformers": (str,),
    "driver": (str,),
    "kernel_hash": (str,),
    "date": (str,),
    "copy_tb_s": (int, float),
    "matmul_tflops": (int, float),
}
_NUMBER = (int, float)
_OPERATION_IDENTITY: dict[str, tuple[type, ...]] = {
    "case": (str,),
    "op": (str,),
    "dtype": (str,),
    "m": (int,),
    "n": (int,),
    "k": (int,),
}
OPERATION_FIELDS: dict[str, tuple[type, ...]] = {
    **_OPERATION_IDENTITY,
    "plan": (dict, type(None)),
    "us": _NUMBER,
    "us_q20": _NUMBER,
    "us_q80": _NUMBER,
    "baselines_us": (dict,),
    "floor_us": _NUMBER,
    "rel_err": (*_NUMBER, type(None)),
    "rel_err_stock": (*_NUMBER, type(None)),
}
_MODEL_IDENTITY: dict[str, tuple[type, ...]] = {"model": (str,), "mode": (str,), "variant": (str,)}
MODEL_FIELDS: dict[str, tuple[type, ...]] = {
    **_MODEL_IDENTITY,
    "ms": _NUMBER,
    "tokens_per_s": _NUMBER,
    "launches": (int, type(None)),
    "fraction_of_bandwidth": (*_NUMBER, type(None)),
}
_HOST_IDENTITY: dict[str, tuple[type, ...]] = {
    "call": (str,), "dtype": (str,), "m": (int,), "n": (int,), "k": (int,),
}  # fmt: skip
HOST_FIELDS: dict[str, tuple[type, ...]] = {
    **_HOST_IDENTITY,
    "plan": (dict,),
    "host_us": (dict,),
}
_SOAK_IDENTITY: dict[str, tuple[type, ...]] = {"family": (str,)}
SOAK_FIELDS: dict[str, tuple[type, ...]] = {
    **_SOAK_IDENTITY,
    "launches": (int,),
    "mismatches": (int,),
    "members": (list,),
}
_PATCHING_IDENTITY: dict[str, tuple[type, ...]] = {"patching": (str,), "variant": (str,)}
PATCHING_FIELDS: dict[str, tuple[type, ...]] = {
    **_PATCHING_IDENTITY,
    "dtype": (str,),
    "sites": (int,),
    "patch_s": _NUMBER,
    "weights_gb": _NUMBER,
    "largest_site_gb": _NUMBER,
    "peak_gb": (*_NUMBER, type(None)),
    "rel_err": _NUMBER,
    "rel_err_stock": _NUMBER,
    "revert_s": (*_NUMBER, type(None)),
    "bit_equal": (bool, type(None)),
    "missed": (list,),
}
_FAULT_IDENTITY: dict[str, tuple[type, ...]] = {"fault": (str,), "instrument": (str,)}
FAULT_FIELDS: dict[str, tuple[type, ...]] = {
    **_FAULT_IDENTITY,
    "caught": (bool, type(None)),
    "launches": (int, type(None)),
    "seconds": (*_NUMBER, type(None)),
    "detail": (str,),
}
_LAG_IDENTITY: dict[str, tuple[type, ...]] = {"lag": (str,), "mode": (str,), "watched": (str,)}
LAG_FIELDS: dict[str, tuple[type, ...]] = {
    **_LAG_IDENTITY,
    "tokens": (int,),
    "rows": (int,),
    "clean": (bool,),
    "found": (str, type(None)),
    "lagged_steps": (int,),
    "departed_steps": (int,),
    "decidable": _NUMBER,
    "false_alarms": _NUMBER,
    "worst": (*_NUMBER, type(None)),
    "kl": (*_NUMBER, type(None)),
    "kl_stock": _NUMBER,
    "seconds": _NUMBER,
}
_RUNG_IDENTITY: dict[str, tuple[type, ...]] = {
    "rung": (str,), "level": (str,), "model": (str,), "dtype": (str,),
}  # fmt: skip
RUNG_FIELDS: dict[str, tuple[type, ...]] = {
    **_RUNG_IDENTITY,
    "launches": (int, type(None)),
    "speedup": (*_NUMBER, type(None)),
}
_PROFILE_IDENTITY: dict[str, tuple[type, ...]] = {
    **_MODEL_IDENTITY, "quantization": (str,), "batch": (int,), "tokens": (int,), "dtype": (str,),
}  # fmt: skip
PROFILE_FIELDS: dict[str, tuple[type, ...]] = {
    **_PROFILE_IDENTITY,
    "ms": _NUMBER,
    "launches": (int,),
    "norms": (int,),
    "norms_launched": (int, type(None)),
    "norm_launches": (int,),
    "norm_ms": _NUMBER,
    "norm_share": (*_NUMBER, type(None)),
    "groups": (list,),
}
_PAPER_IDENTITY: dict[str, tuple[type, ...]] = {
    "table": (str,), "gpu_paper": (str,), "case": (str,), "m": (int,), "k": (int,), "n": (int,),
    "paper_us": (dict,), "paper_reduction": _NUMBER, "paper_won": (bool,),
}  # fmt: skip
PAPER_FIELDS: dict[str, tuple[type, ...]] = {
    **_PAPER_IDENTITY,
    "us": _NUMBER,
    "baselines_us": (dict,),
    "reduction": (*_NUMBER, type(None)),
    "won": (bool, type(None)),
}
# The key by which a record is told, what a failed one needs, and what a measured one needs.
_KINDS: tuple[tuple[str, dict[str, tuple[type, ...]], dict[str, tuple[type, ...]]], ...] = (
    ("rung", _RUNG_IDENTITY, RUNG_FIELDS),
    ("table", _PAPER_IDENTITY, PAPER_FIELDS),
    ("quantization", _PROFILE_IDENTITY, PROFILE_FIELDS),
    ("op", _OPERATION_IDENTITY, OPERATION_FIELDS),
    ("call", _HOST_IDENTITY, HOST_FIELDS),
    ("family", _SOAK_IDENTITY, SOAK_FIELDS),
    ("patching", _PATCHING_IDENTITY, PATCHING_FIELDS),
    ("fault", _FAULT_IDENTITY, FAULT_FIELDS),
    ("lag", _LAG_IDENTITY, LAG_FIELDS),
    ("model", _MODEL_IDENTITY, MODEL_FIELDS),
)
_TIMES_BY_NAME = ("baselines_us", "host_us", "paper_us")


class ResultsError(ValueError):
    """A result file, or what was to be written to one, does not have the documented form."""


@dataclass(frozen=True)
class Results:
    """A validated result file: its header (without ``records``) and its records."""

    header: dict[str, Any]
    records: tuple[dict[str, Any], ...]


def shipped_folder() -> Path | None:
    """The folder of the measurements that come with the package, with a folder a GPU in it."""
    return next((folder for folder in SHIPPED if folder.is_dir()), None)


def shipped_results(gpu: str = "nvidia_h200") -> tuple[Path, ...]:
    """The result files of a GPU (its ``gpu_slug``) that come with the package, sorted by name;
    empty where it has none of that GPU."""
    folder = shipped_folder()
    return tuple(sorted((folder / gpu).glob("*.json"))) if folder is not None else ()


def gpu_slug(name: str) -> str:
    """Folder name of a GPU: ``NVIDIA H200`` → ``nvidia_h200``."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ResultsError(f"no folder name can be made of the GPU name {name!r}")
    return slug


def _blob(content: bytes) -> str:
    """Git's name of a blob: SHA-1 of its header and content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def kernel_hash(package: Path = PACKAGE) -> str:
    """Identity of the kernel sources, computed from the files alone.

    Once they are committed it equals
    ``git ls-files -s flashnorm_triton/kernels flashnorm_triton/ops.py | git hash-object --stdin``
    run at the repository root. Byte code is left out, as git leaves it out.
    """
    files: list[Path] = []
    for source in KERNEL_SOURCES:
        path = package / source
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    listed = sorted(
        (f"{package.name}/{path.relative_to(package).as_posix()}".encode(), path)
        for path in files
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    )
    if not listed:
        raise ResultsError(f"no kernel sources under {package}: is the package complete?")
    lines = [b"100644 %s 0\t%s\n" % (_blob(p.read_bytes()).encode(), name) for name, p in listed]
    return _blob(b"".join(lines))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _driver() -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = answer.stdout.split()
    return lines[0] if lines else "unknown"


def header(*, copy_tb_s: float, matmul_tflops: float, gpu: str | None = None) -> dict[str, Any]:
    """Header for this machine, now (UTC): ``copy_tb_s`` in TB/s, read plus written bytes.

    ``gpu`` overrides the device's own name, for runs that are no benchmark of a GPU.
    """
    on_gpu = torch.cuda.is_available()
    if gpu is None:
        if not on_gpu:
            raise ResultsError("no GPU to name in the header: pass gpu=... for a run without one")
        gpu = torch.cuda.get_device_name()
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "driver": _driver() if on_gpu else "none",
        "kernel_hash": kernel_hash(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "copy_tb_s": copy_tb_s,
        "matmul_tflops": matmul_tflops,
        "python": platform.python_version(),
    }


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(item) for item in value)
    return True


def _check(what: str, got: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> None:
    for name, types in fields.items():
        if name not in got:
            raise ResultsError(f"{what} has no {name!r}: it needs {', '.join(fields)}")
        value = got[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise ResultsError(f"{what} has {name} = {value!r}: it must be {wanted}")
    if not _finite(got):
        raise ResultsError(f"{what} holds a NaN or infinity: write null and say why in 'error'")


def validate(head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ResultsError`` naming the first field that does not have the documented form."""
    _check("the header", head, HEADER_FIELDS)
    if head["schema"] != SCHEMA:
        raise ResultsError(
            f"schema {head['schema']} is not the schema {SCHEMA} that this version reads: "
            "use the version that wrote the file, or run the benchmark again"
        )
    for index, record in enumerate(records):
        what = f"record {index}"
        if not isinstance(record, Mapping):
            raise ResultsError(f"{what} is {record!r}: it must be an object")
        identity, fields = next(
            ((needs, all_) for key, needs, all_ in _KINDS if key in record),
            (_MODEL_IDENTITY, MODEL_FIELDS),
        )
        if record.get("error"):
            _check(what, record, identity)
            continue
        _check(what, record, fields)
        for name in _TIMES_BY_NAME:
            if name in fields:
                for called, us in record[name].items():
                    _check(f"{what}, {name}", {called: us}, {called: _NUMBER})


def save(path: Path | str, head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Validate and write atomically: a reader sees the old file or the new one, never a part."""
    validate(head, records)
    text = json.dumps({**head, "records": list(records)}, indent=1, allow_nan=False) + "\n"
    atomic.write_text(Path(path), text)


def load(path: Path | str) -> Results:
    """Read and validate a result file; ``ResultsError`` says what is wrong with it and where."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"cannot read the results {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not a result file: not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("records"), list):
        raise ResultsError(f"{path} is not a result file: no list 'records' at its top level")
    records = data.pop("records")
    try:
        validate(data, records)
    except ResultsError as error:
        raise ResultsError(f"{path}: {error}") from None
    return Results(header=data, records=tuple(records))
