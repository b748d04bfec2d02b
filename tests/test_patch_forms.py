"""The other forms of a fused site (LayerNorm, DyT, Conv1D, passed through): life around them."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import FAMILIES, build
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flashnorm_triton as fn
from flashnorm_triton import algebra
from flashnorm_triton.models import fused
from flashnorm_triton.models.fused import FusedNormLinear
from flashnorm_triton.models.normed import GainedLinear, NormedLinear, PassedThrough

BY_NAME = {family.name: family for family in FAMILIES}
# name -> family, options of patch: LayerNorm and Conv1D packed, a folded head, a tied head.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layer": ("opt", {}),
    "layer, in torch": ("opt", {"fold": False}),
    "conv1d": ("gpt2", {}),
    "head": ("llama", {"head": True}),
    "head, in the kernel": ("llama", {"head": True, "fold": False}),
    "tied head": ("gpt2", {"head": True}),
    "tied head, 1+w": ("gemma", {"head": True}),
}
EACH = pytest.mark.parametrize("form", FORMS)


def _patched(form: str, device: torch.device, seed: int = 0) -> tuple[nn.Module, fn.models.Any]:
    family, options = FORMS[form]
    model = build(BY_NAME[family], seed=seed).to(device)
    return model, fn.patch(model, **options)


def _stock(form: str, device: torch.device, seed: int = 0) -> nn.Module:
    return build(BY_NAME[FORMS[form][0]], seed=seed).to(device)


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    parameter = next(model.parameters())
    return model(token_ids().to(parameter.device), use_cache=False).logits.to(parameter.dtype)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _same(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> bool:
    """On the CPU: the stock weights of folded linears wait in host memory."""
    return list(ours) == list(stock) and all(
        ours[n].dtype == stock[n].dtype and torch.equal(ours[n].cpu(), stock[n].cpu())
        for n in stock
    )


def _assert_row_sums(model: nn.Module) -> None:
    """The kernels read them; in plain torch nobody does."""
    for module in model.modules():
        sums = module._buffers.get("row_sums")
        if sums is not None and isinstance(module, GainedLinear):
            source = module.site.source
            expected = algebra.row_sums(module.weight.detach(), source.gain(module.weight))
            torch.testing.assert_close(sums, expected)
        elif sums is not None:
            expected = algebra.row_sums(module._buffers["packed_weight"])
            assert torch.equal(sums, expected) and sums.dtype == expected.dtype


def _assert_close(ours: Tensor, stock: Tensor) -> None:
    torch.testing.assert_close(ours, stock, rtol=2e-4, atol=2e-4)


@EACH
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_whole_and_independent(form: str, how: Any, device: torch.device) -> None:
    stock, (model, handle) = _stock(form, device), _patched(form, device)
    logits = _logits(model)
    twin = how(model)
    assert torch.equal(_logits(twin), logits) and _same(_values(twin), _values(stock))
    handle.revert()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(_logits(twin), logits)
    with pytest.warns(UserWarning, match="already patched"):
        fn.patch(twin).revert()
    assert torch.equal(_logits(twin), _logits(stock)) and _same(_values(twin), _values(stock))


@EACH
@pytest.mark.parametrize("assign", [False, True])
def test_loading_other_weights(form: str, assign: bool, device: torch.device) -> None:
    (model, handle), other = _patched(form, device), _stock(form, device, seed=5)
    model.load_state_dict(_values(other), assign=assign)
    assert _same(_values(model), _values(other))
    _assert_close(_logits(model), _logits(other))
    _assert_row_sums(model)
    handle.revert()
    assert _same(_values(model), _values(other))
    assert torch.equal(_logits(model), _logits(other))


@EACH
def test_saved_checkpoint_is_the_stock_one(form: str, tmp_path: Path, device: torch.device) -> None:
    stock, (model, _) = _stock(form, device), _patched(form, device)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32).to(device)
    assert _same(_values(loaded), _values(stock))
    assert torch.equal(_logits(loaded), _logits(stock))


@EACH
def test_moving_to_another_dtype_and_back(form: str, device: torch.device) -> None:
    stock, (model, handle) = _stock(form, device), _patched(form, device)
    for convert in (nn.Module.double, nn.Module.bfloat16, nn.Module.float):
        convert(model), convert(stock)
        assert _same(_values(model), _values(stock))
        exact = _logits(copy.deepcopy(stock).double())
        ours, theirs = ((_logits(m).double() - exact).norm() for m in (model, stock))
        assert ours <= 1.25 * theirs + 1e-6 * exact.norm(), convert
        _assert_row_sums(model)
    handle.revert()
    assert torch.equal(_logits(model), _logits(stock))


@EACH
def test_compiles_without_a_break(form: str, device: torch.device) -> None:
    model, _ = _patched(form, device)
    expected, kinds = _logits(model), {}

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            kinds[node.name] = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        return graph.forward

    torch._dynamo.reset()
    _assert_close(_logits(torch.compile(model, fullgraph=True, backend=backend)), expected)
    derived = {n: kind for n, kind in kinds.items() if "packed" in n or "row_sums" in n}
    assert all(derived.values()), derived  # CUDA graphs copy every input that is not static


@pytest.mark.parametrize("form", ["layer, in torch", "head, in the kernel"])
def test_backward_equals_stock(form: str, device: torch.device) -> None:
    models = _stock(form, device).train(), _patched(form, device)[0].train()
    ids = token_ids(3, 17).to(device)
    for model in models:
        model.config.use_cache = False
        for module in model.modules():
            if isinstance(module, nn.Dropout) or hasattr(module, "dropout"):
                module.dropout = 0.0
        model(ids, labels=ids).loss.backward()
    stock, ours = ({n: p.grad for n, p in m.named_parameters()} for m in models)
    for name, grad in stock.items():
        if grad is None:
            assert ours[name] is None
        elif grad.norm() > 1e-4:
            assert (ours[name] - grad).norm() < 1e-3 * grad.norm(), name


@pytest.mark.parametrize("form", ["layer", "conv1d", "head", "tied head"])
def test_training_is_refused_where_something_derived_is_kept(
    form: str, device: torch.device
) -> None:
    model, handle = _patched(form, device)
    model.train()
    with pytest.raises(RuntimeError, match=r"revert\(\) and patch\(model, fold=False\)"):
        model(token_ids().to(device))
    handle.revert()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_head_returns_the_tensor_before_the_norm(device: torch.device) -> None:
    model, ids = tiny_model("llama").to(device), token_ids().to(device)
    before: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    model(ids)
    hook.remove()
    fn.patch(model, head=True)
    assert isinstance(model.lm_head, NormedLinear) and isinstance(model.model.norm, PassedThrough)
    torch.testing.assert_close(model.model(ids).last_hidden_state, before[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"fold": False}, {"revertible": False}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_a_fused_head_keeps_hidden_states(
    family: str, options: dict[str, Any], device: torch.device
) -> None:
    model, ids = build(BY_NAME[family]).to(device), token_ids().to(device)
    twin = copy.deepcopy(model)
    stock = model(ids, output_hidden_states=True)
    handle = fn.patch(model, head=True, **options)
    for patched in (model, copy.deepcopy(model)):
        ours = patched(ids, output_hidden_states=True)
        assert len(ours.hidden_states) == len(stock.hidden_states)
        for mine, theirs in zip(ours.hidden_states, stock.hidden_states, strict=True):
            _assert_close(mine, theirs)
        _assert_close(ours.logits, stock.logits)
    if options.get("revertible", True):
        handle.revert()
        assert not model._forward_hooks and torch.equal(model(ids).logits, twin(ids).logits)


def test_a_tied_head_shares_its_weight_still(device: torch.device) -> None:
    model = tiny_model("gemma").to(device)
    weight = model.lm_head.weight
    fn.patch(model, head=True)
    assert isinstance(model.lm_head, GainedLinear)
    assert model.lm_head.weight is weight is model.get_input_embeddings().weight


def test_a_conv1d_stays_a_conv1d(device: torch.device) -> None:
    from transformers.pytorch_utils import Conv1D

    model = tiny_model("gpt2").to(device)
    stock = model.transformer.h[0].attn.c_attn
    shape = stock.weight.shape
    fn.patch(model)
    ours = model.transformer.h[0].attn.c_attn
    assert isinstance(ours, Conv1D) and ours is not stock and ours.weight.shape == shape
    assert (ours.nx, ours.nf) == (stock.nx, stock.nf)
    assert "columns 0:192 of 192" in repr(ours)


def test_one_launch_for_a_parallel_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, operation = [], fused.norm_linear

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[1].shape[0])
        return operation(*args, **kwargs)

    monkeypatch.setattr(fused, "norm_linear", counted)
    model = build(BY_NAME["cohere"])
    fn.patch(model)
    _logits(model)
    assert calls == [64 + 32 + 32 + 112 + 112] * 2


class _DyT(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1) + 0.4)
        self.weight, self.bias = nn.Parameter(torch.rand(size)), nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class _RMS(nn.RMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-5)


class _Block(nn.Module):
    """A norm and the linears that read it, whose sum is the output."""

    def __init__(self, norm: nn.Module, count: int, looks_at_size: bool) -> None:
        super().__init__()
        self.norm, self.looks_at_size = norm, looks_at_size
        self.linears = nn.ModuleList(nn.Linear(24, 24, bias=i % 2 == 0) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.looks_at_size and y.shape[-1] != 24:
            raise ValueError("not the hidden size")
        return x + sum(linear(y) for linear in self.linears)


def _norm(kind: str) -> nn.Module:
    norm = {"dyt": _DyT, "layer": nn.LayerNorm, "rms": _RMS}[kind](24)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.3, 1.7)
    return norm


@pytest.mark.parametrize(
    ("kind", "count", "looks_at_size", "form"),
    [
        ("dyt", 2, False, "packed"),
        ("dyt", 1, True, "passthrough"),
        ("layer", 3, True, "passthrough"),
        ("rms", 3, True, "passthrough"),
        ("layer", 2, False, "packed"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_blocks(
    kind: str, count: int, looks_at_size: bool, form: str, dtype: torch.dtype, device: torch.device
) -> None:
    model = _Block(_norm(kind), count, looks_at_size).to(device, dtype).eval()
    x = torch.randn(64, 24, device=device).to(dtype)
    with torch.no_grad():
        exact, stock = copy.deepcopy(model).double()(x.double()), model(x)
        handle = fn.patch(model, example_inputs=(x,))
        assert [site.form for site in handle.report.sites] == [form], handle.report.to_json()
        ours = model(x)
        assert not torch.equal(ours, stock)
        assert (ours.double() - exact).norm() <= 1.25 * (stock.double() - exact).norm() + 1e-6
        handle.revert()
        assert torch.equal(model(x), stock)


@pytest.mark.parametrize(
    ("kind", "count", "looks_at_size", "why"),
    [("layer", 1, False, "stay the launches"), ("dyt", 2, True, "compute the tanh anew"),
     ("layer", 2, True, "compute the norm anew")],
)  # fmt: skip
def test_sites_that_save_nothing_unfolded_are_declined(
    kind: str, count: int, looks_at_size: bool, why: str
) -> None:
    model = _Block(_norm(kind), count, looks_at_size)
    handle = fn.patch(model, fold=False, example_inputs=(torch.randn(3, 24),))
    (site,) = handle.report.sites
    assert not handle.changed and site.decision == "keep" and why in site.reason
    assert site.launches_saved == 0


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "opt", "cohere"])
def test_weights_freed_for_good(family: str, device: torch.device) -> None:
    model, other = build(BY_NAME[family]).to(device), build(BY_NAME[family], seed=5).to(device)
    expected, stock = _logits(model), copy.deepcopy(model)
    first = [n for n, _ in model.named_parameters() if n.endswith(("q_proj.weight", "attn.weight"))]
    waiting = weakref.ref(model.get_parameter(first[0]))
    handle = fn.patch(model, revertible=False)
    assert waiting() is None
    _assert_close(_logits(model), expected)
    _assert_row_sums(model)
    with pytest.raises(RuntimeError, match=r"revertible=False, which freed.*load the original"):
        handle.revert()
    assert any(isinstance(module, FusedNormLinear) for module in model.modules())
    stock.load_state_dict(_values(model))  # the folded checkpoint, for stock modules
    _assert_close(_logits(stock), expected)
    twin = copy.deepcopy(model)
    assert torch.equal(_logits(twin), _logits(model))
    for patched in (model, twin):
        patched.load_state_dict(_values(other))  # a stock checkpoint, with gains
        _assert_close(_logits(patched), _logits(other))
        assert _same(_values(patched), _values(other))


def test_a_moved_bias_without_a_home_keeps_the_stock_weights() -> None:
    model, x = _Block(_norm("layer"), 2, False), torch.randn(3, 24)
    expected = model(x)
    handle = fn.patch(model, revertible=False, example_inputs=(x,))
    state = model.state_dict()
    handle.revert()
    assert torch.equal(model(x), expected) and _same(model.state_dict(), state)


class _Alive(TorchDispatchMode):
    """Bytes of all tensors that exist: the model's to begin with, and whatever is made inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)
        self.start = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._count(result)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if storage.device.type == "meta" or key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("fold", [True, False])
def test_no_more_than_one_site_exists_twice(fold: bool) -> None:
    """Whatever is not on the host at any time: the weights and 1.1 times the largest site."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = tiny_model("llama", torch.bfloat16, **sizes)
    largest = 2 * 1024 * (256 + 1) * 2  # gate and up, with their biases
    with _Alive(model) as alive:
        handle = fn.patch(model, fold=fold, revertible=False)
    assert largest <= alive.peak - alive.start <= 1.1 * largest
    assert alive.now <= alive.start + 20_000
    assert handle.memory.largest_site == largest and handle.memory.weights == alive.start


@pytest.mark.gpu
@pytest.mark.parametrize("revertible", [True, False])
def test_memory_is_measured_on_the_gpu(revertible: bool) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    model = tiny_model("llama", torch.bfloat16, **sizes).cuda()
    memory = fn.patch(model, revertible=revertible).memory
    assert memory.weights < memory.peak <= memory.weights + 1.1 * memory.largest_site
    assert memory.within_goal
