"""Shared set-up of the test suite: the Triton interpreter on a CPU, the ``gpu`` marker, seeds."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Triton reads the variable when a kernel is decorated, so it has to be there before any test
# module imports one. Ahead-of-time compile tests run in a subprocess without it.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An operation whose result shares memory with an input is an error to torch under a CI system and
# a warning elsewhere: an error everywhere. Read by torch when a graph is first compiled.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")


HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
collect_ignore_glob = [] if HAS_HYPOTHESIS else ["test_fuzz*.py"]


if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes ``-n auto`` starts: one with a GPU, which they would have to share."""
    cores = len(os.sched_getaffinity(0))
    return 0 if HAS_GPU or cores == 1 else min(cores, 4)


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"device: {torch.cuda.get_device_name()}, kernels run on it"] if HAS_GPU else []
    lines = lines or ["device: CPU, kernels run through Triton's interpreter"]
    return lines if HAS_HYPOTHESIS else [*lines, "no hypothesis installed: no fuzz tests"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU (torch.cuda.is_available() is False)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if HAS_GPU else "cpu")
