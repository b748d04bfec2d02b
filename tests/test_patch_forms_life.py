"""Life around patching, over the forms that a site can take: saved, copied, trained, exported."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate_life import _t5
from tiny_models import VOCABULARY, randomise, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.installers import sites_of


def _neox() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_neox", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, bos_token_id=1,
        num_attention_heads=4, intermediate_size=112, max_position_embeddings=256, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    return model.eval()


def _family(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: tiny_model(name, **settings)


# What a site becomes: the model that shows it, and options of patch.
FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "packed": (_family("qwen2"), {}),
    "packed 1+w, post-norms": (_family("gemma2"), {}),
    "packed LayerNorm": (_neox, {}),
    "packed Conv1D": (_family("gpt2"), {}),
    "head": (_family("llama"), {"head": True}),
    "tied head": (_family("gemma"), {"head": True}),
    "experts": (_family("mixtral"), {}),
    "encoder-decoder": (_t5, {}),
}
FOLDED_ONLY = ("packed LayerNorm", "packed Conv1D")
each_form = pytest.mark.parametrize("form", FORMS)
FOLDS = pytest.mark.parametrize("fold", [True, False])


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    ids = token_ids().to(next(model.parameters()).device)
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if _is_t5(model) else {})}


def _is_t5(model: nn.Module) -> bool:
    return model.config.model_type == "t5"


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(**_inputs(model)).logits


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def _modules(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules()}


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def _patched(form: str, fold: bool) -> tuple[nn.Module, Any]:
    make, options = FORMS[form]
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nothing to patch"
        handle = fn.patch(model, fold=fold, **options)
    if not handle.changed:
        assert form in FOLDED_ONLY and not fold
        pytest.skip("this form exists folded only")
    return model, handle


@FOLDS
@each_form
def test_state_dicts_and_checkpoints(form: str, fold: bool, tmp_path: Path) -> None:
    model, handle = _patched(form, fold)
    stock = FORMS[form][0]()
    values, logits = _values(stock), _logits(stock)
    assert _same(_values(model), values), "a patched model's state_dict is the stock one"

    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(stock).from_pretrained(tmp_path, dtype=torch.float32)
    assert not sites_of(loaded) and _same(_values(loaded), values)
    assert torch.equal(_logits(loaded), logits)

    other = copy.deepcopy(stock)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    model.load_state_dict(_values(other))
    assert _same(_values(model), _values(other))
    _close(_logits(model), _logits(other))
    stock.load_state_dict(model.state_dict())
    assert torch.equal(_logits(stock), _logits(other))
    handle.revert()
    assert _same(_values(model), _values(other)) and torch.equal(_logits(model), _logits(other))


@FOLDS
@each_form
def test_copies_moves_and_revert(form: str, fold: bool) -> None:
    make, options = FORMS[form]
    model = make()
    stock, values, modules = _logits(model), _values(model), _modules(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = fn.patch(model, fold=fold, **options)
    if not handle.changed:
        pytest.skip("this form exists folded only")
    ours = _logits(model)
    _close(ours, stock)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(_logits(twin), ours) and len(sites_of(twin)) == len(sites_of(model))
        with pytest.warns(UserWarning, match="already patched"):
            fn.patch(twin).revert()
        assert torch.equal(_logits(twin), stock) and _same(_values(twin), values)
    twin = copy.deepcopy(model).half()
    half = make().half()
    assert torch.isfinite(_logits(twin)).all()
    exact = _logits(copy.deepcopy(half).float())  # of the same rounded weights
    off, theirs = ((_logits(m).float() - exact).norm() for m in (twin, half))
    assert off <= 1.25 * theirs + 1e-3 * exact.norm()
    model.double().float().to("cpu")
    _close(_logits(model), stock)
    handle.revert()
    assert _modules(model) == modules and _same(_values(model), values)
    assert torch.equal(_logits(model), stock)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "hooks", "reentrant"])
@each_form
def test_trains_as_stock_without_a_fold(form: str, checkpointing: bool | None) -> None:
    model, handle = _patched(form, fold=False)
    stock = FORMS[form][0]()

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.train()
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        ids = token_ids(3, 9)
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, ours = gradients(stock), gradients(model)
    assert ours.keys() == expected.keys()
    for name, theirs in expected.items():
        error = (ours[name] - theirs).norm() / theirs.norm().clamp_min(1e-12)
        assert error < 1e-3 or theirs.norm() < 1e-4, (name, float(error))
    handle.revert()
    again = gradients(model)
    assert all(torch.equal(again[name], theirs) for name, theirs in expected.items())


@each_form
def test_exports(form: str) -> None:
    model, _ = _patched(form, fold=True)
    expected, inputs = _logits(model), {**_inputs(model), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    assert any("flashnorm" in name for name in names)
    with torch.no_grad():
        _close(program.module()(**inputs).logits, expected)


def test_models_patched_in_parallel_threads() -> None:
    """Each thread patches, runs and reverts models of its own, all at once, again and again."""
    names = ["packed", "packed 1+w, post-norms", "packed LayerNorm", "experts"]
    failures: list[str] = []
    start = threading.Barrier(len(names))

    def work(name: str) -> None:
        try:
            make, options = FORMS[name]
            stock, values, modules = _logits(models[name]), _values(models[name]), None
            modules = _modules(models[name])
            start.wait(60)
            for fold in (True, True):
                handle = fn.patch(models[name], fold=fold, **options)
                assert handle.changed
                _close(_logits(models[name]), stock)
                handle.revert()
                assert _modules(models[name]) == modules
                assert _same(_values(models[name]), values)
                assert torch.equal(_logits(models[name]), stock)
        except BaseException as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")

    models = {name: FORMS[name][0]() for name in names}
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
