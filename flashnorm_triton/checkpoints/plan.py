"""What a fold will do: the audit's decisions, in terms of stored tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.algebra import effective_gain
from flashnorm_triton.checkpoints.flags import marks
from flashnorm_triton.checkpoints.names import NotFollowed, StoredNames
from flashnorm_triton.checkpoints.readers import readers
from flashnorm_triton.checkpoints.safefile import FLOATS
from flashnorm_triton.checkpoints.source import Source
from flashnorm_triton.models.auditor import audit
from flashnorm_triton.models.report import SiteReport

_FOLDING = ("fuse", "cancel", "partial")
# Buffers that older releases of transformers stored: nobody reads them.
_OLD_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "position_ids")
_HALF_LIMIT = 1e4  # what a moved bias may reach in float16, whose largest value is 65504


@dataclass(frozen=True)
class Target:
    """A stored weight that takes a gain along ``axis``; ``bias`` is the stored bias for W·β."""

    tensor: str
    axis: int
    bias: str | None = None


@dataclass(frozen=True)
class Fold:
    """One norm. ``norm_bias`` is its stored bias, ``bias`` what becomes of it: "" (there is none,
    or it is zero), "moved" into the biases of the targets, or "divided" by the gain and kept.
    ``crest`` is the gain's largest entry over its root mean square (see :func:`crest_of`)."""

    norm: str
    kind: str
    convention: str
    gain: str
    norm_bias: str | None
    bias: str
    targets: tuple[Target, ...]
    crest: float = 1.0


@dataclass(frozen=True)
class Plan:
    """``kept`` pairs each other norm with the reason. ``untied``: the head's tensor to be written
    and the embedding that it is written from. ``head`` names the final norm when that is folded,
    ``marks`` the keys that config.json may say true of (see flags.py)."""

    folds: tuple[Fold, ...]
    kept: tuple[tuple[str, str], ...]
    untied: tuple[str, str] | None
    head: str | None
    marks: tuple[str, ...]


