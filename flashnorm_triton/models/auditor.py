"""The audit: which norms of a model can be fused with what reads them, how, and why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from flashnorm_triton.models.block.find import find_blocks, still_blocks
from flashnorm_triton.models.installers import sites_of
from flashnorm_triton.models.linears import CONV1D, LINEAR, linear_sizes
from flashnorm_triton.models.norms import NormReader, NormTraits, is_candidate
from flashnorm_triton.models.obstacles import Surroundings
from flashnorm_triton.models.report import AuditReport, SiteReport
from flashnorm_triton.models.rows import NEVER_FUSED
from flashnorm_triton.models.sightings import PACKED, PASSTHROUGH, Flow
from flashnorm_triton.models.trace import Rehearsal, Trace, Tracer
from flashnorm_triton.models.worth import nothing_gained

_REASONS = 2  # what is told of the obstacles to one norm
_EXPERTS = "experts"
_APART = " (seen by tracing "
# What a model returns of the final norm on request alone: patch puts it right there.
_STATES = {"hidden_states", "decoder_hidden_states"}


def audit(
    model: nn.Module,
    *,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    cancel: bool | str = False,
    head: bool = False,
    blocks: bool = True,
) -> AuditReport:
    """Say of every norm of ``model`` whether it can be fused, with which modules, or why not.

    The model's double is run on fake tensors (no memory, no arithmetic) and each norm's output is
    followed to its readers; no list of model names is involved. The model may be on any device,
    meta included; it is only read. ``example_inputs`` (a dict of keyword arguments or a tuple of
    positional ones) are needed only by models that take no ``input_ids``. ``head=True`` counts a
    norm as a site whose output modules inside the model also return (the final norm before the
    head); what the whole model returns stays as it is. ``cancel`` ("exact",
    "fast") also looks for norms that can be dropped, as their readers are normalised again.
    ``blocks=False`` does not look for whole layers that could be patched. Of a model that is
    patched, what was found when it was patched is said again.

    Raises TypeError for something that is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit needs a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    for site in sites_of(model):
        return site.audit
    report, _ = _whole(model, example_inputs, head, blocks)
    if cancel:
        from flashnorm_triton.models.cancel import cancellations

        report = cancellations(model, report, cancel, example_inputs)
        report = replace(report, blocks=still_blocks(report.blocks, report.sites))
    return report


def _whole(
    model: nn.Module, example_inputs: Any, head: bool, blocks: bool, part: bool = False
) -> tuple[AuditReport, set[str]]:
    """The report of one model, parts included, and the norms that no trace has reached.

    ``part``: what the model around this one makes of its outputs is not known.
    """
    modules = dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if is_candidate(module)}
    reader = NormReader()
    traits = {name: reader.read(module) for name, module in norms.items()}
    try:
        tracer = Tracer(model, norms, example_inputs)
    except Exception as error:
        failure = f"the model could not be copied for tracing: {type(error).__name__}: {error}"
        trace = Trace({name: Flow(name) for name in norms}, failure=failure)
        verdicts = {name: Verdict("keep", failure) for name in norms}
    else:
        trace = tracer.follow()
        surroundings = Surroundings(modules, trace)
        verdicts = {name: _verdict(name, traits[name], surroundings, head, part) for name in norms}
        _rehearse(tracer, modules, trace, traits, verdicts)
    report = _report(model, norms, traits, trace, verdicts)
    if blocks:
        operations = {name: flow.operations for name, flow in trace.flows.items()}
        found = find_blocks(modules, report.sites, trace, traits, operations)
        report = replace(report, blocks=found)
    unseen = {name for name in norms if trace.failure or not trace.flows[name].calls}
    if example_inputs is None:
        report, unseen = _with_parts(modules, report, unseen, blocks)
    return report, unseen


def _with_parts(
    modules: dict[str, nn.Module], report: AuditReport, unseen: set[str], look_for_blocks: bool
) -> tuple[AuditReport, set[str]]:
    """Trace the parts of a model by themselves where its own forward did not lead to all norms.

    A part is a model of its own (a vision tower, a decoder), with its config and main input.
    """
    sites = {site.norm: site for site in report.sites}
    blocks = list(report.blocks)
    done: list[str] = []
    for name, module in modules.items():
        inside = f"{name}."
        if not name or inside.startswith(tuple(done)) or not hasattr(module, "main_input_name"):
            continue
        if not hasattr(module, "config") or not any(norm.startswith(inside) for norm in unseen):
            continue
        done.append(inside)
        part, still_unseen = _whole(module, None, False, look_for_blocks, part=True)
        known = {block.layer for block in blocks}
        found = [replace(block, layer=inside + block.layer) for block in part.blocks]
        blocks += [block for block in found if block.layer not in known]
        for site in part.sites:
            norm = inside + site.norm
            if norm in unseen and site.norm not in still_unseen:
                unseen = unseen - {norm}
                sites[norm] = replace(
                    site,
                    norm=norm,
                    consumers=tuple(inside + consumer for consumer in site.consumers),
                    reason=_seen_apart(site.reason, name),
                )
    return replace(report, sites=tuple(sites.values()), blocks=tuple(blocks)), unseen


