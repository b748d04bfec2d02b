"""What happens to a patched model besides running: saving, copying, moving, reverting."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FUSED_FAMILIES, tiny_model, token_ids
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models import packed
from flashnorm_triton.models.fused import FusedNormLinear, PackedSlice

FOLDS = pytest.mark.parametrize("fold", [True, False])


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    ids = token_ids() if ids is None else ids
    return model(ids.to(next(model.parameters()).device)).logits


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[key].dtype == b[key].dtype and torch.equal(a[key].cpu(), b[key].cpu()) for key in a
    )


def _identity(model: nn.Module) -> dict[str, Any]:
    objects = {f"module {name}": id(module) for name, module in model.named_modules()}
    objects.update({f"value {name}": id(p) for name, p in model.named_parameters()})
    objects.update({f"learns {name}": p.requires_grad for name, p in model.named_parameters()})
    return objects


def _fused(model: nn.Module) -> list[FusedNormLinear]:
    return [module for module in model.modules() if isinstance(module, FusedNormLinear)]


def _assert_aliased(model: nn.Module) -> None:
    """Every slice's parameters lie in the packed storage of its site, at its own columns."""
    slices = [module for module in model.modules() if isinstance(module, PackedSlice)]
    assert slices
    owners = {id(module.site): module for module in _fused(model)}
    for piece in slices:
        owner = owners[id(piece.site)]
        packed = owner.get_buffer("packed_weight")
        stop = piece.start + piece.out_features
        assert piece.weight.data_ptr() == packed[piece.start :].data_ptr()
        assert piece.weight.dtype == packed.dtype and piece.weight.device == packed.device
        assert torch.equal(piece.weight, packed[piece.start : stop])
        if piece.bias is not None:
            assert (
                piece.bias.data_ptr() == owner.get_buffer("packed_bias")[piece.start :].data_ptr()
            )


@FOLDS
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_revert_is_bit_exact(family: str, fold: bool, device: torch.device) -> None:
    model = tiny_model(family, torch.bfloat16).to(device)
    values, identity, logits = _values(model), _identity(model), _logits(model)
    handle = fn.patch(model, fold=fold)
    assert handle.changed and len(_fused(model)) == 4 and _identity(model) != identity
    handle.revert()
    assert _identity(model) == identity and _same(_values(model), values)
    assert torch.equal(_logits(model), logits)
    assert all(p.device.type == device.type for p in model.parameters())
    handle.revert()
    assert _identity(model) == identity
    pointers = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(pointers) == len(set(pointers)), "parameters still share the packed storage"


@FOLDS
def test_state_dict_keeps_keys_order_and_values(fold: bool) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    values = _values(model)
    named = [name for name, _ in model.named_parameters()]
    fn.patch(model, fold=fold)
    assert _same(_values(model), values)
    assert [name for name, _ in model.named_parameters()] == named
    assert isinstance(model.model.layers[0].self_attn.q_proj, nn.Linear)
    _assert_aliased(model)


@FOLDS
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_save_pretrained_gives_the_stock_checkpoint(
    family: str, fold: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family)
    values, logits = _values(model), _logits(model)
    fn.patch(model, fold=fold)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not _fused(loaded) and _same(_values(loaded), values)
    assert torch.equal(_logits(loaded), logits)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 1.1 * sum(p.nbytes for p in loaded.parameters()) + 10_000


@FOLDS
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_into_a_patched_model(fold: bool, assign: bool) -> None:
    model, other = tiny_model("qwen2"), tiny_model("qwen2", seed=5)
    expected, values = _logits(other), _values(other)
    handle = fn.patch(model, fold=fold)
    model.load_state_dict(values, assign=assign)
    assert _same(_values(model), values)
    torch.testing.assert_close(_logits(model), expected, rtol=1e-4, atol=1e-4)
    _assert_aliased(model)
    handle.revert()
    assert _same(_values(model), values) and torch.equal(_logits(model), expected)


@FOLDS
def test_loading_a_single_linear(fold: bool) -> None:
    model, other = tiny_model("qwen2"), tiny_model("qwen2", seed=5)
    one = {k: v for k, v in other.state_dict().items() if "layers.0.self_attn.k_proj" in k}
    reference = copy.deepcopy(model)
    reference.load_state_dict(one, strict=False)
    fn.patch(model, fold=fold)
    model.load_state_dict(one, strict=False)
    assert len(one) == 2 and _same(_values(model), _values(reference))
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-4, atol=1e-4)
    for m in (model, reference):
        m.model.layers[1].mlp.up_proj.load_state_dict(
            other.model.layers[1].mlp.up_proj.state_dict()
        )
    assert _same(_values(model), _values(reference))
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-4, atol=1e-4)


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _assert_written_once(data: bytes, model: nn.Module) -> None:
    """The packed weights and, for a folded model, the stock weights: and nothing a second time."""
    assert len(data) < 2.2 * sum(p.nbytes for p in model.parameters())