def skeleton(source: Source, untie: bool = False) -> nn.Module:
    """The checkpoint's model on the meta device, of the class that its config names.

    Raises ValueError for a model that the installed transformers does not know.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    named = (source.config.get("architectures") or [None])[0]
    try:
        config = transformers.AutoConfig.from_pretrained(source.path, trust_remote_code=False)
        if untie:
            for one in {id(c): c for c in (config, config.get_text_config())}.values():
                one.tie_word_embeddings = False
        cls = getattr(transformers, named, None) if named else None
        with torch.device("meta"):
            if cls is None:
                return transformers.AutoModelForCausalLM.from_config(config).eval()
            return cls(config).eval()
    except (ValueError, ImportError, KeyError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"transformers {transformers.__version__} cannot build this model "
            f"({named or source.config.get('model_type')}): {first}"
        ) from error


def make_plan(
    source: Source, *, untie: bool = False, head: bool = True, max_crest: float | None = None
) -> Plan:
    """Decide every fold of a checkpoint from its config, its headers and its norm vectors.

    ``untie`` gives a tied head a tensor of its own; ``head`` False leaves the final norm alone,
    ``max_crest`` the norms whose gain has a larger crest factor.
    Raises ValueError for tensors that are missing or of a wrong shape, for ``untie`` of a head
    that is not tied, and when there is nothing to fold.
    """
    tied = skeleton(source)
    model = skeleton(source, untie=True) if untie else tied
    shapes = {name: entry.shape for name, entry in source.entries.items()}
    untied = _untied(tied, model, shapes) if untie else None
    names = StoredNames(model, shapes)
    if untied is not None:
        if names.direct(untied[1]) is None:
            raise ValueError(
                f"the embedding {untied[1]} is not stored as it is: it cannot be untied"
            )
        untied = (untied[0], names.direct(untied[1]))
    _check(model, names)
    output = _path_of(model, model.get_output_embeddings())
    sites = audit(model, head=head, blocks=False).sites
    final = next((site.norm for site in sites if output in site.consumers), None)
    folds: dict[str, Fold] = {}
    kept: dict[str, str] = {}
    parameters: dict[str, set[str]] = {}
    unknown = [name for name in names.unknown if not name.endswith(_OLD_BUFFERS)]
    for site in sites:
        try:
            if unknown and site.norm == final:
                raise NotFollowed(
                    f"the checkpoint holds tensors that this model has not ({unknown[0]}), and "
                    "they may read the final norm's output too"
                )
            fold, parameters[site.norm] = _fold(site, model, names, source)
            if max_crest is not None and not fold.crest <= max_crest:
                raise NotFollowed(f"its gain's crest factor is {fold.crest:.3g}, over {max_crest}")
            folds[site.norm] = fold
        except NotFollowed as error:
            kept[site.norm] = str(error)
    _drop_shared(folds, kept, parameters, names)
    if not folds and untied is None:
        reasons = list(dict.fromkeys(kept.values()))[:3]
        raise ValueError("there is nothing to fold: " + ("; ".join(reasons) or "no norms"))
    width = model.get_input_embeddings().weight.shape[-1]
    gained = [n for n in kept if _shape(model.get_submodule(n)) == (width,)]
    return Plan(
        tuple(folds.values()),
        tuple(kept.items()),
        untied,
        final if final in folds else None,
        marks([fold.kind for fold in folds.values()], gained, final),
    )


def _shape(norm: nn.Module) -> tuple[int, ...]:
    weight = norm._parameters.get("weight")
    return () if weight is None else tuple(weight.shape)


def gain_of(source: Source, fold: Fold) -> Tensor:
    """The factor (K,) that a norm multiplies with, in float32 (float64 for a float64 one)."""
    gain = effective_gain(source.read(fold.gain), fold.convention)
    assert gain is not None  # a fold has a gain
    return gain


def _fold(
    site: SiteReport, model: nn.Module, names: StoredNames, source: Source
) -> tuple[Fold, set[str]]:
    if site.decision not in _FOLDING and not site.form:
        raise NotFollowed(site.reason)
    if not site.foldable:
        raise NotFollowed("a weight that reads it is shared (a tied head)")
    if site.convention == "none":
        raise NotFollowed("it has no gain")
    gain = names.direct(f"{site.norm}.weight")
    if gain is None:
        raise NotFollowed(f"{site.norm}.weight is not stored as it is")
    targets, parameters = [], set()
    size = source.entries[gain].shape[0]
    for path, kind in zip(site.consumers, site.consumer_kinds, strict=True):
        for reader in readers(path, model.get_submodule(path), kind, size):
            parameters.add(reader.parameter)
            parts = names.parts(reader.parameter, reader.axis)
            bias = names.direct(reader.bias) if reader.bias and len(parts) == 1 else None
            targets += [Target(part.tensor, part.axis, bias) for part in parts]
    targets = {target.tensor: target for target in targets}.values()
    for tensor in (gain, *(target.tensor for target in targets)):
        entry = source.entries.get(tensor)
        if entry is not None and entry.dtype not in FLOATS:
            raise NotFollowed(f"{tensor} is stored as {entry.dtype}")
    fold = Fold(site.norm, site.kind, site.convention, gain, None, "", tuple(targets))
    factor = gain_of(source, fold)
    if not bool(factor.isfinite().all()):
        raise NotFollowed(f"{gain} holds values that are not finite")
    fold = replace(fold, crest=crest_of(factor))
    if model.get_submodule(site.norm)._parameters.get("bias") is not None:
        return _with_bias(fold, names, source, site.form == "packed"), parameters
    return replace(fold, targets=_unbiased(fold)), parameters


def _with_bias(fold: Fold, names: StoredNames, source: Source, packed: bool) -> Fold:
    """Where the norm's own bias goes. Without a bias in every target it stays: n∘g + β is
    (n + β/g)∘g, so it is divided by the gain that leaves it. So it does in a site that cannot be
    ``packed``: there a number may stand between norm and linear."""
    stored = names.direct(f"{fold.norm}.bias")
    if stored is None:
        raise NotFollowed(f"{fold.norm}.bias is not stored as it is")
    fold = replace(fold, norm_bias=stored)
    bias = source.read(stored)
    if not bias.any():
        return replace(fold, targets=_unbiased(fold))
    if packed and all(target.bias is not None for target in fold.targets):
        return replace(fold, bias="moved")
    divided = divided_bias(bias, gain_of(source, fold))
    limit = _HALF_LIMIT if bias.dtype == torch.float16 else torch.finfo(bias.dtype).max
    if not bool((divided.abs() <= limit).all()):
        raise NotFollowed(
            "its bias can neither move (a linear that reads it has none) nor be divided by the gain"
        )
    return replace(fold, bias="divided", targets=_unbiased(fold))


def _unbiased(fold: Fold) -> tuple[Target, ...]:
    return tuple(replace(target, bias=None) for target in fold.targets)


def crest_of(gain: Tensor) -> float:
    """max|g| / rms(g): the most by which the fold can raise the error of quantizing afterwards.

    Rounding a weight to steps that are proportional to the largest of its row (group, tensor) errs
    by max|W|·‖g‖ where the gain follows, by max|W·g|·sqrt(K) where it is folded, times the same
    constant; the second is at most max|g|·sqrt(K)/‖g‖ times the first.
    """
    wide = gain.double()
    scale = float(wide.square().mean().sqrt())
    return float(wide.abs().max()) / scale if scale else 1.0


def divided_bias(bias: Tensor, gain: Tensor) -> Tensor:
    """β/g in the gain's dtype, zero where β is; infinite where only g is."""
    wide = bias.to(gain.dtype)
    return torch.where(wide == 0, wide, wide / gain)


