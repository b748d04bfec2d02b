"""Sites that must be left alone, each with its reason: wrappers, hooks, sharing, odd data flow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_ids
from torch import Tensor, nn
from torch.nn import functional as F

import flashnorm_triton as fn
from flashnorm_triton.models import SiteReport, audit

NORM = "model.layers.0.input_layernorm"


def _first(model: nn.Module) -> SiteReport:
    return next(site for site in audit(model).sites if site.norm == NORM)


class LoraLinear(nn.Module):
    """A wrapper as PEFT's: the plain linear inside, a low-rank path beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class QuantLinear(nn.Linear):
    """A stand-in for an 8-bit linear: integer weight, its own forward."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.scale = float(base.weight.detach().abs().max()) / 127
        weight = (base.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class SubclassTensor(Tensor):
    """A stand-in for a quantized or sharded weight under a plain nn.Linear."""


def _wrap(kind: type) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        attention = model.model.layers[0].self_attn
        attention.k_proj = kind(attention.k_proj)

    return change


def _subclass_weight(model: nn.Module) -> None:
    linear = model.model.layers[0].self_attn.k_proj
    weight = linear.weight.detach().as_subclass(SubclassTensor)
    linear.weight = nn.Parameter(weight, requires_grad=False)


def _hook(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_hook(lambda *_: None)

    return change


def _tie(model: nn.Module) -> None:
    first, second = model.model.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight


def _parametrize(model: nn.Module) -> None:
    linear = model.model.layers[0].self_attn.q_proj
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())


def _offload(model: nn.Module) -> None:
    model.model.layers[0].self_attn.q_proj._hf_hook = object()


def _half_loaded(model: nn.Module) -> None:
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, *[getattr(layer.self_attn, f"{p}_proj") for p in "qkv"]):
        module.to("meta")


def _replace_forward(model: nn.Module) -> None:
    layer = model.model.layers[0]
    layer.forward = type(layer).forward.__get__(layer)


def _mixed(model: nn.Module) -> None:
    model.model.layers[0].self_attn.k_proj.double()


def _wide_gain(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.double()


def _zero_eps(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.0


REFUSALS = {
    "lora": (_wrap(LoraLinear), "LoraLinear (quantized, LoRA or another wrapper)"),
    "quantized": (_wrap(QuantLinear), "QuantLinear (quantized, LoRA or another wrapper)"),
    "subclass": (_subclass_weight, "k_proj.weight is a SubclassTensor (quantized or sharded)"),
    "norm hook": (_hook(NORM), "has a hook"),
    "linear hook": (_hook("model.layers.0.self_attn.v_proj"), "v_proj has a hook"),
    "hook between": (_hook("model.layers.0.self_attn"), "self_attn has a hook"),
    "tied": (_tie, "k_proj shares a parameter with model.layers.1.self_attn.k_proj"),
    "parametrized": (_parametrize, "ParametrizedLinear (quantized"),
    "accelerate": (_offload, "accelerate manages model.layers.0.self_attn.q_proj"),
    "on meta": (_half_loaded, "not in memory (meta device)"),
    "forward replaced": (_replace_forward, "forward of model.layers.0 was replaced"),
    "mixed dtypes": (_mixed, "k_proj.weight float64"),
    "wide gain": (_wide_gain, "it turns torch.float32 into torch.float64"),
    "eps": (_zero_eps, "eps is 0.0"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_site_is_left_alone_with_the_reason(case: str) -> None:
    change, reason = REFUSALS[case]
    model = tiny_model("llama")
    change(model)
    site = _first(model)
    kept = ("norm hook", "on meta", "forward replaced", "wide gain", "eps")
    assert site.decision == ("keep" if case in kept else "norm_only") and reason in site.reason
    assert site.form == ""
    norm = model.get_submodule(NORM)
    ids = token_ids()
    expected = None
    if case not in ("on meta", "mixed dtypes", "wide gain"):
        expected = model(ids).logits
    handle = fn.patch(model)
    if case in kept:
        assert model.get_submodule(NORM) is norm
    others = 2 if case in ("tied", "forward replaced") else 3
    assert len(handle.report.fused) == others, handle.report.to_json()
    if expected is not None:
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    handle.revert()
    if expected is not None:
        assert torch.equal(model(ids).logits, expected)


def test_capture_hooks_of_transformers_do_not_count() -> None:
    model = tiny_model("llama")
    model(token_ids(), output_attentions=True, output_hidden_states=True)
    assert any(m._forward_hooks for m in model.modules())
    assert _first(model).decision == "fuse"


class Block(nn.Module):
    """One pre-norm block; ``variant`` is what the forward does with the normed tensor."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.norm = nn.RMSNorm(24, eps=1e-5)
        self.up, self.gate = nn.Linear(24, 40), nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Any:
        residual, y = x, self.norm(x)
        match self.variant:
            case "residual":
                residual = y
            case "size":
                residual = residual * y.shape[-1] ** -0.5
            case "size into op":
                residual = residual + torch.arange(y.shape[-1])
            case "heads":
                y = y.view(*y.shape[:-1], 3, 8).flatten(-2)
            case "literal":
                y = y.reshape(-1, 24).view(x.shape)
            case "part":
                y = torch.cat([y[..., :12], y[..., 12:]], -1)
            case "cast":
                y = y.double().float()
            case "dropout":
                y = F.dropout(y, 0.1, self.training)
            case "jitter" if self.training:
                y *= torch.empty_like(y).uniform_(0.9, 1.1)
            case "second input":
                residual = residual + self.down(self.up(x))
            case "weight borrowed":
                residual = residual + self.down(F.linear(x, self.up.weight))
            case "conditional":
                residual = residual + self.down(self.up(self.norm(x)))
            case "residual written":
                residual.add_(1.0)
                y = y.double().float()
            case "halved":
                y = 0.5 * y
            case "rows":
                y = y.reshape(-1, y.shape[-1])[:, None].squeeze(1).view(*x.shape[:-1], -1)
        up, gate = self.up(y), self.gate(y)
        if self.variant == "strided":
            up = up.view(up.shape[0], -1).view(*x.shape[:-1], -1)
        out = residual + self.down(F.silu(gate) * up)
        if self.variant == "returned":
            return {"out": out, "normed": y}
        return (out, y) if self.variant == "returned beside" else out


