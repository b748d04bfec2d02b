"""Quantized and LoRA-wrapped linears: the norms before them run alone, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.norm_only import NormOnly

FOLDS = pytest.mark.parametrize("fold", [True, False])


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(token_ids()).logits


def _swapped(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """``model`` with each linear of its layers replaced by what ``make`` makes of it."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            holder, _, name = path.rpartition(".")
            setattr(model.get_submodule(holder), name, make(module))
    return model.to("cpu")  # bitsandbytes quantizes when it is moved


def _bnb_8bit(model: nn.Module) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", exc_type=Exception)

    def make(linear: nn.Linear) -> nn.Module:
        size = (linear.in_features, linear.out_features, linear.bias is not None)
        made = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.data, False, has_fp16_weights=False)
        made.bias = linear.bias
        return made

    return _swapped(model, make)


def _bnb_4bit(model: nn.Module) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", exc_type=Exception)

    def make(linear: nn.Linear) -> nn.Module:
        size = (linear.in_features, linear.out_features, linear.bias is not None)
        made = bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(linear.weight.data, False, quant_type="nf4")
        made.bias = linear.bias
        return made

    return _swapped(model, make)


def _torchao_int8(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", exc_type=Exception)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def _torchao_int4(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", exc_type=Exception)
    group = quantization.granularity.PerGroup(16)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)
    quantization.quantize_(model, config)
    return model


# What makes the linears foreign, what the report calls them, and how far off their own rounding of
# the norm's output may be: LLM.int8() quantizes it, so that a last bit can become a step of int8.
QUANTIZED = {
    "bnb 8-bit": (_bnb_8bit, "Linear8bitLt", 1e-2),
    "bnb 4-bit": (_bnb_4bit, "Linear4bit", 1e-5),
    "torchao int8": (_torchao_int8, "Int8Tensor", 1e-5),
    "torchao int4": (_torchao_int4, "IntxUnpackedToInt8Tensor", 1e-5),
}


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_linears(how: str, family: str) -> None:
    quantize, kind, tolerance = QUANTIZED[how]
    model = quantize(tiny_model(family))
    stock, modules = _logits(model), dict(model.named_modules())
    handle = fn.patch(model)
    alone = [site for site in handle.report.sites if site.decision == "norm_only"]
    assert len(alone) == 5 and all(kind in site.reason for site in alone[:4])
    assert all(set(site.consumer_kinds) == {"foreign"} for site in alone[:4])
    assert all(isinstance(model.get_submodule(site.norm), NormOnly) for site in alone)
    ours = _logits(model)
    assert (ours - stock).norm() <= tolerance * stock.norm()
    options = {"max_new_tokens": 6, "do_sample": False}
    if tolerance < 1e-3:
        tokens = model.generate(token_ids(), **options)
    for path, module in model.named_modules():
        replaced = path in {site.norm for site in alone}
        assert (module is modules[path]) is not replaced, path
    handle.revert()
    assert all(module is modules[path] for path, module in model.named_modules())
    assert torch.equal(_logits(model), stock)
    if tolerance < 1e-3:
        assert torch.equal(model.generate(token_ids(), **options), tokens)


@pytest.mark.parametrize("how", ["bitsandbytes", "torchao"])
def test_loaded_quantized(how: str, tmp_path: Path) -> None:
    """``quantization_config`` with patch_class: the load comes out quantized and patched."""
    import transformers

    package = pytest.importorskip(how, exc_type=Exception)
    if how == "bitsandbytes":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        from torchao.quantization import Int8WeightOnlyConfig

        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    assert package.__version__
    tiny_model("llama").save_pretrained(tmp_path)
    options = {"quantization_config": config, "dtype": torch.float32}
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    fn.patch_class("llama")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    finally:
        fn.unpatch_class("llama")
    assert sum(isinstance(module, NormOnly) for module in model.modules()) == 5
    assert (_logits(model) - _logits(stock)).norm() < 1e-2 * _logits(stock).norm()


def _lora(model: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _train(model: nn.Module, steps: int = 5) -> list[float]:
    ids = token_ids(3, 9)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert learns
    optimizer, losses = torch.optim.AdamW(learns, lr=0.02), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@FOLDS
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_lora_adapters_train_merge_and_switch_off(family: str, fold: bool) -> None:
    targets = ["q_proj", "v_proj"]
    stock = _lora(tiny_model(family), targets).train()
    model = _lora(tiny_model(family), targets).train()
    base = _logits(tiny_model(family))
    handle = fn.patch(model, fold=fold)
    found = [(site.norm.rpartition(".")[2], site.decision) for site in handle.report.sites[:2]]
    assert found == [("input_layernorm", "norm_only"), ("post_attention_layernorm", "fuse")]
    assert "lora" in handle.report.sites[0].reason

    expected, losses = _train(stock), _train(model)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    stock.eval(), model.eval()
    trained = _logits(stock)
    torch.testing.assert_close(_logits(model), trained, rtol=1e-2, atol=1e-2)
    with model.disable_adapter():
        torch.testing.assert_close(_logits(model), base, rtol=1e-4, atol=1e-4)
    adapters = {key: value for key, value in model.state_dict().items() if "lora" in key}
    theirs = stock.state_dict()
    assert adapters and all(
        torch.allclose(value, theirs[key], atol=5e-3) for key, value in adapters.items()
    )

    merged, stock_merged = model.merge_and_unload(), stock.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    torch.testing.assert_close(_logits(merged), _logits(stock_merged), rtol=1e-2, atol=1e-2)
    handle.revert()
    assert fn.audit(merged).sites[0].decision == "fuse"
    alike = copy.deepcopy(merged)
    fn.patch(merged, fold=fold)
    alone = [path for path, module in merged.named_modules() if isinstance(module, NormOnly)]
    assert alone == ["model.norm"]
    torch.testing.assert_close(_logits(merged), _logits(alike), rtol=1e-4, atol=1e-4)


def test_lora_over_quantized_linears(tmp_path: Path) -> None:
    model = _lora(_bnb_4bit(tiny_model("llama")), ["q_proj", "k_proj", "v_proj", "gate_proj"])
    stock = _logits(model)
    handle = fn.patch(model)
    assert [site.decision for site in handle.report.sites[:4]] == ["norm_only"] * 4
    torch.testing.assert_close(_logits(model), stock, rtol=1e-3, atol=1e-3)
    assert _train(model, 4)[-1] < _train(model, 1)[0] + 1
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    handle.revert()
    assert not any(isinstance(module, NormOnly) for module in model.modules())


def test_a_layer_norm_before_them_stays_with_the_reason() -> None:
    model = _lora(tiny_model("gpt2"), ["c_attn"])
    stock = _logits(model)
    handle = fn.patch(model)
    first, second = handle.report.sites[:2]
    assert (first.decision, second.decision) == ("keep", "fuse")
    assert "lora" in first.reason
    assert first.reason.endswith("; a LayerNorm alone is one launch already")
    torch.testing.assert_close(_logits(model), stock, rtol=1e-3, atol=1e-3)
    handle.revert()
    assert torch.equal(_logits(model), stock)
