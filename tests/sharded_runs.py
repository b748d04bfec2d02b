"""What one of two processes does with a tensor-parallel model; ``test_sharding`` starts them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashnorm_triton as fn
from flashnorm_triton.models.installers import sites_of
from flashnorm_triton.models.norm_only import NormOnly

PLAN = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel,
        "o_proj": RowwiseParallel}  # fmt: skip


def token_ids() -> Tensor:
    """(2, 11)."""
    return torch.arange(3, 25).view(2, 11)


def worker(rank: int, folder: str, kind: str) -> None:
    """Join the two processes, run every check, and leave rank 0's findings in ``folder``."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[kind],
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
    )
    try:
        found = {
            "patched after": _patched_after(Path(folder), kind),
            "patched before": _patched_before(Path(folder), kind),
        }
        if rank == 0:
            torch.save(found, Path(folder, "found.pt"))
    finally:
        dist.destroy_process_group()


def _load(folder: Path, **options: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def _logits(model: nn.Module, kind: str) -> Tensor:
    with torch.no_grad():
        return model(token_ids().to(kind)).logits.cpu()


def _gradients(model: nn.Module, kind: str) -> dict[str, Tensor]:
    ids = token_ids().to(kind)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        gradients[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).cpu().clone()
    return gradients


def _patched_after(folder: Path, kind: str) -> dict[str, Any]:
    """transformers' own plan: its linears hold DTensors and a forward of their own."""
    model = _load(folder, tp_plan="auto")
    weight = model.model.layers[0].self_attn.q_proj.weight
    found: dict[str, Any] = {
        "rows": (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0],
        "stock": _logits(model, kind),
        "stock gradients": _gradients(model.train(), kind),
    }
    model.eval()
    modules = {name: id(module) for name, module in model.named_modules()}
    handle = fn.patch(model)
    found["decisions"] = [site.decision for site in handle.report.sites]
    found["reason"] = handle.report.sites[0].reason
    found["alone"] = sum(isinstance(module, NormOnly) for module in model.modules())
    found["ours"] = _logits(model, kind)
    found["gradients"] = _gradients(model.train(), kind)
    model.eval()
    tokens = model.generate(token_ids().to(kind), max_new_tokens=5, do_sample=False)
    handle.revert()
    found["same tokens"] = torch.equal(
        tokens, model.generate(token_ids().to(kind), max_new_tokens=5, do_sample=False)
    )
    found["reverted"] = modules == {name: id(module) for name, module in model.named_modules()}
    found["reverted logits"] = _logits(model, kind)
    return found


def _patched_before(folder: Path, kind: str) -> dict[str, Any]:
    """torch's parallelize_module on a patched model: refused, then done after revert."""
    mesh = init_device_mesh(kind, (2,))
    found: dict[str, Any] = {}
    for fold in (True, False):
        model = _load(folder).to(kind)
        stock = _logits(model, kind)
        handle = fn.patch(model, fold=fold)
        try:
            _parallelize(model, mesh)
            found[f"refusal, fold={fold}"] = ""
        except RuntimeError as error:
            found[f"refusal, fold={fold}"] = str(error)
        found[f"sharded, fold={fold}"] = any(
            isinstance(parameter, DTensor) for parameter in model.parameters()
        )
        handle.revert()
        found[f"whole, fold={fold}"] = torch.equal(_logits(model, kind), stock)
    handle = fn.patch(model, fold=False, head=True)
    try:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    except RuntimeError as error:
        found["refusal, head"] = str(error)
    handle.revert()
    found["whole, head"] = torch.equal(_logits(model, kind), stock)
    _parallelize(model, mesh)
    again = fn.patch(model)
    found["sites after revert"] = [site.decision for site in again.report.sites]
    found["patched"] = len(sites_of(model))
    found["ours"], found["stock"] = _logits(model, kind), stock
    return found


def _parallelize(model: nn.Module, mesh: Any) -> None:
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, {name: how() for name, how in PLAN.items()})