def _drop_shared(
    folds: dict[str, Fold],
    kept: dict[str, str],
    parameters: dict[str, set[str]],
    names: StoredNames,
) -> None:
    """A stored tensor that is cut up at load takes a gain only if all its pieces want that one."""
    while True:
        wanted: dict[str, set[str]] = {}
        for norm, own in parameters.items():
            if norm in folds:
                for parameter in own:
                    wanted.setdefault(parameter, set()).add(norm)
        at_fault = {
            norm: target.tensor
            for norm, fold in folds.items()
            for target in fold.targets
            if any(wanted.get(p, set()) != {norm} for p in names.made_from(target.tensor))
        }
        if not at_fault:
            return
        for norm, tensor in at_fault.items():
            del folds[norm]
            kept[norm] = f"{tensor} is stored together with weights that do not read this norm"


def _check(model: nn.Module, names: StoredNames) -> None:
    wrong = list(names.misshapen())
    if wrong:
        name, found, wanted = wrong[0]
        raise ValueError(
            f"{name} has shape {list(found)}, but the model of config.json wants {list(wanted)} "
            f"({len(wrong)} tensors are wrong): weights and config are not of one model"
        )
    misfit = next(names.misfits(), None)
    if misfit is not None:
        raise ValueError(
            f"{misfit}: a tensor is missing, or weights and config are not of one model"
        )
    missing = names.missing(model)
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the model are not in the checkpoint, first {missing[0]}: "
            "weights and config are not of one model, or shards are missing"
        )


def _untied(tied: Any, model: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[str, str]:
    """The head's and the embedding's parameter; the head is added to ``shapes``."""
    head = _path_of(model, model.get_output_embeddings())
    embedding = _path_of(tied, tied.get_input_embeddings())
    if (
        head is None
        or embedding is None
        or tied.get_submodule(head).weight is not tied.get_submodule(embedding).weight
    ):
        raise ValueError("the head is not tied to the embedding: leave --untie out")
    if f"{head}.weight" in shapes:
        raise ValueError(f"{head}.weight is already stored: --untie would overwrite it")
    shapes[f"{head}.weight"] = tuple(tied.get_submodule(head).weight.shape)
    return f"{head}.weight", f"{embedding}.weight"


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((n for n, module in model.named_modules() if module is wanted), None)
