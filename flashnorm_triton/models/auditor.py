"""The audit: which norms of a model can be fused with the linears that read them, and why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.flow import Flow
from flashnorm_triton.models.installers import sites_of
from flashnorm_triton.models.norms import NormReader, NormTraits, is_candidate
from flashnorm_triton.models.report import AuditReport, SiteReport
from flashnorm_triton.models.shadow import HOOK_TABLES
from flashnorm_triton.models.trace import Packing, Trace, Tracer

_REASONS = 2  # what is told of the obstacles to one norm
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def audit(
    model: nn.Module, *, example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None
) -> AuditReport:
    """Say of every norm of ``model`` whether it can be fused, with which linears, or why not.

    The model's double is run on fake tensors (no memory, no arithmetic) and each norm's output is
    followed to its readers; no list of model names is involved. The model may be on any device,
    meta included; it is only read. ``example_inputs`` (a dict of keyword arguments or a tuple of
    positional ones) are needed only by models that take no ``input_ids``. Of a model that is
    patched, what was found when it was patched is said again.

    Raises TypeError for something that is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit needs a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    for site in sites_of(model):
        return site.audit
    modules = dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if is_candidate(module)}
    reader = NormReader()
    traits = {name: reader.read(module) for name, module in norms.items()}
    try:
        tracer = Tracer(model, norms, example_inputs)
    except Exception as error:
        failure = f"the model could not be copied for tracing: {type(error).__name__}: {error}"
        trace = Trace({name: Flow(name) for name in norms}, failure=failure)
        return _report(model, norms, traits, trace, dict.fromkeys(norms, failure))
    trace = tracer.follow()
    shared = _shared_parameters(modules)
    obstacles = {name: _obstacle(name, traits[name], modules, trace, shared) for name in norms}
    _rehearse(tracer, modules, trace, obstacles)
    return _report(model, norms, traits, trace, obstacles)


def _report(
    model: nn.Module,
    norms: dict[str, nn.Module],
    traits: dict[str, NormTraits],
    trace: Trace,
    obstacles: dict[str, str | None],
) -> AuditReport:
    sites = []
    for name, module in norms.items():
        flow, trait, obstacle = trace.flows[name], traits[name], obstacles[name]
        site = SiteReport(
            norm=name,
            norm_class=type(module).__name__,
            kind=trait.kind,
            convention=trait.convention,
            eps=trait.eps,
            consumers=tuple(flow.consumers),
            decision="keep",
            reason=obstacle or "",
        )
        if obstacle is None:
            count = len(flow.consumers)
            site = replace(
                site,
                decision="fuse",
                reason=f"read by {count} plain linear{'s' if count > 1 else ''} and nothing else",
                launches_saved=flow.operations + count - 1,
            )
        sites.append(site)
    return AuditReport(type(model).__name__, tuple(sites))


def _obstacle(
    name: str,
    traits: NormTraits,
    modules: dict[str, nn.Module],
    trace: Trace,
    shared: dict[str, str],
) -> str | None:
    """Why the norm ``name`` must be kept, or None when it can be fused."""
    flow = trace.flows[name]
    if traits.kind == "layer":
        return "a LayerNorm (it subtracts the mean): only RMS norms are fused"
    if traits.kind != "rms":
        return "not recognised as an RMS norm of one tensor over its last dimension"
    if traits.eps is None or not traits.eps > 0:
        return f"its eps is {traits.eps}: the fused operation needs eps > 0"
    if trace.failure is not None:
        return trace.failure
    if flow.obstacles:
        return "; ".join(list(flow.obstacles)[:_REASONS])
    if not flow.calls:
        return "not reached by the traced forward"
    if not flow.consumers:
        return "nothing reads its output"
    if len(flow.call_sets) > 1:
        return "its output does not go to the same linears at every call"
    norm_obstacle = _module_obstacle(name, modules[name], {"weight"}, trace, shared)
    if norm_obstacle is not None:
        return norm_obstacle
    for consumer in flow.consumers:
        if trace.linear_inputs[consumer] != {name}:
            return f"{consumer} also reads something other than this norm's output"
        obstacle = _module_obstacle(consumer, modules[consumer], {"weight", "bias"}, trace, shared)
        if obstacle is not None:
            return obstacle
    for passage in flow.readers:
        if passage not in flow.consumers:
            obstacle = _hook_obstacle(passage, modules[passage])
            if obstacle is not None:
                return obstacle
    return _tensor_obstacle(name, traits, trace, modules) or _ancestor_obstacle(name, flow, modules)


