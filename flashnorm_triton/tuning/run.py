"""``tune``: a tuning run on this machine's GPU, from a model or from shapes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flashnorm_triton import tables
from flashnorm_triton.tuning import sites
from flashnorm_triton.tuning.build import Pool
from flashnorm_triton.tuning.progress import Progress
from flashnorm_triton.tuning.rig import Rig
from flashnorm_triton.tuning.tuner import EFFORTS, Report, Tuner

_ANY_DATE = "~"  # later than every date


def tune(
    model_or_shapes: Any,
    *,
    dtype: str | Sequence[str] = "bfloat16",
    tokens: Sequence[int] = sites.TOKENS,
    effort: str = "quick",
    gain: bool = False,
    force: bool | str = False,
    path: Path | str | None = None,
    jobs: int | None = None,
    epilogue: str | Sequence[str] = "plain",
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Tune norm_linear for a model's sites, or for given shapes, on the current GPU.

    Cells that the table already has, made with these versions and kernel sources, are not tuned
    again; every finished cell is kept whatever ends the run.

    Args:
        model_or_shapes: a torch module (any device, meta included), a config.json, a folder or a
            hub id, or (K, N) pairs.
        dtype: "bfloat16", "float16" or "float32" (or bf16, fp16, fp32), or several.
        tokens: row counts M; each stands for its bucket, the next power of two up to 8192.
        effort: "quick"; "full": more candidates, longer; "refresh": of cells that the table has
            from other kernel sources or versions, their plan beside few others.
        gain: tune for gains applied in the kernel (``patch(model, fold=False)``).
        force: tune again what the table has; a UTC date such as "2026-01-31T12:00:00Z": tune again
            what is older.
        path: the table's file; left out, the user's table of this GPU, which lookups ask first.
        jobs: compiling processes; left out, the CPU cores but two.
        epilogue: what follows the linear: "plain", or "silu+gated", "centred" (LayerNorm), … as
            ``Problem.epilogue`` spells them, or several. A model's LayerNorm sites are centred
            whatever is said here.
        seconds: begin no further cell after so long; the same call goes on from there.
        progress: how to show the run (tuning/progress.py); left out, nothing is shown.

    Returns the report, also of a run that an interrupt (``report.interrupted``) or a lost GPU
    (``report.lost``) ended early. Later calls of this process use the new plans. Raises NoGpuError
    without a GPU, ValueError for what cannot be tuned, TableError when the table cannot be written
    or another process is tuning this GPU: all before anything is measured.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort {effort!r} is unknown: use one of {', '.join(EFFORTS)}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}: it must be more than 0")
    names = sites.parse_dtypes(dtype if isinstance(dtype, str) else ",".join(dtype))
    rows = sites.parse_tokens(",".join(str(m) for m in tokens))
    epilogues = sites.parse_epilogues(epilogue if isinstance(epilogue, str) else ",".join(epilogue))
    rig = Rig()
    try:
        problems = sites.problems(_sites(model_or_shapes), names, rows, gain, epilogues)
        place = Path(path) if path is not None else tables.user_path(rig.gpu)
        with only_tuner(place, rig.uuid):
            compiler = Pool(jobs or max(1, len(os.sched_getaffinity(0)) - 2))
            since = force if isinstance(force, str) else _ANY_DATE if force else ""
            tuner = Tuner(rig, compiler, place, effort, progress, since, seconds)
            report = tuner.tune(problems)
    finally:
        rig.close()
    _use_new_plans()
    return report


def _sites(model_or_shapes: Any) -> tuple[sites.Site, ...]:
    if isinstance(model_or_shapes, (str, Path)):
        return sites.sites_of(sites.skeleton(str(model_or_shapes)))
    if isinstance(model_or_shapes, torch.nn.Module):
        return sites.sites_of(model_or_shapes)
    return sites.parse_shapes(",".join(":".join(map(str, pair)) for pair in model_or_shapes))


def _use_new_plans() -> None:
    from flashnorm_triton import ops

    tables.forget()
    ops.forget_plans()


@contextlib.contextmanager
def only_tuner(path: Path, device: str) -> Iterator[None]:
    """Hold the right to tune one device: two runs on one GPU would time each other.

    Raises TableError when another process holds it, or when its file cannot be made.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f"{path.name}.{device}.tuning"), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise tables.TableError(
            f"another process is tuning this GPU into {path}: wait for it, or end it"
        ) from None
    except OSError as error:
        raise tables.TableError(
            f"cannot write {path} ({error.strerror or error}): point FLASHNORM_CACHE_DIR to a "
            "folder that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()
