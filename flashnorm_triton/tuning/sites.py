"""Which cells to tune: from a list of sizes, or from a model's config alone.

A model is built on the meta device (no weights, no memory) and audited; each site it would fuse is
one K → packed N, or one K → N a consumer where each normalises for itself. So there is no list of
model names, and what is tuned is what ``patch`` launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashnorm_triton.checks import ACTIVATIONS
from flashnorm_triton.limits import ELEMENT_BYTES
from flashnorm_triton.plans import Problem, bucket

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Site:
    """A norm and the linears that read it, packed: x (M, k) by weight (n, k).

    ``has_gain``: the gain is applied in the kernel; ``centred``: the norm is a LayerNorm.
    """

    k: int
    n: int
    has_bias: bool = False
    has_gain: bool = False
    centred: bool = False


def parse_shapes(text: str) -> tuple[Site, ...]:
    """Sites from ``"2048:3072,2048:16384"`` (K:N). Raises ValueError, naming the word."""
    sites = []
    for word in text.split(","):
        k, _, n = word.strip().partition(":")
        if not (k.isdigit() and n.isdigit() and int(k) and int(n)):
            raise ValueError(f"{word.strip()!r} is no shape: give K:N, such as 2048:3072")
        sites.append(Site(int(k), int(n)))
    return tuple(dict.fromkeys(sites))


def parse_tokens(text: str) -> tuple[int, ...]:
    """Row counts from ``"1,2,4"``. Raises ValueError, naming the word."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdigit() or not int(word):
            raise ValueError(f"{word!r} is no number of tokens: give whole numbers from 1")
    return tuple(int(word) for word in words)


def parse_dtypes(text: str) -> tuple[str, ...]:
    """torch's names of ``"bf16,fp16"`` or ``"bfloat16"``. Raises ValueError, naming the word."""
    names = []
    for word in (word.strip() for word in text.split(",")):
        name = DTYPES.get(word, word)
        if name not in DTYPES.values():
            raise ValueError(f"dtype {word!r} cannot be tuned: use {', '.join(DTYPES)}")
        names.append(name)
    return tuple(dict.fromkeys(names))


def parse_epilogues(text: str) -> tuple[dict[str, Any], ...]:
    """``Problem``'s fields for each of ``"plain,silu+gated,centred"``.

    The parts of an epilogue are joined by "+" in any order: "bare" (no norm) or "centred"
    (LayerNorm), one activation, "gated", "residual"; what is bare takes a residual at most. Raises
    ValueError, naming the word.
    """
    found = []
    for word in (word.strip() for word in text.split(",")):
        parts = [] if word == "plain" else word.split("+")
        activations = [part for part in parts if part in ACTIVATIONS]
        known = {*activations, "centred", "gated", "residual"}
        known = {"bare", "residual"} if "bare" in parts else known
        if not known.issuperset(parts) or len(activations) > 1 or len(set(parts)) < len(parts):
            raise ValueError(
                f"{word!r} is no epilogue: give plain, or parts joined by + of centred, gated, "
                f"residual and one of {', '.join(ACTIVATIONS)}; or bare, or bare+residual"
            )
        fields: dict[str, Any] = {"centred": "centred" in parts, "gated": "gated" in parts}
        fields |= {"has_residual": "residual" in parts, "normed": "bare" not in parts}
        found.append({**fields, "activation": activations[0] if activations else ""})
    return tuple(found)


def config_of(model: str) -> Any:
    """The config of a model: from a config.json, its folder, a hub id, or "demo" (shipped).

    Raises ValueError that says what was looked for and what to give instead.
    """
    if model == "demo":
        from flashnorm_triton.demo_model import FOLDER

        model = str(FOLDER)
    place = Path(model).expanduser()
    local = place.exists()
    if place.is_dir() and not (place / "config.json").is_file():
        raise ValueError(f"{place} has no config.json: give a folder written by save_pretrained")
    if not local and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(f"there is no file or folder {place}")
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoConfig.from_pretrained(place if local else model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model config found for {model!r} ({_first_line(error)}): give a config.json, the "
            "folder that holds it, or a hub id that this machine can reach"
        ) from error


def skeleton(model: Any) -> Any:
    """A causal language model on the meta device, of a config or of what ``config_of`` takes.

    Raises ValueError that says what was looked for and what to give instead.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(model) if isinstance(model, str) else model
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        reason = _first_line(error)
        raise ValueError(f"{model!r} is not a causal language model: {reason}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sites_of(model: Any) -> tuple[Site, ...]:
    """The sites that ``patch`` would fuse in a model, each size once, in the model's order.

    Raises ValueError for a model in which nothing can be fused.
    """
    from flashnorm_triton.models import audit
    from flashnorm_triton.models.linears import linear_sizes

    report = audit(model)
    found = []
    for site in report.fused:
        kinds = site.consumer_kinds or ("linear",) * len(site.consumers)
        linears = [
            model.get_submodule(name)
            for name, kind in zip(site.consumers, kinds, strict=True)
            if kind in ("linear", "conv1d")
        ]
        # Each consumer that normalises for itself is a launch of its own.
        launches = [[linear] for linear in linears] if site.form != "packed" else [linears]
        for together in filter(None, launches):
            k = linear_sizes(together[0])[0]
            n = sum(linear_sizes(linear)[1] for linear in together)
            centred = site.kind == "layer"
            has_bias = centred or any(linear.bias is not None for linear in together)
            found.append(Site(k, n, has_bias, not site.foldable, centred))
    if not found:
        raise ValueError(f"nothing to tune: {report.summary()}")
    return tuple(dict.fromkeys(found))


def problems(
    sites: Iterable[Site],
    dtypes: Sequence[str] = ("bfloat16",),
    tokens: Sequence[int] = TOKENS,
    has_gain: bool = False,
    epilogues: Sequence[dict[str, Any]] = ({},),
) -> tuple[Problem, ...]:
    """Every cell once: sites × dtypes × epilogues × buckets of row counts.

    Raises ValueError for a gated pair of an odd number of features.
    """
    rows = sorted({bucket(m) for m in tokens})
    found: dict[Problem, Problem] = {}
    for site in sites:
        for dtype in dtypes:
            tma = site.k * ELEMENT_BYTES[dtype] % 16 == 0
            for epilogue in epilogues:
                if epilogue.get("gated") and site.n % 2:
                    raise ValueError(f"N = {site.n} cannot be a gated pair: it must be even")
                normed = epilogue.get("normed", True)
                gain = normed and (site.has_gain or has_gain)
                plain = Problem(dtype, 1, site.n, site.k, site.has_bias, gain, tma)
                # A LayerNorm's site stays one, whatever else follows it.
                centred = normed and (site.centred or epilogue.get("centred", False))
                more = {**epilogue, "centred": centred}
                for m in rows:
                    problem = replace(plain, m=m, **more)
                    found.setdefault(replace(problem, has_bias=False), problem)
    return tuple(found.values())
