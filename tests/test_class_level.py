"""patch_class / unpatch_class: which later loads come out patched, and what stays untouched."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model, token_ids
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel

import flashnorm_triton as fn
from flashnorm_triton.models.installers import sites_of


@pytest.fixture(autouse=True)
def _stock_again():
    yield
    for name in ("llama", "qwen2", "gemma3", "gemma3_text"):
        fn.unpatch_class(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of tiny models; ``sharded`` is llama in many files."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "gemma3_text"):
        tiny_model(family).save_pretrained(root / family)
    tiny_model("llama").save_pretrained(root / "sharded", max_shard_size="60KB")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    return {path.name: path for path in root.iterdir()}


def _snapshot() -> dict[str, Any]:
    """All that a patched type could have changed elsewhere: classes, modules, torch's functions."""
    spaces = {"torch.nn.functional": nn.functional, "modeling_llama": modeling_llama}
    seen: dict[str, Any] = {name: dict(vars(space)) for name, space in spaces.items()}
    from transformers.models.qwen2 import modeling_qwen2

    classes = [PreTrainedModel, AutoModel, AutoModelForCausalLM, AutoConfig, nn.Module]
    for module in (modeling_llama, modeling_qwen2):
        classes += [value for value in vars(module).values() if isinstance(value, type)]
    seen.update({f"class {c.__module__}.{c.__name__}": dict(vars(c)) for c in classes})
    return seen


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model(token_ids()).logits


def test_loads_and_new_models_come_out_patched(folders: dict[str, Path]) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders["llama"])
    logits, config = _logits(stock), AutoConfig.from_pretrained(folders["llama"])
    fn.patch_class("llama", fold=False)
    loaded = {
        "auto": AutoModelForCausalLM.from_pretrained(folders["llama"]),
        "own class": LlamaForCausalLM.from_pretrained(folders["llama"]),
        "sharded": AutoModelForCausalLM.from_pretrained(folders["sharded"]),
        "device_map": AutoModelForCausalLM.from_pretrained(folders["llama"], device_map="cpu"),
        "info": LlamaForCausalLM.from_pretrained(folders["llama"], output_loading_info=True)[0],
    }
    for how, model in loaded.items():
        assert len(sites_of(model)) == 5 and not sites_of(model)[0].folded, how
        torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-4, msg=how)
    for how in ({"dtype": torch.bfloat16}, {"torch_dtype": torch.bfloat16}, {"dtype": "bfloat16"}):
        model = AutoModelForCausalLM.from_pretrained(folders["llama"], **how)
        assert sites_of(model) and model.dtype == torch.bfloat16
        assert sites_of(model)[0].buffers["packed_weight"].dtype == torch.bfloat16
    for auto in (AutoModelForCausalLM, AutoModel, transformers.AutoModelForSequenceClassification):
        count = 4 if auto is AutoModel else 5  # without a head nothing reads the final norm
        assert len(sites_of(auto.from_config(config))) == count, auto
        assert len(sites_of(auto.from_pretrained(folders["llama"]))) == count, auto
    assert not sites_of(stock), "models that were there before stay as they were"
    assert not sites_of(LlamaForCausalLM(config)), "constructors are not hooked"


