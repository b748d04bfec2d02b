"""Blocks under torch's compiler: what Inductor makes of their graph, up to the code it would write.

No C++ or Triton compiler is asked: compilation ends where the graph has been lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from block_models import block_model, cache_name

import flashnorm_triton as fn
from flashnorm_triton import inductor

pytest.importorskip("transformers", reason="patches transformers' models")
from transformers import StaticCache  # noqa: E402

ROOM = 24


class FarEnough(Exception):
    """Raised where the graph has been lowered."""


class Lowered(NamedTuple):
    """Inductor's graph, and the operations that it was given no lowering for."""

    graph: Any
    unknown: list[str]


@pytest.fixture
def lower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lowered]]:
    """lower(model): a decode step with a static cache, in a process that has compiled nothing."""
    from torch._inductor import graph, lowering

    made: list[Any] = []
    unknown: list[str] = []

    def end(self: Any) -> None:
        made.append(self)
        raise FarEnough

    def fall_back(operation: Any, *args: Any, **kwargs: Any) -> None:
        unknown.append(str(operation))
        lowering.make_fallback(operation, *args, **kwargs)

    monkeypatch.setattr(graph.GraphLowering, "codegen", end)
    monkeypatch.setattr(graph, "make_fallback", fall_back)
    monkeypatch.setattr(inductor, "_told", set())
    for operation in list(lowering.lowerings):
        if str(operation).startswith("flashnorm."):
            monkeypatch.delitem(lowering.lowerings, operation)

    @torch.no_grad()
    def lower(model: torch.nn.Module) -> Lowered:
        torch._dynamo.reset()
        cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=ROOM)}
        model(torch.arange(3, 8)[None], **cache)

        def step(ids: torch.Tensor) -> torch.Tensor:
            return model(ids, **cache).logits

        compiled = torch.compile(step, fullgraph=True, options={"fx_graph_cache": False})
        with pytest.raises(Exception, match="FarEnough"):
            compiled(torch.tensor([[9]]))
        return Lowered(made.pop(), unknown)

    yield lower
    torch._dynamo.reset()


def test_no_operation_is_met_unprepared(
    lower: Callable[..., Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch 2.11 spells out, it spells out for ever where blocks come before it."""
    monkeypatch.setattr(inductor, "_SPELLS_OUT", True)
    model = block_model("llama", num_hidden_layers=3)
    fn.patch(model, level="block")
    # One that nobody has imported yet.
    monkeypatch.setattr(inductor, "OPERATIONS", ("of_another_day", *inductor.OPERATIONS))
    found = lower(model)
    kernels = [str(getattr(op, "op_overload", "")) for op in found.graph.operations]
    assert kernels.count("flashnorm.linear.default") == 6
    assert kernels.count("flashnorm.rms_norm.default") == 1
    assert found.unknown == []


def test_every_operation_is_announced() -> None:
    import flashnorm_triton.attention  # noqa: F401
    import flashnorm_triton.block_ops  # noqa: F401

    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("flashnorm::") for name in names if name.startswith("flashnorm::")}
    assert ours == set(inductor.OPERATIONS)