def _seen_apart(reason: str, part: str) -> str:
    """The reason, and which part of the model was traced by itself to find it."""
    told, inner, deeper = reason.partition(_APART)
    return f"{told}{_APART}{part}{'.' if inner else ''}{deeper or ' by itself)'}"


@dataclass(frozen=True)
class Verdict:
    """What is decided about one norm. ``form`` and ``foldable`` as in a SiteReport."""

    decision: str
    reason: str
    form: str = ""
    foldable: bool = True


def _report(
    model: nn.Module,
    norms: dict[str, nn.Module],
    traits: dict[str, NormTraits],
    trace: Trace,
    verdicts: dict[str, Verdict],
) -> AuditReport:
    sites = []
    for name, module in norms.items():
        flow, trait, verdict = trace.flows[name], traits[name], verdicts[name]
        sites.append(
            SiteReport(
                norm=name,
                norm_class=type(module).__name__,
                kind=trait.kind,
                convention=trait.convention,
                eps=trait.eps,
                consumers=tuple(flow.consumers),
                decision=verdict.decision,
                reason=verdict.reason,
                launches_saved=_launches_saved(trait, flow, verdict),
                consumer_kinds=tuple(flow.consumers.values()),
                form=verdict.form,
                foldable=verdict.foldable,
                returned_as=tuple(dict.fromkeys(key for key in flow.returned.values() if key)),
                outputs=tuple(flow.outputs),
            )
        )
        why = nothing_gained(sites[-1])
        if why is not None:
            sites[-1] = _ungained(sites[-1], f"{verdict.reason}; {why}", flow.operations)
    return AuditReport(type(model).__name__, tuple(sites))


def _ungained(site: SiteReport, reason: str, operations: int) -> SiteReport:
    """A site that patching would not improve: an RMS norm alone still becomes one launch."""
    if site.kind == "rms":
        saved = max(operations - 1, 0)
        return replace(site, decision="norm_only", form="", reason=reason, launches_saved=saved)
    return replace(site, decision="keep", reason=reason, launches_saved=0)


def _launches_saved(traits: NormTraits, flow: Flow, verdict: Verdict) -> int:
    """Launches of one eager step that a site no longer needs."""
    if verdict.decision == "keep":
        return 0
    own = 2 if traits.kind == "dyt" else 0  # tanh(alpha * x) stays two operations
    if verdict.form == PACKED:
        return flow.operations - own + len(flow.consumers) - 1
    if verdict.form == PASSTHROUGH:
        return max(flow.operations - own, 0)
    return max(flow.operations - 1, 0)


def _verdict(
    name: str, traits: NormTraits, surroundings: Surroundings, head: bool, part: bool
) -> Verdict:
    """What can be done about the norm ``name`` as far as the stock model tells."""
    trace = surroundings.trace
    flow = trace.flows[name]
    obstacle = surroundings.of_norm(name, traits) or trace.failure
    if obstacle is not None:
        return Verdict("keep", obstacle)
    obstacle = _values_obstacle(flow)
    if obstacle is not None:
        # What it gives is needed as it is: one launch gives it too.
        if traits.kind == "rms" and flow.consumers and flow.unlike is None:
            return Verdict("norm_only", f"{obstacle}; one launch gives it as well")
        return Verdict("keep", obstacle)
    if not flow.returned:
        return _fused(name, traits, surroundings, may_share=head)
    told = "; ".join(list(flow.returned)[:_REASONS])
    bound = _bound(flow, part)
    if bound is not None:
        return _alone(traits, bound)
    verdict = _fused(name, traits, surroundings, may_share=True)
    if head or verdict.decision != "fuse":
        return verdict
    return _alone(traits, f"{told} (head=True fuses it nevertheless)")


def _bound(flow: Flow, part: bool) -> str | None:
    """Why a norm whose output is also returned is bound to give just that; None: it is not."""
    names = {key for key in flow.returned.values() if key}
    if any(name.startswith("encoder_") for name in names):
        return (
            "its output is returned by the encoder and handed to the decoder as encoder_outputs, "
            "once a prompt: in a decode step nothing could be saved"
        )
    for name in flow.outputs:
        if name not in _STATES:
            return f"its output is also an output of the model{name and f', {name}'}"
    strange = names - _STATES - {"last_hidden_state"}
    if strange or not names:
        return "; ".join(list(flow.returned)[:_REASONS])
    if part:
        return (
            f"its output is returned as {', '.join(sorted(names))} to a model that was not traced"
        )
    return None


