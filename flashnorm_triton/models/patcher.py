"""patch, patched and revert: putting the fused modules in and taking them out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flashnorm_triton.models.auditor import audit
from flashnorm_triton.models.fused import FusedNormLinear, PackedSlice, sites_of
from flashnorm_triton.models.packed import PackedSite
from flashnorm_triton.models.report import AuditReport

ExampleInputs = Mapping[str, Any] | tuple[Any, ...] | None


class PatchHandle:
    """What ``patch`` returns: ``report`` says what was done, ``revert()`` undoes it.

    ``changed`` is False when the model was already patched, or had nothing to patch.
    """

    def __init__(self, model: nn.Module, report: AuditReport, changed: bool) -> None:
        self.model = model
        self.report = report
        self.changed = changed

    def revert(self) -> None:
        """Put the stock modules back: the same objects, bit-equal weights, on the model's device.

        Reverting a model that is not patched does nothing.
        """
        with torch.inference_mode(False), torch.no_grad():
            _restore(self.model)

    def __repr__(self) -> str:
        return f"PatchHandle({self.report.summary()})"


def patch(
    model: nn.Module, *, fold: bool = True, example_inputs: ExampleInputs = None
) -> PatchHandle:
    """Fuse every norm of ``model`` with the linears that read it, where the audit allows it.

    The model is changed in place and computes the same function (FlashNorm, arXiv 2407.09577):
    one launch for q, k and v, one for gate and up. ``state_dict()`` keeps its keys and values.

    Args:
        model: any torch module on a real device; transformers models need nothing else.
        fold: True folds each gain into the weights (fastest; stock weights wait in host memory, and
            the fused weights do not learn). False packs the stock weights and applies the gain in
            the kernel: no second copy, and it trains as the stock model does.
            Change weights in place before patching or with fold=False: a change of a folded
            model's gain or weight would be seen by one of the forward and ``state_dict`` alone.
            Hooks put on the patched modules go with them at ``revert``.
        example_inputs: for a model that takes no ``input_ids``: its keyword arguments (dict) or
            positional ones (tuple), of any small size.

    Returns:
        A PatchHandle. A model with nothing to patch, or already patched, is left as it is, with a
        warning that says so.

    Raises TypeError for something that is not a module, ValueError for a model on the meta device.
    Whatever fails, the model is left as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch needs a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    parameters = list(model.parameters())
    if parameters and all(parameter.is_meta for parameter in parameters):
        raise ValueError(
            f"{type(model).__name__} is on the meta device (not loaded, or offloaded), so there "
            "are no weights to fold: load it onto a device first; audit(model) works as it is"
        )
    report = audit(model, example_inputs=example_inputs)
    sites = sites_of(model)
    if sites:
        warnings.warn(
            f"{type(model).__name__} is already patched ({len(sites)} sites, "
            f"fold={any(site.folded for site in sites)}): nothing was changed; to patch it anew, "
            "call revert() on the handle first",
            stacklevel=2,
        )
        return PatchHandle(model, report, changed=False)
    if not report.fused:
        reasons = list(dict.fromkeys(site.reason for site in report.kept))
        detail = "; ".join(reasons[:3]) if reasons else "it has no norms"
        warnings.warn(f"nothing to patch in {type(model).__name__}: {detail}", stacklevel=2)
        return PatchHandle(model, report, changed=False)
    with torch.inference_mode(False), torch.no_grad():
        try:
            report = _fuse_all(model, report, fold)
        except BaseException:
            _restore(model)
            raise
    return PatchHandle(model, report, changed=True)


@contextmanager
def patched(
    model: nn.Module, *, fold: bool = True, example_inputs: ExampleInputs = None
) -> Iterator[PatchHandle]:
    """``patch`` for the length of a with block; reverted at its end, exceptions included.

    A model that was already patched when the block began stays patched after it.
    """
    handle = patch(model, fold=fold, example_inputs=example_inputs)
    try:
        yield handle
    finally:
        if handle.changed:
            handle.revert()


def _fuse_all(model: nn.Module, report: AuditReport, fold: bool) -> AuditReport:
    places = _places(model)
    done: dict[str, PackedSite] = {}
    for found in report.fused:
        norm = model.get_submodule(found.norm)
        linears = [model.get_submodule(name) for name in found.consumers]
        site = done[found.norm] = PackedSite(found, norm, linears, fold)
        site.take()
        _put(places[id(norm)], FusedNormLinear(site))
        for index, linear in enumerate(linears):
            _put(places[id(linear)], PackedSlice(site, index))
    entries = (done[entry.norm].report if entry.norm in done else entry for entry in report.sites)
    report = replace(report, sites=tuple(entries))
    for site in done.values():
        site.audit = report
    return report


def _restore(model: nn.Module) -> None:
    sites = {}
    for holder_and_key in _places(model).values():
        holder, key = holder_and_key[0]
        module = holder._modules[key]
        if isinstance(module, (FusedNormLinear, PackedSlice)):
            stock = module.stock
            stock.training = module.training
            sites[id(module.site)] = module.site
            _put(holder_and_key, stock)
    for site in sites.values():
        site.give_back()


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each submodule hangs (a shared one hangs in several places), by its id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for holder in model.modules():
        for key, child in holder._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((holder, key))
    return places


def _put(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for holder, key in places:
        holder._modules[key] = module
