"""Memory stays sound when a model's code deep-copies tensors while it is traced.

torch's deep copy of a fake tensor copies its FakeTensorMode, and with it the bare addresses of weak
references to storages, which are then freed twice.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import flashnorm_triton as fn

_WIDTH = 8
_CONSTANTS = 300


class Copying(nn.Module):
    """A block that deep-copies what it computes, as models do with the layers of a cache."""

    def __init__(self, constants: int) -> None:
        super().__init__()
        self.constants = constants
        self.norm = nn.RMSNorm(_WIDTH, eps=1e-6)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = [torch.tensor(float(place)) for place in range(self.constants)]
        y = copy.deepcopy(self.linear(self.norm(x)))
        return y + x + kept[-1]


def audited(constants: int) -> str:
    """The decision on the one norm of such a block, and why."""
    block = Copying(constants)
    (site,) = fn.audit(block, example_inputs={"x": torch.randn(2, 3, _WIDTH)}).sites
    return f"{site.decision}: {site.reason}"


def _refuse(self: StorageWeakRef, protocol: int) -> None:
    raise AssertionError("a copy of this frees the storage once too often")


def test_no_weak_reference_to_a_storage_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageWeakRef, "__reduce_ex__", _refuse)
    assert audited(constants=3) == "fuse: read by 1 plain linear and nothing else"


def test_the_mode_of_a_model_of_fake_tensors_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StorageWeakRef, "__reduce_ex__", _refuse)
    with FakeTensorMode():
        block = Copying(constants=3)
        block.beside = [torch.empty(2), torch.tensor(3.0)]
    (site,) = fn.audit(block, example_inputs={"x": torch.randn(2, 3, _WIDTH)}).sites
    assert "could not be" not in site.reason
    assert block.linear.weight.fake_mode is block.beside[0].fake_mode


_CHILD = """
import gc, random, sys
from test_audit_memory import audited
draw = random.Random(1)
for _ in range(2):
    print(audited(int(sys.argv[1])), flush=True)
    gc.collect()
    blocks = [bytearray(draw.randrange(600, 6000)) for _ in range(5000)]
    del blocks[::2]
print("END")
"""


def test_a_process_outlives_its_audits() -> None:
    here = Path(__file__).parent
    paths = [str(here.parent), str(here), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD, str(_CONSTANTS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "END"