def _fused(name: str, traits: NormTraits, surroundings: Surroundings, may_share: bool) -> Verdict:
    """The verdict on a norm that may give something else than it did, if its readers agree."""
    flow = surroundings.trace.flows[name]
    obstacle = surroundings.of_consumers(name, traits, may_share)
    obstacle = obstacle or _never(name, flow)
    if obstacle is not None:
        return _alone(traits, obstacle)
    foldable = not surroundings.shares_weights(name)
    kinds = set(flow.consumers.values())
    against = flow.against(PACKED)
    if flow.returned:
        against = [*flow.returned, *against]
    if not foldable:
        against.append("a weight is shared with another module")
    if len(flow.call_sets) > 1:
        against.append("its output does not go to the same modules at every call")
    biased = [path for path in flow.scaled if _has_bias(surroundings.modules[path])]
    if biased:
        against.append(f"its output is scaled before {biased[0]}, which has a bias")
    if not against and kinds <= {LINEAR, CONV1D}:
        return Verdict("fuse", "", PACKED, foldable)
    return _passed_through(traits, flow, against, foldable)


def _passed_through(
    traits: NormTraits, flow: Flow, against_packing: list[str], foldable: bool = True
) -> Verdict:
    """The verdict where the packed form is ruled out."""
    why_not_packed = "; ".join(against_packing[:_REASONS])
    against = flow.against(PASSTHROUGH)
    if against:
        return _alone(traits, "; ".join([why_not_packed, *against][:_REASONS]))
    routed = set(flow.consumers.values()) - {LINEAR, CONV1D}
    return Verdict("fuse", why_not_packed, _EXPERTS if routed else PASSTHROUGH, foldable)


def _alone(traits: NormTraits, obstacle: str) -> Verdict:
    """An RMS norm that cannot be fused still becomes one launch; a LayerNorm is one in torch."""
    if traits.kind == "rms":
        return Verdict("norm_only", obstacle)
    if traits.kind == "layer":
        return Verdict("keep", f"{obstacle}; a LayerNorm alone is one launch already")
    return Verdict("keep", obstacle)


def _values_obstacle(flow: Flow) -> str | None:
    """Why the norm's output is needed as it is, or by nobody."""
    against = flow.against(PACKED, PASSTHROUGH)
    if any(len(flow.obstacles[reason]) > 1 for reason in against):
        return "; ".join(against[:_REASONS])
    if not flow.calls:
        return "not reached by the traced forward"
    if not flow.consumers:
        return "nothing reads its output"
    return None


def _never(name: str, flow: Flow) -> str | None:
    for row in NEVER_FUSED:
        if row.matches(name, flow.consumers):
            return row.reason
    return None


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None


def _rehearse(
    tracer: Tracer,
    modules: dict[str, nn.Module],
    trace: Trace,
    traits: dict[str, NormTraits],
    verdicts: dict[str, Verdict],
) -> None:
    """Run the double with all accepted sites fused; where the shapes do not hold, step down.

    A site that cannot be packed is rehearsed passed through; one that fails so too is not fused.
    """
    while True:
        accepted = {name: verdict for name, verdict in verdicts.items() if verdict.form}
        if not accepted:
            return
        failed_at = tracer.rehearse(
            _rehearsal(name, verdict.form, trace.flows[name], modules)
            for name, verdict in accepted.items()
        )
        if failed_at is None:
            break
        place = failed_at or "the model"
        near = _pattern(failed_at.rpartition(".")[0])
        at_fault = [
            name
            for name in accepted
            if any(_pattern(path).startswith(near) for path in (name, *trace.flows[name].consumers))
        ]
        packed = [name for name in at_fault if accepted[name].form == PACKED]
        packed = packed or [name for name in accepted if accepted[name].form == PACKED]
        for name in packed:
            why = f"with packed outputs {place} fails or returns other shapes"
            verdicts[name] = _passed_through(traits[name], trace.flows[name], [why])
        for name in () if packed else at_fault or accepted:
            why = f"with the norm passed through {place} fails or returns other shapes"
            verdicts[name] = _alone(traits[name], why)
    for name, verdict in accepted.items():
        verdicts[name] = replace(verdict, reason=_why_fused(verdict, trace.flows[name]))


def _rehearsal(name: str, form: str, flow: Flow, modules: dict[str, nn.Module]) -> Rehearsal:
    if form != PACKED:
        return Rehearsal(name, None)
    columns, start = {}, 0
    for consumer in flow.consumers:
        stop = start + linear_sizes(modules[consumer])[1]
        columns[consumer] = (start, stop)
        start = stop
    return Rehearsal(name, columns)


def _why_fused(verdict: Verdict, flow: Flow) -> str:
    """What the reader of the report is told about a site that is fused."""
    names = {LINEAR: "plain linear", CONV1D: "Conv1D", "router": "router", _EXPERTS: "experts"}
    kinds = list(flow.consumers.values())
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    read_by = ", ".join(
        f"{count} {names[kind]}{'s' if count > 1 and kind != _EXPERTS else ''}"
        for kind, count in counts.items()
    )
    told = f"read by {read_by} and nothing else"
    if verdict.form == PASSTHROUGH:
        told += f"; each normalises for itself, as {verdict.reason}"
    if verdict.form == _EXPERTS:
        told += "; normalised once, in one launch, for all of them"
    if not verdict.foldable:
        told += "; a weight is shared (a tied head): the gain is applied in the kernel, not folded"
    return told


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)