def _pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    _assert_written_once(data, model)
    return pickle.loads(data)


def _torch_saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    _assert_written_once(file.getvalue(), model)
    file.seek(0)
    return torch.load(file, weights_only=False)


@FOLDS
@pytest.mark.parametrize("how", [_copied, _pickled, _torch_saved])
def test_copies_are_whole_and_independent(how: Any, fold: bool) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    stock, values = _logits(model), _values(model)
    handle = fn.patch(model, fold=fold)
    logits = _logits(model)
    twin = how(model)
    _assert_aliased(twin)
    assert torch.equal(_logits(twin), logits) and _same(_values(twin), values)
    assert fn.audit(twin) == handle.report
    handle.revert()
    assert torch.equal(_logits(model), stock)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(_logits(twin), logits)
    with pytest.warns(UserWarning, match="already patched"):
        fn.patch(twin).revert()
    assert torch.equal(_logits(twin), stock) and _same(_values(twin), values)


@FOLDS
def test_moving_keeps_views_in_the_packed_storage(fold: bool, device: torch.device) -> None:
    model = tiny_model("qwen2")
    reference = copy.deepcopy(model)
    handle = fn.patch(model, fold=fold)
    for convert in (nn.Module.half, nn.Module.float, nn.Module.bfloat16):
        convert(model), convert(reference)
        _assert_aliased(model)
        assert _same(_values(model), _values(reference))
        exact = _logits(copy.deepcopy(reference).double())
        ours, stock = ((_logits(m) - exact).norm() for m in (model, reference))
        assert ours <= 1.25 * stock + 1e-6 * exact.norm(), convert
    model.to(device), reference.to(device)
    _assert_aliased(model)
    handle.revert()
    assert _same(_values(model), _values(reference))
    assert torch.equal(_logits(model), _logits(reference))


def test_moving_part_of_a_model_and_then_all_of_it() -> None:
    model = tiny_model("qwen2")
    fn.patch(model)
    logits = _logits(model)
    layer = model.model.layers[0]
    layer.self_attn.double()
    assert layer.self_attn.q_proj.weight.dtype == torch.float64
    _assert_aliased(model)
    model.double()
    _assert_aliased(model)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    torch.testing.assert_close(_logits(model).float(), logits, rtol=1e-4, atol=1e-4)
    model.float()
    layer.self_attn.q_proj.double()
    layer.self_attn.q_proj.float()
    _assert_aliased(model)
    torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-4)


@FOLDS
def test_packed_tensors_are_moved_once_however_many_modules_share_them(fold: bool) -> None:
    model = tiny_model("qwen2")
    handle = fn.patch(model, fold=fold)
    moved: list[int] = []

    def move(tensor: Tensor) -> Tensor:
        moved.append(tensor.data_ptr())
        return tensor.clone()

    for _ in range(2):
        moved.clear()
        matrices = {module.get_buffer("packed_weight").data_ptr() for module in _fused(model)}
        biases = {view["bias"].data_ptr() for m in _fused(model) for view in m.site.views
                  if view.get("bias") is not None}  # fmt: skip
        model._apply(move)
        assert all(moved.count(pointer) == 1 for pointer in matrices) and len(matrices) == 4
        assert len(biases & set(moved)) == 2
        _assert_aliased(model)
    # The norm alone, then the linears alone: each time the shared tensors follow.
    layer = model.model.layers[0]
    layer.input_layernorm.double()
    layer.self_attn.half()
    assert layer.self_attn.q_proj.weight.dtype == torch.float16
    _assert_aliased(model)
    handle.revert()


def test_to_empty_and_reload() -> None:
    model = tiny_model("llama")
    values, logits = _values(model), _logits(model)
    fn.patch(model)
    model.to("meta")
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        assert model(token_ids().to("meta")).logits.shape == logits.shape
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    model.model.rotary_emb = tiny_model("llama").model.rotary_emb
    torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-4)


def test_patching_twice_does_nothing_and_says_so() -> None:
    model = tiny_model("llama")
    first = fn.patch(model)
    identity = _identity(model)
    with pytest.warns(UserWarning, match=r"already patched \(5 sites, fold=True\)"):
        second = fn.patch(model, fold=False)
    assert _identity(model) == identity and second.report == first.report
    assert first.changed and not second.changed
    second.revert()
    assert not _fused(model)


