"""Tensor-parallel models in two processes: column-parallel shards stay right under patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharded_runs
import torch
from conftest import HAS_GPU
from tiny_models import tiny_model


@pytest.fixture(scope="module", params=["cpu", "cuda"], ids=["gloo", "nccl"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, and the logits of the whole model in one."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs 2 GPUs, {torch.cuda.device_count()} here")
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("gloo is for machines without a GPU; NCCL runs where there are two")
    folder: Path = tmp_path_factory.mktemp("sharded")
    model = tiny_model("llama")
    model.save_pretrained(folder)
    with torch.no_grad():
        whole = model(sharded_runs.token_ids()).logits
    torch.multiprocessing.spawn(sharded_runs.worker, (str(folder), request.param), nprocs=2)
    return {**torch.load(folder / "found.pt"), "whole": whole}


def test_column_parallel_shards_stay_right(found: dict[str, Any]) -> None:
    """transformers' tp_plan="auto", then patch: the norms run alone, forward and backward."""
    run = found["patched after"]
    assert run["rows"] == 32, "half of q_proj's 64 rows"
    assert run["decisions"] == ["norm_only"] * 5 and run["alone"] == 5
    assert "model.layers.0.self_attn.q_proj" in run["reason"]
    torch.testing.assert_close(run["ours"], found["whole"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run["ours"], run["stock"], rtol=1e-4, atol=1e-4)
    assert run["same tokens"] and run["reverted"]
    assert torch.equal(run["reverted logits"], run["stock"])
    assert run["gradients"].keys() == run["stock gradients"].keys()
    for name, stock in run["stock gradients"].items():
        ours = run["gradients"][name]
        torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("fold", [True, False])
def test_sharding_a_patched_model_is_refused(fold: bool, found: dict[str, Any]) -> None:
    run = found["patched before"]
    assert "call handle.revert() first" in run[f"refusal, fold={fold}"]
    assert not run[f"sharded, fold={fold}"] and run[f"whole, fold={fold}"]


def test_sharding_a_linear_that_normalises_for_itself_is_refused(found: dict[str, Any]) -> None:
    run = found["patched before"]
    assert "a DTensor: call handle.revert() first" in run["refusal, head"] and run["whole, head"]


def test_a_refused_model_can_be_reverted_sharded_and_patched(found: dict[str, Any]) -> None:
    run = found["patched before"]
    assert run["sites after revert"][:2] == ["norm_only", "fuse"] and run["patched"] == 5
    torch.testing.assert_close(run["ours"], run["stock"], rtol=1e-4, atol=1e-4)