def _module_obstacle(
    name: str, module: nn.Module, allowed: set[str], trace: Trace, shared: dict[str, str]
) -> str | None:
    obstacle = _hook_obstacle(name, module)
    if obstacle is not None:
        return obstacle
    if name in trace.borrowed:
        return f"the weight of {name} is also used by the code of {trace.borrowed[name]}"
    if name in shared:
        return f"{name} shares a parameter with {shared[name]}"
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter.is_inference():
            return f"{name}.{key} is an inference tensor: build the model outside inference_mode"
        if type(parameter) is not nn.Parameter:
            return (
                f"{name}.{key} is a {type(parameter).__name__} (quantized or sharded), "
                "not a plain parameter"
            )
    extra = [key for key in module._parameters if key not in allowed]
    extra += [*module._buffers, *module._modules]
    if extra:
        return f"{name} carries state that a plain module has not: {', '.join(extra)}"
    if "weight" in allowed and "bias" in allowed and module._parameters.get("weight") is None:
        return f"{name}.weight is not a parameter (weight norm or pruning)"
    return None


def _hook_obstacle(name: str, module: nn.Module) -> str | None:
    if hasattr(module, "_hf_hook"):
        return f"accelerate manages {name or 'the model'} (offloaded or spread over devices)"
    if "forward" in vars(module):
        return f"the forward of {name or 'the model'} was replaced on the instance"
    for table in HOOK_TABLES:
        for hook in (getattr(module, table, None) or {}).values():
            if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
                return f"{name or 'the model'} has a hook that sees the norm's output"
    return None


def _ancestor_obstacle(name: str, flow: Flow, modules: dict[str, nn.Module]) -> str | None:
    """A forward replaced on an instance above the site may not do what its class does."""
    for path in (name, *flow.consumers):
        parts = path.split(".")
        for depth in range(len(parts)):
            above = ".".join(parts[:depth])
            module = modules.get(above)
            if module is None or hasattr(module, "_hf_hook"):
                continue
            if "forward" in vars(module):
                return f"the forward of {above or 'the model'} was replaced on the instance"
    return None


def _tensor_obstacle(
    name: str, traits: NormTraits, trace: Trace, modules: dict[str, nn.Module]
) -> str | None:
    """Sizes, dtypes and devices of the site's parameters."""
    flow = trace.flows[name]
    tensors: dict[str, Tensor] = {}
    for path in (name, *flow.consumers):
        for key, parameter in modules[path]._parameters.items():
            if parameter is not None:
                tensors[f"{path}.{key}"] = parameter
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        return "mixed dtypes at the site: " + ", ".join(
            f"{key} {str(tensor.dtype).removeprefix('torch.')}" for key, tensor in tensors.items()
        )
    if not dtypes <= set(_FLOATS):
        return f"weights of dtype {dtypes.pop()}: the fused operation takes bf16, fp16, fp32, fp64"
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        return f"the site's parameters are on several devices: {', '.join(sorted(devices))}"
    if devices == {"meta"} and not trace.on_meta:
        return "the site's weights are not in memory (meta device): offloaded, or not loaded"
    sizes = {modules[path].in_features for path in flow.consumers}
    if traits.size is not None:
        sizes.add(traits.size)
    if len(sizes) > 1:
        return f"sizes do not fit: the norm and its linears have K = {sorted(sizes)}"
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


def _rehearse(
    tracer: Tracer,
    modules: dict[str, nn.Module],
    trace: Trace,
    obstacles: dict[str, str | None],
) -> None:
    """Run the double with all accepted sites packed; drop those where the shapes do not hold."""
    while True:
        accepted = [name for name, obstacle in obstacles.items() if obstacle is None]
        if not accepted:
            return
        failed_at = tracer.rehearse(_packing(name, trace.flows[name], modules) for name in accepted)
        if failed_at is None:
            return
        place = failed_at or "the model"
        near = _pattern(failed_at.rpartition(".")[0])
        at_fault = [
            name
            for name in accepted
            if any(_pattern(path).startswith(near) for path in (name, *trace.flows[name].consumers))
        ]
        for name in at_fault or accepted:
            obstacles[name] = f"with packed outputs {place} fails or returns other shapes"


def _packing(name: str, flow: Flow, modules: dict[str, nn.Module]) -> Packing:
    columns, start = {}, 0
    for consumer in flow.consumers:
        stop = start + modules[consumer].out_features
        columns[consumer] = (start, stop)
        start = stop
    return Packing(name, columns)


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)
