"""Layers that are alike are traced once; one that differs in anything is traced by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from flashnorm_triton.models import audit, repeats
from flashnorm_triton.models.report import AuditReport
from flashnorm_triton.models.sightings import Flow
from flashnorm_triton.models.skeleton import from_type

_WIDTH = 16


class _Norm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(_WIDTH) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class _Shared:
    """What all layers refer to, as to a model's config."""

    def __init__(self) -> None:
        self.kinds = ["plain"] * 6
        self.count = 0
        self.kept: Tensor | None = None


class _Layer(nn.Module):
    runs: list[int] = []

    def __init__(self, place: int, shared: _Shared) -> None:
        super().__init__()
        self.layer_idx, self.shared = place, shared
        self.scaled, self.read_by = False, "up"
        self.norm = _Norm()
        self.up, self.side = nn.Linear(_WIDTH, 24), nn.Linear(_WIDTH, 24)
        self.down = nn.Linear(24, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs.append(0)
        return x + self.down(torch.relu(self.inner(self.norm(x), x)))

    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        if self.scaled:
            normed = normed + 1
        return self.get_submodule(self.read_by)(normed)


class _Model(nn.Module):
    def __init__(self, kind: type[_Layer] = _Layer, change: Callable[[Any], None] | None = None):
        super().__init__()
        shared = _Shared()
        self.layers = nn.ModuleList(kind(place, shared) for place in range(6))
        if change is not None:
            change(self.layers[3])

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if isinstance(layer, _ByState):
                layer.shared.count = place
            x = layer(x)
        return x


class _Cached(_Model):
    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache, LlamaConfig

        cache = DynamicCache(config=LlamaConfig(num_hidden_layers=len(self.layers)))
        for layer in self.layers:
            x = layer(x, cache)
        return x


class _ByNumber(_Layer):
    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        return super().inner(normed if self.layer_idx != 3 else normed + 1, x)


class _ByKind(_Layer):
    """Finds in a list, by its number, what to do: nothing is computed with the number."""

    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        kind = self.shared.kinds[self.layer_idx]
        return super().inner(normed if kind == "plain" else normed + 1, x)


class _ByCount(_Layer):
    """Changes, and reads, an object that all layers share."""

    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        self.shared.count += 1
        return super().inner(normed if self.shared.count % 6 != 3 else normed + 1, x)


class _Leaks(_Layer):
    """Reads what the layer before left in an object that all layers share."""

    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        before, self.shared.kept = self.shared.kept, normed
        return super().inner(normed, x) + (0 if before is None else before.sum())


class _ByState(_Layer):
    """Reads what the model has written for it into an object that all layers share."""

    def inner(self, normed: Tensor, x: Tensor) -> Tensor:
        return super().inner(normed if self.shared.count != 3 else normed + 1, x)


class _Caching(_Layer):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.update(x[:, None], x[:, None], self.layer_idx)
        return super().forward(x)


class _ByCache(_Layer):
    """Looks at another layer's part of the cache, which the first one finds empty."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        self.scaled = cache.layers[0].get_seq_length() == 0
        cache.update(x[:, None], x[:, None], self.layer_idx)
        output, self.scaled = super().forward(x), False
        return output


class _Returns(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def _eps(layer: Any) -> None:
    layer.norm.eps = 0.5


def _operation(layer: Any) -> None:
    class Other(type(layer)):
        def inner(self, normed: Tensor, x: Tensor) -> Tensor:
            return super().inner(normed * torch.arange(_WIDTH), x)

    layer.__class__ = Other


def _reader(layer: Any) -> None:
    layer.read_by = "side"


def _attribute(layer: Any) -> None:
    layer.scaled = True


def _width(layer: Any) -> None:
    layer.up, layer.down = nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)


def _kind(layer: Any) -> None:
    layer.shared.kinds[3] = "other"


def _nothing(layer: Any) -> None:
    pass


def _both(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AuditReport:
    """The audit, which must be that of a model all of whose layers are traced."""
    report = audit(model, **options)
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "alike_groups", lambda *arguments: {})
        wanted = audit(model, **options)
    assert report.sites == wanted.sites
    return report


INPUTS = {"x": torch.randn(2, 5, _WIDTH)}


@pytest.mark.parametrize("change", [_eps, _operation, _reader, _attribute, _width])
def test_a_layer_that_differs_is_traced_by_itself(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = audit(_Model(), example_inputs=INPUTS).sites
    sites = _both(_Model(change=change), monkeypatch, example_inputs=INPUTS).sites
    for place, (site, before) in enumerate(zip(sites, plain, strict=True)):
        assert (site == before) == (place != 3 or change is _width), (place, site)


@pytest.mark.parametrize("kind", [_ByNumber, _ByKind, _ByCount, _ByState, _Leaks, _Returns])
def test_layers_that_are_not_told_apart_by_their_attributes(
    kind: type[_Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = _kind if kind is _ByKind else _nothing
    sites = _both(_Model(kind, change), monkeypatch, example_inputs=INPUTS).sites
    if kind in (_ByNumber, _ByKind, _ByCount, _ByState):
        odd = 2 if kind is _ByCount else 3
        kept = [place for place, site in enumerate(sites) if site.decision == "keep"]
        assert kept == [odd]


@pytest.mark.parametrize("kind", [_Caching, _ByCache])
def test_each_layer_has_its_part_of_the_cache(
    kind: type[_Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _Layer.runs.clear()
    sites = _both(_Cached(kind), monkeypatch, example_inputs=INPUTS).sites
    kept = [place for place, site in enumerate(sites) if site.decision == "keep"]
    assert kept == ([] if kind is _Caching else [0])
    assert len(kind.runs) == (7 * 3 if kind is _Caching else 6 * 6), len(kind.runs)


def test_alike_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Model()
    for change in (_nothing, _eps):
        change(model.layers[3])
        _Layer.runs.clear()
        audit(model, example_inputs=INPUTS)
        alone = len(_Layer.runs)
        with monkeypatch.context() as patch:
            patch.setattr(repeats, "alike_groups", lambda *arguments: {})
            _Layer.runs.clear()
            audit(model, example_inputs=INPUTS)
        assert alone * (6 if change is _nothing else 3) == len(_Layer.runs)


def test_layers_that_share_a_module_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Model()
    model.layers[4].up = model.layers[2].up
    sites = _both(model, monkeypatch, example_inputs=INPUTS).sites
    assert [place for place, site in enumerate(sites) if site.decision != "fuse"] == [2, 4]


def test_a_copied_part_of_a_cache_has_tables_of_its_own() -> None:
    from transformers.cache_utils import LinearAttentionLayer

    part = LinearAttentionLayer()
    part.states, part.keys = {0: torch.randn(2)}, torch.randn(3)
    other = repeats._copied(part)
    assert other.keys is part.keys and other.states[0] is part.states[0]
    other.states[1] = other.keys
    assert list(part.states) == [0]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "gpt2", "jamba"])
def test_families_say_what_they_say_traced_in_full(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = []
    original = repeats.Repeats._repeat

    def counted(self: Any, group: Any, name: str, *rest: Any) -> Any:
        repeated.append(name)
        return original(self, group, name, *rest)

    monkeypatch.setattr(repeats.Repeats, "_repeat", counted)
    depth = {"num_hidden_layers": 4} if family == "gemma2" else {}
    model = from_type(family, 2) if family == "jamba" else tiny_model(family, **depth)
    _both(model, monkeypatch, cancel="exact", head=True)
    assert repeated


def test_depth_costs_little() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        models = [
            Qwen3ForCausalLM(
                Qwen3Config(
                    num_hidden_layers=layers,
                    hidden_size=256,
                    intermediate_size=512,
                    num_attention_heads=8,
                    num_key_value_heads=2,
                    head_dim=32,
                )
            )
            for layers in (2, 40)
        ]
    audit(models[0], cancel="exact")
    seconds = []
    for model in models:
        started = time.process_time()
        audit(model, cancel="exact")
        seconds.append(time.process_time() - started)
    assert seconds[1] < 8 * seconds[0], seconds  # 20 times the layers


def test_what_is_written_down_of_one_layer_is_told_of_the_other_in_full() -> None:
    flow = Flow("norm")
    flow.calls = flow.operations = 3
    for name in ("consumers", "returned"):
        getattr(flow, name)["a"] = name
    for name in ("scaled", "outputs", "readers"):
        getattr(flow, name)["a"] = None
    flow.obstacles["why"] = ("packed",)
    flow.unlike = "why"
    flow.call_sets.add(frozenset("a"))
    empty = Flow("norm")
    assert all(getattr(flow, f.name) != getattr(empty, f.name) for f in fields(Flow)[1:])
    assert flow.of_another(str, str) == flow
    for field in fields(Flow)[3:-1]:
        one = Flow("norm")
        setattr(one, field.name, getattr(flow, field.name))
        assert one.size() != empty.size(), field.name
