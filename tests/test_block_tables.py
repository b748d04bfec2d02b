"""Tables that blocks turn heads by are rewritten once a step, and never those of another step."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from block_models import block_model, greedy, padded_ids
from torch import Tensor

import flashnorm_triton as fn
from flashnorm_triton.models.block import tables


@pytest.fixture
def made() -> list[Any]:
    """The keys for which something was made."""
    return []


@pytest.fixture
def once(made: list[Any]) -> tables.OnceAStep:
    return tables.OnceAStep(lambda key, table: (made.append(key), key * table)[1])


@pytest.mark.parametrize("inference", [False, True])
def test_the_layers_of_a_step_share_what_the_first_has_made(
    inference: bool, once: tables.OnceAStep, made: list[Any]
) -> None:
    layers = [object() for _ in range(3)]
    with torch.inference_mode(inference):
        table = torch.randn(4)
        results = [once(layer, 2, table) for layer in layers]
        assert made == [2] and all(result is results[0] for result in results)
        # Another step, though the tables are the same tensor: changed, or not.
        table.add_(1)
        results = [once(layer, 2, table) for layer in layers]
        assert made == [2, 2] and torch.equal(results[2], 2 * table)
        results = [once(layer, 2, table) for layer in layers]
        assert made == [2, 2, 2]


def test_what_is_given_decides(once: tables.OnceAStep, made: list[Any]) -> None:
    layers, table = [object() for _ in range(5)], torch.randn(4)
    once(layers[0], 2, table)
    assert torch.equal(once(layers[1], 3, table), 3 * table), "another key"
    other = table.clone()
    assert torch.equal(once(layers[2], 3, other), 3 * other), "another tensor"
    other.add_(1)
    assert torch.equal(once(layers[3], 3, other), 3 * other), "changed since"
    thread = threading.Thread(target=once, args=(layers[4], 3, other))
    thread.start()
    thread.join()
    assert made == [2, 3, 3, 3, 3], "a thread has its own"


@pytest.mark.parametrize("inference", [False, True])
def test_layers_of_two_kinds_take_turns(
    inference: bool, once: tables.OnceAStep, made: list[Any]
) -> None:
    layers = [object() for _ in range(4)]
    with torch.inference_mode(inference):
        two = torch.randn(4), torch.randn(4)
        for _ in range(2):
            for layer, table in zip(layers, two * 2, strict=True):
                assert torch.equal(once(layer, 2, table), 2 * table), "of another step"
            for table in two:
                table.add_(1)
    assert made == [2] * 4


def test_nothing_outlives_the_tensors_it_was_made_of(once: tables.OnceAStep) -> None:
    table = torch.randn(4)
    result = weakref.ref(once(layer := object(), 2, table))
    assert result() is not None
    del table
    assert result() is None
    same = tables.OnceAStep(lambda key, table: table)
    table = torch.randn(4)
    alive = weakref.ref(same(layer, 2, table))
    del table
    assert alive() is None, "kept by itself"


def test_a_models_layers_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = block_model("glm"), padded_ids(2)
    tokens = greedy(model, ids, 5)
    fn.patch(model, level="block")
    seen: list[int] = []
    repeated = tables._repeated

    def counted(table: Tensor) -> Tensor:
        seen.append(table.shape[1])
        return repeated(table)

    monkeypatch.setattr(tables, "_repeated", counted)
    assert torch.equal(greedy(model, ids, 5), tokens)
    assert seen == [11, 11, *(1 for _ in range(2 * 4))], "cosines and sines, once a step"