def test_reverting_a_model_that_came_out_patched(folders: dict[str, Path]) -> None:
    stock = _logits(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    fn.patch_class("llama")
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with pytest.warns(UserWarning, match="already patched"):
        fn.patch(model).revert()
    assert not sites_of(model) and torch.equal(_logits(model), stock)


def test_subclasses_are_patched_and_types_derived_from_it_are_not(
    folders: dict[str, Path],
) -> None:
    class Mine(LlamaForCausalLM):
        pass

    class OtherConfig(transformers.LlamaConfig):
        model_type = "derived_from_llama"

    class Other(LlamaForCausalLM):
        config_class = OtherConfig

    fn.patch_class("llama")
    assert sites_of(Mine.from_pretrained(folders["llama"]))
    settings = AutoConfig.from_pretrained(folders["llama"]).to_diff_dict()
    config = OtherConfig(**{k: v for k, v in settings.items() if k != "model_type"})
    assert config.model_type == OtherConfig.model_type
    assert not sites_of(Other._from_config(config))


def test_types_that_share_their_base_class_are_told_apart(folders: dict[str, Path]) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel

    fn.patch_class("gemma3")
    folder = folders["gemma3_text"]
    assert not sites_of(AutoModelForCausalLM.from_pretrained(folder))
    fn.patch_class("gemma3_text")
    fn.unpatch_class("gemma3")
    assert sites_of(AutoModelForCausalLM.from_pretrained(folder))
    fn.unpatch_class("gemma3_text")
    assert not {"from_pretrained", "_from_config"} & set(vars(Gemma3PreTrainedModel))


def test_nothing_else_changes_and_unpatch_restores(folders: dict[str, Path]) -> None:
    bystander = tiny_model("llama")
    AutoModelForCausalLM.from_pretrained(folders["qwen2"])  # what transformers does at first use
    before = _snapshot()
    modules = {name: id(module) for name, module in bystander.named_modules()}
    logits = _logits(bystander)
    fn.patch_class("llama")
    assert sites_of(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    assert not sites_of(AutoModelForCausalLM.from_pretrained(folders["qwen2"]))
    after = _snapshot()
    changed = {name for name in before if before[name] != after[name]}
    name = f"class {LlamaPreTrainedModel.__module__}.LlamaPreTrainedModel"
    assert changed == {name} and before.keys() == after.keys()
    assert set(after[name]) - set(before[name]) == {"from_pretrained", "_from_config"}
    assert all(after[name][key] is value for key, value in before[name].items())
    assert LlamaPreTrainedModel.from_pretrained.__doc__ == PreTrainedModel.from_pretrained.__doc__
    assert {name: id(module) for name, module in bystander.named_modules()} == modules
    assert torch.equal(_logits(bystander), logits)
    fn.unpatch_class("llama")
    assert _snapshot() == before
    assert not sites_of(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    fn.unpatch_class("llama")


def test_calling_again_updates_the_options(folders: dict[str, Path]) -> None:
    fn.patch_class("llama")
    hooked = vars(LlamaPreTrainedModel)["from_pretrained"]
    fn.patch_class("llama")
    assert sites_of(AutoModelForCausalLM.from_pretrained(folders["llama"]))[0].folded
    fn.patch_class("llama", fold=False)
    assert not sites_of(AutoModelForCausalLM.from_pretrained(folders["llama"]))[0].folded
    assert vars(LlamaPreTrainedModel)["from_pretrained"] is hooked
    fn.unpatch_class("llama")
    assert "from_pretrained" not in vars(LlamaPreTrainedModel)


def test_every_thread_sees_it(folders: dict[str, Path]) -> None:
    fn.patch_class("llama")
    loaded: dict[str, nn.Module] = {}

    def load(name: str) -> None:
        loaded[name] = AutoModelForCausalLM.from_pretrained(folders[name])

    # In turn: transformers puts a no-op in the place of PreTrainedModel.tie_weights for each load,
    # and two loads at once can leave it there for good.
    for name in ("llama", "qwen2"):
        thread = threading.Thread(target=load, args=(name,))
        thread.start()
        thread.join()
    assert sites_of(loaded["llama"]) and not sites_of(loaded["qwen2"])


def test_models_without_weights_and_parts_of_larger_models_are_left_alone(
    folders: dict[str, Path],
) -> None:
    config = AutoConfig.from_pretrained(folders["llama"])
    fn.patch_class("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.device("meta"):
            assert not sites_of(AutoModelForCausalLM.from_config(config))
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
        whole = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config={"model_type": "clip_vision_model", **vision}, text_config=config
            )
        )
    assert type(whole.model.language_model).__name__ == "LlamaModel" and not sites_of(whole)


def test_a_model_that_cannot_be_patched_is_still_returned(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashnorm_triton.models import class_level

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room")

    fn.patch_class("llama")
    monkeypatch.setattr(class_level, "patch", fails)
    with pytest.warns(RuntimeWarning, match="LlamaForCausalLM was loaded, but.*no room"):
        model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert not sites_of(model) and _logits(model).isfinite().all()


def test_bad_arguments_change_nothing() -> None:
    before = _snapshot()
    for name, near in (("lama", "llama"), ("Llama", "llama"), ("qwen-2", "qwen2")):
        with pytest.raises(ValueError, match=rf"no model type '{name}': did you mean.*'{near}'"):
            fn.patch_class(name)
    with pytest.raises(ValueError, match="no model type"):
        fn.unpatch_class("lama")
    with pytest.raises(TypeError, match="a model type is a string.*not type"):
        fn.patch_class(LlamaForCausalLM)
    with pytest.raises(TypeError, match=r"option 'folded'; patch has.*fold"):
        fn.patch_class("llama", folded=True)
    assert _snapshot() == before
