"""What this machine can run: whether Triton works here, and the facts of each GPU.

Importable everywhere; nothing here imports Triton or touches a GPU before it is asked.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

from flashnorm_triton.plans import MIN_CAPABILITY, Device

GLUON_RELEASES = ((3, 6), (3, 7))


@functools.cache
def triton_unavailable() -> str | None:
    """Why Triton kernels can run on no GPU of this machine, with the remedy; None if they can.

    In a machine of several GPUs an older one is told apart by its plans (``plans.choose``).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    if torch.version.hip is None:
        major, minor = max(
            torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
        )
        if 10 * major + minor < MIN_CAPABILITY:
            return f"compute capability {major}.{minor} is below 8.0"
    compiler = os.environ.get("CC")
    if not any(shutil.which(c) for c in ([compiler] if compiler else ["gcc", "clang", "cc"])):
        return "Triton needs a C compiler (apt install gcc, or set CC)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"Triton needs Python's C headers (apt install python3-dev): no {header}"
    return None


def too_old(index: int) -> str | None:
    """Why CUDA device ``index``, one among newer ones, has no kernels; None if it has."""
    facts = device_facts(index)
    if facts.backend != "cuda" or facts.capability >= MIN_CAPABILITY:
        return None
    major, minor = divmod(facts.capability, 10)
    return f"compute capability {major}.{minor} of GPU {index} is below 8.0"


def triton_available() -> bool:
    """Whether Triton kernels can be built and run on this machine's GPU."""
    return triton_unavailable() is None


@functools.cache
def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter (TRITON_INTERPRET=1 at import)."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def device_facts(index: int) -> Device:
    """The facts of CUDA device ``index`` that a choice of plan rests on."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Device("hip", 0, properties.multi_processor_count)
    capability = 10 * properties.major + properties.minor
    gluon = capability == 90 and gluon_supported()
    return Device("cuda", capability, properties.multi_processor_count, gluon)


@functools.cache
def gluon_supported() -> bool:
    """Whether this Triton's Gluon is one that the kernels are written and tested for.

    Gluon is experimental and its names move: other releases get the plain Triton kernels.
    """
    return triton_release() in GLUON_RELEASES


@functools.cache
def triton_release() -> tuple[int, ...]:
    """The first two numbers of the installed Triton's version; empty without one."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:2])
