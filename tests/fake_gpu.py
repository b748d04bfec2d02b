"""A GPU made of Triton's interpreter: CPU tensors count as lying on it, kernels run, and may fail.

Plans are chosen, prepared and launched by the package's own code; ``break_kernels`` makes launches
fail as a compiler, a driver or a folder does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashnorm_triton import fallback, launch, ops, runtime
from flashnorm_triton.plans import Device

AMPERE = Device("cuda", 80, 108)
HOPPER = Device("cuda", 90, 132, gluon=True)


@contextmanager
def gpu(device: Device = AMPERE) -> Iterator[pytest.MonkeyPatch]:
    """Within the block every CPU tensor counts as lying on a GPU that is ``device``."""
    patch = pytest.MonkeyPatch()
    patch.setattr(fallback, "has_kernels", lambda x: not x.is_meta)
    patch.setattr(runtime, "triton_unavailable", lambda: None)
    patch.setattr(runtime, "device_facts", lambda index: device)
    patch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU that is none")
    ops.forget_plans()
    try:
        yield patch
    finally:
        patch.undo()
        ops.forget_plans()


def launched(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from now on, in order."""
    names: list[str] = []
    run = launch.Kernel.__call__

    def noted(kernel: launch.Kernel, *arguments: Any) -> None:
        run(kernel, *arguments)
        names.append(kernel.fn.__name__)

    patch.setattr(launch.Kernel, "__call__", noted)
    return names


def break_kernels(
    patch: pytest.MonkeyPatch, error: Callable[[], Exception], only: str = ""
) -> list[str]:
    """From now on launching a kernel with ``only`` in its name raises; the names that did."""
    failed: list[str] = []
    run = launch.Kernel.__call__

    def failing(kernel: launch.Kernel, *arguments: Any) -> None:
        if only in kernel.fn.__name__:
            failed.append(kernel.fn.__name__)
            raise error()
        run(kernel, *arguments)

    patch.setattr(launch.Kernel, "__call__", failing)
    return failed


def _too_large() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(294_912, 101_376, "shared memory")


# What a machine can refuse a launch with, as Triton raises it, and what the warning must say.
FAULTS: dict[str, tuple[Callable[[], Exception], str]] = {
    "compiler": (lambda: RuntimeError("PassManager::run failed"), "PassManager::run failed"),
    "launch": (lambda: RuntimeError("Triton Error [CUDA]: invalid argument"), "invalid argument"),
    "shared memory": (_too_large, "294912.*101376"),
    "read-only cache": (
        lambda: PermissionError(13, "Permission denied", "/root/.triton/cache/4QX"),
        "Permission denied.*TRITON_CACHE_DIR",
    ),
    "damaged cache": (lambda: json.JSONDecodeError("Expecting value", "", 0), "damaged: delete"),
    "damaged binary": (
        lambda: RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        "image is invalid.*damaged: delete",
    ),
    "C compiler": (
        lambda: subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/tmpq1w2/main.c"]),
        "gcc.*non-zero exit status 1",
    ),
    "no driver": (lambda: AssertionError("libcuda.so cannot found!"), "libcuda.so"),
}
