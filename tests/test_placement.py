"""Models spread over devices or offloaded by accelerate: what is patched, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
FOLDS = pytest.mark.parametrize("fold", [True, False])


@torch.no_grad()
def _logits(model: nn.Module, device: Any = "cpu") -> Tensor:
    return model(token_ids().to(device)).logits.cpu()


def _map(first: Any, second: Any) -> dict[str, Any]:
    """Layer 0 and all around it on one device, layer 1 on another."""
    around = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")
    return {**dict.fromkeys(around, first), "model.layers.1": second}


def _hooks(model: nn.Module) -> dict[str, Any]:
    return {name: vars(module).get("_hf_hook") for name, module in model.named_modules()}


def _assert_reverts(model: nn.Module, handle: Any, stock: Tensor, before: dict[str, Any]) -> None:
    handle.revert()
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert torch.equal(_logits(model), stock)


@FOLDS
@pytest.mark.parametrize("level", ["norm", "block"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_hooks_that_only_move_inputs_go_on(family: str, level: str, fold: bool) -> None:
    """What a device_map over several devices puts on every module; here they are all the CPU."""
    model = accelerate.dispatch_model(tiny_model(family), _map("cpu", "cpu"), force_hooks=True)
    stock, before = _logits(model), {name: id(module) for name, module in model.named_modules()}
    hooks = _hooks(model)
    assert sum(hook is not None for hook in hooks.values()) > 20
    handle = fn.patch(model, fold=fold, level=level)
    assert len(handle.report.fused) == 4
    assert _hooks(model) == hooks
    calls: list[str] = []
    norm = model.model.layers[0]  # a block moves its inputs once
    if level == "norm":
        norm = norm.input_layernorm
    moves = norm._hf_hook.pre_forward
    norm._hf_hook.pre_forward = lambda *args, **kwargs: calls.append("") or moves(*args, **kwargs)
    torch.testing.assert_close(_logits(model), stock, rtol=1e-4, atol=1e-4)
    assert calls == [""]
    del norm._hf_hook.pre_forward
    _assert_reverts(model, handle, stock, before)


def test_a_norm_alone_keeps_its_hook() -> None:
    model = accelerate.dispatch_model(tiny_model("llama"), _map("cpu", "cpu"), force_hooks=True)
    for layer in model.model.layers:  # a hook of the user's: the linear is not ours to replace
        layer.self_attn.q_proj.register_forward_hook(lambda *args: None)
    stock, before = _logits(model), {name: id(module) for name, module in model.named_modules()}
    hooks = _hooks(model)
    handle = fn.patch(model)
    assert [site.decision for site in handle.report.sites[:2]] == ["norm_only", "fuse"]
    assert _hooks(model) == hooks
    torch.testing.assert_close(_logits(model), stock, rtol=1e-4, atol=1e-4)
    _assert_reverts(model, handle, stock, before)


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_offloaded_layers_are_kept_and_the_others_fused(where: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    if where == "disk":
        model = accelerate.dispatch_model(model, _map("cpu", "disk"), offload_dir=tmp_path)
    else:
        accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    stock, before = _logits(model), {name: id(module) for name, module in model.named_modules()}
    handle = fn.patch(model)
    decisions = [site.decision for site in handle.report.sites]
    assert decisions[:4] == ["fuse", "fuse", "keep", "keep"]
    reason = handle.report.sites[2].reason
    assert reason == "accelerate manages model.layers.1.input_layernorm (its weights are offloaded)"
    torch.testing.assert_close(_logits(model), stock, rtol=1e-4, atol=1e-4)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    _assert_reverts(model, handle, stock, before)


def test_a_model_that_is_offloaded_whole_is_refused() -> None:
    model = accelerate.cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    stock, before = _logits(model), {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="on the meta device .not loaded, or offloaded.*load it"):
        fn.patch(model)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert torch.equal(_logits(model), stock)


def test_offloading_a_patched_model_as_a_whole() -> None:
    """``cpu_offload_with_hook`` moves the model as ``.to`` does; the packed weights go with it."""
    model = tiny_model("qwen2")
    stock = _logits(model)
    handle = fn.patch(model)
    ours = _logits(model)
    model, hook = accelerate.cpu_offload_with_hook(model, execution_device="cpu")
    assert torch.equal(_logits(model), ours)
    hook.offload()
    assert torch.equal(_logits(model), ours)
    hook.remove()
    handle.revert()
    assert torch.equal(_logits(model), stock)


def test_from_pretrained_with_a_device_map(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model("llama").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    folder = {"offload_folder": tmp_path / "offload", "dtype": torch.float32}
    device_map = _map("cpu", "disk")
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, **folder
    )
    fn.patch_class("llama")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, **folder
        )
    finally:
        fn.unpatch_class("llama")
    decisions = [site.decision for site in fn.audit(model).sites]
    assert decisions[:4] == ["fuse", "fuse", "keep", "keep"]
    torch.testing.assert_close(_logits(model), _logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@FOLDS
def test_two_gpus(fold: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} here")
    model = accelerate.dispatch_model(tiny_model("llama"), _map(0, 1))
    stock, before = _logits(model, 0), {n: id(module) for n, module in model.named_modules()}
    handle = fn.patch(model, fold=fold)
    assert len(handle.report.fused) == 4
    devices = [layer.self_attn.q_proj.weight.device.index for layer in model.model.layers]
    assert devices == [0, 1]
    torch.testing.assert_close(_logits(model, 0), stock, rtol=1e-3, atol=1e-3)
    handle.revert()
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert torch.equal(_logits(model, 0), stock)


@pytest.mark.gpu
def test_layers_on_the_gpu_are_fused_and_those_on_the_host_kept() -> None:
    model = accelerate.dispatch_model(tiny_model("llama"), _map(0, "cpu"), main_device=0)
    stock = _logits(model, 0)
    handle = fn.patch(model)
    decisions = [site.decision for site in handle.report.sites]
    assert decisions[:4] == ["fuse", "fuse", "keep", "keep"]
    torch.testing.assert_close(_logits(model, 0), stock, rtol=1e-3, atol=1e-3)
    handle.revert()
    assert torch.equal(_logits(model, 0), stock)


def test_which_hooks_only_move_inputs() -> None:
    from accelerate.hooks import AlignDevicesHook, ModelHook

    from flashnorm_triton.models.placement import only_moves_inputs

    linear = torch.nn.Linear(4, 4)
    assert not only_moves_inputs(linear)
    for hook, answer in (
        (AlignDevicesHook(execution_device="cpu"), True),
        (AlignDevicesHook(execution_device="cpu", offload=True), False),
        (AlignDevicesHook(execution_device="cpu", io_same_device=True), False),
        (AlignDevicesHook(execution_device="meta"), False),
        (AlignDevicesHook(), False),
        (ModelHook(), False),
    ):
        linear._hf_hook = hook
        assert only_moves_inputs(linear) is answer, hook
