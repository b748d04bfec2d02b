"""patch, patched and revert: putting the installers' modules in and taking them out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flashnorm_triton.checkpoints.flags import is_folded
from flashnorm_triton.models.auditor import audit
from flashnorm_triton.models.block.install import LEVELS, at_level, make_blocks, undo_blocks
from flashnorm_triton.models.installers import (
    Declined,
    Installer,
    Options,
    installer_for,
    replacements_in,
    sites_of,
)
from flashnorm_triton.models.memory import PatchMemory, Watch
from flashnorm_triton.models.placement import carry_hook
from flashnorm_triton.models.report import AuditReport, SiteReport

ExampleInputs = Mapping[str, Any] | tuple[Any, ...] | None
_Places = dict[int, list[tuple[nn.Module, str]]]


class PatchHandle:
    """What ``patch`` returns: ``report`` says what was done, ``revert()`` undoes it.

    ``changed`` is False when the model was already patched, or had nothing to patch. ``memory``
    holds the bytes that patching took (None when it did nothing).
    """

    def __init__(
        self,
        model: nn.Module,
        report: AuditReport,
        changed: bool,
        memory: PatchMemory | None = None,
    ) -> None:
        self.model = model
        self.report = report
        self.changed = changed
        self.memory = memory

    def revert(self) -> None:
        """Put the stock modules back: the same objects, bit-equal weights, on the model's device.

        Reverting a model that is not patched does nothing.

        Raises RuntimeError, and changes nothing, for a model patched with ``revertible=False``
        whose stock weights were freed.
        """
        freed = [site for site in sites_of(self.model) if site.freed]
        if freed:
            raise RuntimeError(
                f"{type(self.model).__name__} was patched with revertible=False, which freed the "
                f"stock weights of {len(freed)} sites (first: {freed[0].report.norm}), so they "
                "cannot be put back. state_dict() and save_pretrained() still give a checkpoint "
                "that computes the same; load the original one for the original weights, or patch "
                "with revertible=True"
            )
        with torch.inference_mode(False), torch.no_grad():
            _restore(self.model)

    def __repr__(self) -> str:
        return f"PatchHandle({self.report.summary()})"


def patch(
    model: nn.Module,
    *,
    fold: bool = True,
    cancel: bool | str = False,
    head: bool = False,
    revertible: bool = True,
    level: str = "auto",
    example_inputs: ExampleInputs = None,
) -> PatchHandle:
    """Fuse every norm of ``model`` with the linears that read it, where the audit allows it.

    The model is changed in place and computes the same function (FlashNorm, arXiv 2407.09577):
    one launch for q, k and v, one for gate and up. ``state_dict()`` keeps its keys and values.
    An RMS norm whose linears are not ours to touch (quantized, LoRA, sharded) or whose output the
    model returns too (the final one) becomes one launch by itself. Add adapters, quantize or shard
    first, then patch. A mixture of experts keeps its weights: its norm is one launch, as rows must
    be normalised before the router, and scaling the experts' products would cost more.

    Args:
        model: any torch module on a real device; transformers models need nothing else.
        fold: True folds each gain into the weights (fastest; stock weights wait in host memory, and
            the fused weights do not learn). False packs the stock weights and applies the gain in
            the kernel: no second copy, and it trains as the stock model does.
            Change weights in place before patching or with fold=False: a change of a folded
            model's gain or weight would be seen by one of the forward and ``state_dict`` alone.
            Hooks put on the patched modules go with them at ``revert``.
        cancel: "exact" or "fast" drops a norm where what its linears give is normalised again
            (section 3.3 of the paper; docs/cancel.md), in part where only q and k are; "exact"
            corrects the later eps row by row, "fast" leaves it. False: none is dropped.
        head: also fuses the final norm with the language-model head; with a tied one, its gain is
            applied in the kernel. What the whole model returns stays as it is, the last of
            ``hidden_states`` included; so does what an encoder returns, or a model without a head.
            The ``last_hidden_state`` of the model inside one with a head (``model.model(...)``) is
            then the tensor before that norm.
        revertible: True keeps the stock weights of folded sites in host memory for ``revert`` and
            ``state_dict``. False frees them: ``revert()`` then explains, and ``state_dict()`` gives
            the folded weights with neutral gains, which stock modules compute the same with.
        level: "auto" also runs each decoder layer as a block, in the fewest launches, where its
            code is proven to be one; ``report.blocks`` says which, and why not the others. "norm"
            leaves the layers' own code alone; "block" asks for blocks alone. A block is the layer's
            own code again in training, wherever gradients are wanted, under autocast, for
            ``output_attentions`` and when something inside has a hook or was exchanged. A norm that
            ``cancel`` drops keeps its layer at the level "norm".
        example_inputs: for a model that takes no ``input_ids``: its keyword arguments (dict) or
            positional ones (tuple), of any small size.

    Returns:
        A PatchHandle. A model with nothing to patch, or already patched, is left as it is, with a
        warning that says so. A site that fails (out of memory while packing, for one) is kept as
        it was; its record in ``report`` says why, and one warning names it.

    Raises TypeError for something that is not a module, ValueError for a model on the meta device,
    for an unknown level, and for "block" where a layer is none (the message says why).
    Whatever is raised, the model is left as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch needs a torch.nn.Module, not {type(model).__name__}")
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}")
    model = getattr(model, "_orig_mod", model)
    # No list of the parameters: it would keep weights alive that are to be freed site by site.
    on_meta = [parameter.is_meta for parameter in model.parameters()]
    if on_meta and all(on_meta):
        raise ValueError(
            f"{type(model).__name__} is on the meta device (not loaded, or offloaded), so there "
            "are no weights to fold: load it onto a device first; audit(model) works as it is"
        )
    options = Options(fold, cancel, head, revertible)
    report = audit(model, example_inputs=example_inputs, cancel=cancel, head=head)
    sites = sites_of(model)
    if sites:
        warnings.warn(
            f"{type(model).__name__} is already patched ({len(sites)} sites, "
            f"fold={any(site.folded for site in sites)}): nothing was changed; to patch it anew, "
            "call revert() on the handle first",
            stacklevel=2,
        )
        return PatchHandle(model, report, changed=False)
    report = at_level(report, level)
    if all(site.decision == "keep" for site in report.sites):
        reasons = list(dict.fromkeys(site.reason for site in report.kept))
        detail = "; ".join(reasons[:3]) if reasons else "it has no norms"
        warnings.warn(f"nothing to patch in {type(model).__name__}: {detail}", stacklevel=2)
        return PatchHandle(model, report, changed=False)
    with torch.inference_mode(False), torch.no_grad():
        report = _told_of_folds(model, report)
        try:
            report, memory = _install_all(model, report, options)
        except BaseException:
            _restore(model)
            raise
    failed = [site for site in report.sites if site.reason.startswith(_FAILED)]
    if failed:
        warnings.warn(
            f"{len(failed)} of {type(model).__name__}'s sites could not be patched and stay as "
            f"they are; {failed[0].norm}: {failed[0].reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return PatchHandle(model, report, changed=bool(sites_of(model)), memory=memory)


@contextmanager
def patched(
    model: nn.Module,
    *,
    fold: bool = True,
    cancel: bool | str = False,
    head: bool = False,
    level: str = "auto",
    example_inputs: ExampleInputs = None,
) -> Iterator[PatchHandle]:
    """``patch`` for the length of a with block; reverted at its end, exceptions included.

    A model that was already patched when the block began stays patched after it.
    """
    handle = patch(
        model, fold=fold, cancel=cancel, head=head, level=level, example_inputs=example_inputs
    )
    try:
        yield handle
    finally:
        if handle.changed:
            handle.revert()


_FAILED = "could not be patched: "
_FOLDED = "; its gain is an identity, folded into the checkpoint already"


def _told_of_folds(model: nn.Module, report: AuditReport) -> AuditReport:
    """The report of a model from a folded checkpoint, saying of which norms nothing is left to do.

    Only its config's marks make the values worth a look.
    """
    if not is_folded(getattr(model, "config", None)):
        return report
    sites = []
    for site in report.sites:
        gain = model.get_submodule(site.norm)._parameters.get("weight")
        identity = 0.0 if site.convention == "1+w" else 1.0
        folded = site.decision != "keep" and gain is not None and bool((gain == identity).all())
        sites.append(replace(site, reason=site.reason + _FOLDED) if folded else site)
    return replace(report, sites=tuple(sites))


def _unchanged(site: SiteReport, reason: str) -> SiteReport:
    return replace(site, decision="keep", form="", reason=reason, launches_saved=0)


def _install_all(
    model: nn.Module, report: AuditReport, options: Options
) -> tuple[AuditReport, PatchMemory]:
    """Install site by site, so that no more than one site's weights exist twice on the device."""
    places, watch = _places(model), Watch(model)
    done: dict[str, Installer] = {}
    entries = []
    for found in report.sites:
        make = installer_for(found)
        if make is not None:
            try:
                site = done[found.norm] = _install(model, found, make, options, places, watch)
                found = site.report
            except Declined as why:
                found = _unchanged(found, str(why))
            except Exception as error:
                found = _kept(found, error)
        entries.append(found)
    blocks = make_blocks(model, report.blocks, done)
    report = replace(report, sites=tuple(entries), blocks=blocks)
    for site in done.values():
        site.audit = report
    return report, watch.result()


def _install(
    model: nn.Module,
    report: SiteReport,
    make: type[Installer],
    options: Options,
    places: _Places,
    watch: Watch,
) -> Installer:
    site = make(model, report, options)
    watch.built(site.nbytes)
    try:
        site.take()
        modules = [(model.get_submodule(path), m) for path, m in site.replacements().items()]
        for stock, module in modules:
            carry_hook(stock, module)
    except BaseException:
        site.give_back()
        raise
    for stock, module in modules:
        _put(places[id(stock)], module)
    hook = site.output_hook()
    if hook is not None:
        model.register_forward_hook(hook)
    return site


def _kept(report: SiteReport, error: Exception) -> SiteReport:
    lines = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return _unchanged(report, f"{_FAILED}{why}")


def _restore(model: nn.Module) -> None:
    undo_blocks(model)
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "site", None), Installer):
            del model._forward_hooks[key]
    sites = {}
    for module in list(replacements_in(model)):
        sites[id(module.site)] = module.site
    for holder_and_key in _places(model).values():
        holder, key = holder_and_key[0]
        module = holder._modules[key]
        site = vars(module).get("site")
        if isinstance(site, Installer):
            stock = module.stock
            stock.training = module.training
            _put(holder_and_key, stock)
    for site in sites.values():
        site.give_back()


def _places(model: nn.Module) -> _Places:
    """Where each submodule hangs (a shared one hangs in several places), by its id."""
    places: _Places = {}
    for holder in model.modules():
        for key, child in holder._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((holder, key))
    return places


def _put(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for holder, key in places:
        holder._modules[key] = module