VARIANTS = {
    "heads": "view in Block depends on its output's last dimension",
    "part": "getitem in Block depends on its output's last dimension",
}
NORM_ONLY_VARIANTS = {
    "residual": "read by add",
    "dropout": "read by dropout",
    "jitter": "read by mul in Block",
    "returned": "also an output of the model, normed",
    "returned beside": "also an output of the model",
    "second input": "up also reads something other than this norm's output",
    "weight borrowed": "the weight of up is also used by the code of Block",
    "residual written": "its input is changed in place by add in Block",
    "halved": "its output is scaled before up, which has a bias",
}
PASSED_VARIANTS = {
    "size": "the size of its output's last dimension is computed with",
    "size into op": "the size of its output's last dimension goes into arange",
    "literal": "reshape in Block depends on its output's last dimension",
    "cast": "cast to float64",
    "conditional": "does not go to the same modules at every call",
    "strided": "with packed outputs the model fails or returns other shapes",
}


def _run(block: nn.Module, training: bool, inputs: tuple[torch.Tensor, ...]) -> Any:
    torch.manual_seed(0)
    return block.train(training)(*(value.clone() for value in inputs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_data_flow_that_fusing_would_break(variant: str) -> None:
    block, inputs = Block(variant).eval(), (torch.randn(2, 5, 24),)
    (site,) = audit(block, example_inputs=inputs).sites
    assert site.decision == "keep" and VARIANTS[variant] in site.reason, site.reason
    with pytest.warns(UserWarning, match="nothing to patch in Block"):
        fn.patch(block, example_inputs=inputs)


@pytest.mark.parametrize("variant", NORM_ONLY_VARIANTS)
def test_data_flow_that_leaves_the_norm_alone(variant: str) -> None:
    block, inputs = Block(variant).eval(), (torch.randn(2, 5, 24),)
    (site,) = audit(block, example_inputs=inputs).sites
    assert site.decision == "norm_only" and NORM_ONLY_VARIANTS[variant] in site.reason, site.reason
    assert site.form == "" and site.launches_saved >= 0
    stock = copy.deepcopy(block)
    with torch.no_grad():
        block.norm.weight.uniform_(0.3, 1.3)
        stock.load_state_dict(block.state_dict())
    fn.patch(block, example_inputs=inputs)
    for training in (True, False):
        ours, expected = (
            torch.utils._pytree.tree_leaves(_run(m, training, inputs)) for m in (block, stock)
        )
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("variant", PASSED_VARIANTS)
def test_data_flow_that_packing_would_break(variant: str) -> None:
    block, inputs = Block(variant).eval(), (torch.randn(2, 5, 24),)
    (site,) = audit(block, example_inputs=inputs).sites
    assert (site.decision, site.form) == ("fuse", "passthrough"), site.reason
    assert PASSED_VARIANTS[variant] in site.reason


def test_scaling_commutes_with_linears_without_a_bias() -> None:
    block, inputs = Block("halved").eval(), (torch.randn(2, 5, 24),)
    block.up.bias = block.gate.bias = None
    (site,) = audit(block, example_inputs=inputs).sites
    assert (site.decision, site.form) == ("fuse", "packed"), site.reason


@pytest.mark.parametrize("variant", ["plain", "rows"])
def test_data_flow_that_is_harmless(variant: str) -> None:
    block, inputs = Block(variant).eval(), (torch.randn(2, 5, 24),)
    nn.init.uniform_(block.norm.weight, 0.3, 1.7)
    expected = block(*inputs)
    handle = fn.patch(block, example_inputs=inputs)
    assert len(handle.report.fused) == 1
    torch.testing.assert_close(block(*inputs), expected)
    named = fn.audit(copy.deepcopy(Block(variant)), example_inputs={"x": inputs[0]})
    assert len(named.fused) == 1


def test_model_that_cannot_be_run_says_so() -> None:
    block = Block("plain")
    (site,) = audit(block).sites
    assert "takes no input_ids: pass example_inputs=" in site.reason
    with pytest.warns(UserWarning, match="pass example_inputs="):
        assert fn.patch(block).changed is False


def test_nothing_to_patch() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="nothing to patch in Sequential: it has no norms"):
        handle = fn.patch(plain, example_inputs=(torch.randn(2, 4),))
    handle.revert()
    assert handle.changed is False and type(plain[0]) is nn.Linear
    model = tiny_model("olmo2").model
    with pytest.warns(UserWarning, match="nothing to patch in Olmo2Model: .*last dimension"):
        fn.patch(model)


def test_meta_model_is_refused_before_anything_happens() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    before = dict(model.named_modules())
    with pytest.raises(
        ValueError, match="LlamaForCausalLM is on the meta device .*load it onto a device"
    ):
        fn.patch(model)
    assert dict(model.named_modules()) == before
    assert len(audit(model).fused) == 4


def test_model_built_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    with pytest.warns(UserWarning, match="inference tensor: build the model outside"):
        fn.patch(model)


def test_peft_lora() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tiny_model("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], r=4))
    site = next(s for s in audit(adapted).sites if s.norm.endswith(NORM))
    assert site.decision == "norm_only" and "is a peft.tuners.lora.layer.Linear" in site.reason
    assert site.consumer_kinds == ("linear", "foreign", "linear")


def test_accelerate_offload() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_model("llama")
    expected = model(token_ids()).logits
    accelerate.cpu_offload(model.model.layers[0], execution_device=torch.device("cpu"))
    handle = fn.patch(model)
    assert "accelerate manages" in _first(model).reason and len(handle.report.fused) == 2
    torch.testing.assert_close(model(token_ids()).logits, expected)
    whole = accelerate.cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="meta device .not loaded, or offloaded"):
        fn.patch(whole)


class Inner(nn.Module):
    """Returns its norm's output under a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.norm = name, nn.RMSNorm(24, eps=1e-5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {self.name: self.norm(x)}


class Outer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.head = Inner(name), nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[self.inner.name])


@pytest.mark.parametrize("name", ["last_hidden_state", "pooler_output"])
def test_what_a_module_inside_returns_under_names_that_are_not_hidden_states(name: str) -> None:
    (site,) = audit(Outer(name), head=True, example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.decision == ("fuse" if name == "last_hidden_state" else "norm_only"), site.reason


class Unused(nn.Module):
    """Holds a language model that its forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.embed = tiny_model("llama"), nn.Embedding(97, 24)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


def test_final_norm_of_a_part_that_was_traced_by_itself() -> None:
    """What the rest of the model makes of the part's outputs is not known."""
    sites = {site.norm: site for site in audit(Unused(), head=True).sites}
    assert sites["text.model.norm"].decision == "norm_only"
    assert "a model that was not traced" in sites["text.model.norm"].reason
    assert sites["text.model.layers.0.input_layernorm"].decision == "fuse"


class Odd(nn.Parameter):
    """As a sharded or quantized parameter is one."""


def test_norm_whose_gain_is_no_plain_parameter() -> None:
    model = nn.Sequential(nn.RMSNorm(24, eps=1e-5), nn.Linear(24, 40))
    model[0]._parameters["weight"] = Odd(torch.rand(24))
    (site,) = audit(model, example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.decision == "keep"
    assert "0.weight is a Odd (quantized or sharded), not a plain parameter" in site.reason


def test_linear_that_carries_state_of_its_own() -> None:
    model = nn.Sequential(nn.RMSNorm(24, eps=1e-5), nn.Linear(24, 40))
    model[1].register_buffer("seen", torch.zeros(1))
    (site,) = audit(model, example_inputs=(torch.randn(2, 5, 24),)).sites
    assert site.decision == "norm_only"
    assert "1 carries state that a plain module has not: seen" in site.reason