def test_second_model_and_classes_are_untouched() -> None:
    from transformers.models.llama import modeling_llama

    before = {name: dict(vars(cls)) for name, cls in vars(modeling_llama).items()
              if isinstance(cls, type)}  # fmt: skip
    functions = {name: id(value) for name, value in vars(torch.nn.functional).items()}
    one, two = tiny_model("llama"), tiny_model("llama", seed=1)
    identity, logits = _identity(two), _logits(two)
    fn.patch(one)
    assert _identity(two) == identity and torch.equal(_logits(two), logits)
    for name, attributes in before.items():
        assert dict(vars(getattr(modeling_llama, name))) == attributes
    assert {name: id(value) for name, value in vars(torch.nn.functional).items()} == functions
    assert not any("forward" in vars(module) for module in one.modules())


def test_patched_reverts_on_exceptions_and_leaves_an_outer_patch() -> None:
    model = tiny_model("llama")
    identity = _identity(model)
    with pytest.raises(KeyError), fn.patched(model) as handle:
        assert handle.changed and len(_fused(model)) == 4
        raise KeyError("inside")
    assert _identity(model) == identity
    fn.patch(model)
    with pytest.warns(UserWarning, match="already patched"), fn.patched(model):
        pass
    assert len(_fused(model)) == 4


def _fail_at_third(monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException) -> None:
    original, calls = getattr(packed.PackedSite, step), []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise error
        return original(self, *args)

    monkeypatch.setattr(packed.PackedSite, step, failing)


@FOLDS
@pytest.mark.parametrize("step", ["_pack", "take", "replacements"])
def test_a_site_that_fails_is_kept_and_the_report_says_why(
    fold: bool, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    values, identity, logits = _values(model), _identity(model), _logits(model)
    _fail_at_third(monkeypatch, step, torch.OutOfMemoryError("no room for the third site"))
    with pytest.warns(RuntimeWarning, match="1 of LlamaForCausalLM's sites.*no room") as caught:
        handle = fn.patch(model, fold=fold)
    assert len(caught) == 1 and len(_fused(model)) == 3 and handle.changed
    failed = handle.report.kept[0]
    assert failed.norm == "model.layers.1.input_layernorm" and failed.launches_saved == 0
    assert "could not be patched: OutOfMemoryError: no room for the third site" in failed.reason
    assert fn.audit(model) == handle.report
    kept = model.model.layers[1]
    for module in (kept.input_layernorm, kept.self_attn.q_proj):
        assert f"module {_name_of(model, module)}" in identity
        assert identity[f"module {_name_of(model, module)}"] == id(module)
    torch.testing.assert_close(_logits(model), logits, rtol=1e-4, atol=1e-4)
    assert _same(_values(model), values)
    handle.revert()
    assert _identity(model) == identity and torch.equal(_logits(model), logits)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


@FOLDS
def test_an_interrupt_while_patching_leaves_the_model_as_it_was(
    fold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    values, identity, logits = _values(model), _identity(model), _logits(model)
    _fail_at_third(monkeypatch, "take", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fn.patch(model, fold=fold)
    assert _identity(model) == identity and _same(_values(model), values)
    assert torch.equal(_logits(model), logits)


def test_parameters_cannot_be_replaced_while_packed() -> None:
    model = fn.patch(tiny_model("llama")).model
    linear = model.model.layers[0].self_attn.q_proj
    with pytest.raises(RuntimeError, match="cannot replace 'weight'.*handle.revert()"):
        linear.weight = nn.Parameter(torch.zeros(64, 64))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(24, eps=1e-5), nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)
        nn.init.uniform_(self.norm.weight, 0.3, 1.7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_modules_shared_by_layers_stay_shared() -> None:
    block, x = _Block(), torch.randn(3, 24)
    third = _Block()
    third.norm, third.up = block.norm, block.up
    model = nn.Sequential(block, block, third, _Block()).eval()
    expected = model(x)
    identity = _identity(model)
    handle = fn.patch(model, example_inputs=(x,))
    assert len(handle.report.fused) == 2 and model[0] is model[1]
    assert third.norm is block.norm and third.up is block.up and len(_fused(model)) == 2
    torch.testing.assert_close(model(x), expected)
    handle.revert()
    assert _identity(model) == identity and torch.equal(model(x), expected)
    assert third.norm is block.norm and type(third.up) is nn.Linear


@pytest.mark.gpu
@FOLDS
def test_memory_on_the_gpu(fold: bool) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    model = tiny_model("llama", torch.bfloat16, **sizes).cuda()
    site = 2 * 4096 * 1024 * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    handle = fn.patch(model, fold=fold)
    # The product of a fold is made in float32, part by part.
    assert torch.cuda.max_memory_allocated() <= before + site + 3 * 4 * 4096 * 1024
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    torch.cuda.reset_peak_memory_stats()
    handle.revert()
    assert torch.cuda.max_memory_allocated() <= before + site + (1 << 20)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("head", [False, True])
def test_modes_set_while_patched_stay_after_revert(head: bool) -> None:
    model = tiny_model("llama")
    handle = fn.patch(model, head=head)
    model.train()
    handle.revert()
    assert all(module.training for module in model.modules())
