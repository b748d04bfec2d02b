"""What stands in the way of fusing a norm, apart from how its output flows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnorm_triton.models.linears import CONV1D, FOREIGN, LINEAR, linear_sizes
from flashnorm_triton.models.norms import NormTraits
from flashnorm_triton.models.placement import HOOK, only_moves_inputs
from flashnorm_triton.models.shadow import HOOK_TABLES
from flashnorm_triton.models.trace import Trace

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NORM_PARAMETERS = {
    "rms": {"weight"},
    "layer": {"weight", "bias"},
    "dyt": {"alpha", "weight", "bias"},
}


class Surroundings:
    """The modules of one model, and what they share: asked for the obstacles to each site."""

    def __init__(self, modules: dict[str, nn.Module], trace: Trace) -> None:
        self.modules = modules
        self.trace = trace
        self.shared = _shared_parameters(modules)

    def of_norm(self, name: str, traits: NormTraits) -> str | None:
        """Why nothing may take the place of the norm itself, or None."""
        if traits.kind not in _NORM_PARAMETERS:
            return "not recognised as a norm of one tensor over its last dimension"
        if traits.kind != "dyt" and (traits.eps is None or not traits.eps > 0):
            return f"its eps is {traits.eps}: the fused operation needs eps > 0"
        module, allowed = self.modules[name], _NORM_PARAMETERS[traits.kind]
        return (
            _hook_obstacle(name, module)
            or self._parameter_obstacle(name, module, allowed, may_share=False)
            or self._tensor_obstacle((name,))
            or self._ancestor_obstacle((name,))
        )

    def of_consumers(self, name: str, traits: NormTraits, may_share: bool) -> str | None:
        """Why the readers of the norm ``name`` cannot take it over, or None."""
        flow = self.trace.flows[name]
        for consumer, kind in flow.consumers.items():
            module = self.modules[consumer]
            if kind == FOREIGN:
                return _foreign(consumer, module)
            obstacle = _hook_obstacle(consumer, module)
            if obstacle is not None:
                return obstacle
            if self.trace.inputs[consumer] != {name}:
                return f"{consumer} also reads something other than this norm's output"
            allowed = {"weight", "bias"} if kind in (LINEAR, CONV1D) else None
            obstacle = self._parameter_obstacle(consumer, module, allowed, may_share)
            if obstacle is not None:
                return obstacle
        for passage in flow.readers:
            if passage not in flow.consumers:
                obstacle = _hook_obstacle(passage, self.modules[passage])
                if obstacle is not None:
                    return obstacle
        paths = (name, *flow.consumers)
        return (
            self._tensor_obstacle(paths)
            or self._size_obstacle(name, traits)
            or self._ancestor_obstacle(paths)
        )

    def shares_weights(self, name: str) -> bool:
        """Whether a reader of the norm ``name`` shares its weight with another (a tied head)."""
        return any(consumer in self.shared for consumer in self.trace.flows[name].consumers)

    def _parameter_obstacle(
        self, name: str, module: nn.Module, allowed: set[str] | None, may_share: bool
    ) -> str | None:
        """``allowed``: the parameters that a module of its kind has (None: whatever it likes)."""
        if name in self.trace.borrowed:
            return f"the weight of {name} is also used by the code of {self.trace.borrowed[name]}"
        if name in self.shared and not may_share:
            return f"{name} shares a parameter with {self.shared[name]}"
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.is_inference():
                return (
                    f"{name}.{key} is an inference tensor: build the model outside inference_mode"
                )
            if type(parameter) is not nn.Parameter:
                return (
                    f"{name}.{key} is a {type(parameter).__name__} (quantized or sharded), "
                    "not a plain parameter"
                )
        if allowed is None:
            return None
        extra = [key for key in module._parameters if key not in allowed]
        extra += [*module._buffers, *module._modules]
        if extra:
            return f"{name} carries state that a plain module has not: {', '.join(extra)}"
        return None

    def _ancestor_obstacle(self, paths: tuple[str, ...]) -> str | None:
        """A forward replaced on an instance above the site may not do what its class does."""
        for path in paths:
            parts = path.split(".")
            for depth in range(len(parts)):
                above = ".".join(parts[:depth])
                module = self.modules.get(above)
                if module is None or hasattr(module, HOOK):
                    continue
                if "forward" in vars(module):
                    return f"the forward of {above or 'the model'} was replaced on the instance"
                if isinstance(module, nn.TransformerEncoderLayer):
                    return f"{above or 'the model'} has a fast path that reads the weights itself"
        return None

    def _tensor_obstacle(self, paths: tuple[str, ...]) -> str | None:
        """Dtypes and devices of the site's parameters."""
        tensors: dict[str, Tensor] = {}
        for path in paths:
            for key, parameter in self.modules[path]._parameters.items():
                if parameter is not None:
                    tensors[f"{path}.{key}"] = parameter
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1:
            return "mixed dtypes at the site: " + ", ".join(
                f"{key} {str(tensor.dtype).removeprefix('torch.')}"
                for key, tensor in tensors.items()
            )
        if not dtypes <= set(_FLOATS):
            return (
                f"weights of dtype {dtypes.pop()}: the fused operation takes bf16, fp16, fp32, fp64"
            )
        devices = {str(tensor.device) for tensor in tensors.values()}
        if len(devices) > 1:
            return f"the site's parameters are on several devices: {', '.join(sorted(devices))}"
        if devices == {"meta"} and not self.trace.on_meta:
            return "the site's weights are not in memory (meta device): offloaded, or not loaded"
        return None

    def _size_obstacle(self, name: str, traits: NormTraits) -> str | None:
        consumers = self.trace.flows[name].consumers
        sizes = {
            linear_sizes(self.modules[path])[0]
            for path, kind in consumers.items()
            if kind in (LINEAR, CONV1D)
        }
        if traits.size is not None:
            sizes.add(traits.size)
        if len(sizes) > 1:
            return f"sizes do not fit: the norm and its linears have K = {sorted(sizes)}"
        return None


def _foreign(name: str, module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    if type(module) is nn.Linear and weight is not None and type(weight) is not nn.Parameter:
        return (
            f"{name}.weight is a {type(weight).__name__} (quantized or sharded), "
            "not a plain parameter"
        )
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{name} is a {kind} (quantized, LoRA or another wrapper), not a torch.nn.Linear"


def _hook_obstacle(name: str, module: nn.Module) -> str | None:
    if hasattr(module, HOOK):
        if not only_moves_inputs(module):
            return f"accelerate manages {name or 'the model'} (its weights are offloaded)"
    elif "forward" in vars(module):
        return f"the forward of {name or 'the model'} was replaced on the instance"
    for table in HOOK_TABLES:
        for hook in (getattr(module, table, None) or {}).values():
            if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
                return f"{name or 'the model'} has a hook that sees the norm's output"
    return None


def _shared_parameters(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Each module that shares a parameter with another, and that other's name."""
    holders: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    return {
        name: next((other for other in names if other != name), name)
        for names in holders.values()
        if len(names) > 1
        for name in names
    }
