"""head=True: everything that a model is documented to return is what the stock model returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_table import FAMILIES, Family, build, inputs_of
from torch import Tensor, nn

import flashnorm_triton as fn

BY_NAME = {family.name: family for family in FAMILIES}
# What becomes of the final norm, or of the encoder's and the decoder's: with a head, and without.
WITH_HEAD = {
    "llama": ("fuse",),
    "gemma": ("fuse",),
    "gpt2": ("fuse",),
    "opt": ("fuse",),
    "gemma3n_text": ("fuse",),
    "minicpm3": ("norm_only",),  # a scalar before the head
    "t5": ("norm_only", "norm_only"),  # dropout behind both
    "pegasus": ("keep", "fuse"),
    "whisper": ("keep", "fuse"),
    "t5gemma": ("norm_only", "fuse"),
}
BARE = ("llama", "gpt2", "t5", "pegasus", "whisper", "t5gemma", "vit", "aimv2_vision_model", "esm")
_TASKS = {"whisper": "SpeechSeq2Seq"}


def _built(name: str, bare: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    family = BY_NAME[name]
    task = "" if bare else _TASKS.get(name, family.task)
    both = family.task == "Seq2SeqLM"
    family = Family(name, 0, family.settings, task=task, inputs=family.inputs)
    try:
        model = build(family, torch.float64)
    except LookupError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    inputs = inputs_of(BY_NAME["t5"] if both else family)
    return model, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{path}.{index}")


@torch.no_grad()
def _outputs(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    asked = {"output_hidden_states": True, "return_dict": True, **options}
    return dict(_tensors(model(**inputs, **asked)))


def _assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    assert list(ours) == list(stock)
    for name, value in stock.items():
        # Stock norms compute in float32 even here.
        limit = 2e-5 * float(value.abs().max())
        torch.testing.assert_close(ours[name], value, rtol=0, atol=limit, msg=name)


def _decisions(handle: fn.PatchHandle) -> tuple[str, ...]:
    return tuple(
        site.decision for site in handle.report.sites if "last_hidden_state" in site.returned_as
    )


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in WITH_HEAD),
        *(
            (name, {option: False})
            for name in ("llama", "gpt2", "t5gemma")
            for option in ("fold", "revertible")
        ),
    ],
    ids=str,
)
def test_models_with_a_head(name: str, options: dict[str, bool]) -> None:
    model, inputs = _built(name, bare=False)
    stock = _outputs(model, inputs)
    assert any("hidden_states" in key for key in stock)
    without_names = _outputs(model, inputs, return_dict=False)
    handle = fn.patch(model, head=True, example_inputs=inputs, **options)
    expected = WITH_HEAD[name]
    if options == {"fold": False} and handle.report.sites[-1].kind == "layer":
        expected = (*expected[:-1], "keep")  # its row sums would have to be made anew
    assert _decisions(handle) == expected, handle.report.to_json()
    _assert_same(_outputs(model, inputs), stock)
    _assert_same(_outputs(model, inputs, return_dict=False), without_names)


@pytest.mark.filterwarnings("ignore:nothing to patch")
@pytest.mark.parametrize("name", BARE)
def test_models_without_a_head(name: str) -> None:
    model, inputs = _built(name, bare=True)
    stock = _outputs(model, inputs)
    assert any("last_hidden_state" in key for key in stock)
    handle = fn.patch(model, head=True, example_inputs=inputs)
    assert "fuse" not in _decisions(handle), handle.report.to_json()
    _assert_same(_outputs(model, inputs), stock)


@pytest.mark.parametrize("name", ["t5", "pegasus", "t5gemma"])
def test_encoder_outputs_travel_between_patched_and_stock(name: str) -> None:
    model, inputs = _built(name, bare=False)
    patched = copy.deepcopy(model)
    fn.patch(patched, head=True)
    ids = inputs.pop("input_ids")
    with torch.no_grad():
        of_stock, of_patched = (m.get_encoder()(ids) for m in (model, patched))
        _assert_same(dict(_tensors(of_patched)), dict(_tensors(of_stock)))
        stock = model(encoder_outputs=of_stock, **inputs).logits
        ours = patched(encoder_outputs=of_stock, **inputs).logits
    _assert_same({"logits": ours}, {"logits": stock})


def test_dropout_behind_t5s_final_norms_in_training() -> None:
    model, inputs = _built("t5", bare=False)
    inputs["labels"] = inputs.pop("decoder_input_ids")
    patched = copy.deepcopy(model)
    fn.patch(patched, head=True, fold=False)

    def step(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model.train().zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    _assert_same(step(patched), step(model))
