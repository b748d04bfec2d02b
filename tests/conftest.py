"""Shared set-up of the test suite: the Triton interpreter on a CPU, the ``gpu`` marker, seeds."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Triton reads the variable when a kernel is decorated, so it has to be there before any test
# module imports one. Ahead-of-time compile tests run in a subprocess without it.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header(config: pytest.Config) -> str:
    if HAS_GPU:
        return f"device: {torch.cuda.get_device_name()}, kernels run on it"
    return "device: CPU, kernels run through Triton's interpreter"


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
