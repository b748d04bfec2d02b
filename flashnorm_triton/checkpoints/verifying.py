"""Is a folded checkpoint the same model? Measured against the source in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashnorm_triton.auto import load
from flashnorm_triton.checkpoints.hashing import choose, hash_file
from flashnorm_triton.checkpoints.source import CONFIG, RECORD, Source, locate, open_source
from flashnorm_triton.demo.accuracy import (
    ERROR_RATIO,
    PERPLEXITY_RATIO,
    Errors,
    windows,
)
from flashnorm_triton.demo.checks import Check, at_least, at_most

if TYPE_CHECKING:
    from rich.table import Table

_BATCH, _LENGTH = 4, 64
_WINDOW = 256
_GENERATED = 24
_AGREEMENT_LOSS = 0.05  # near-ties: a percent or two of the tokens, stock or folded
_FLOAT64_FLOOR = 1e-12  # float64 is judged by float64: its own roundings are not told apart


@dataclass(frozen=True)
class Verification:
    """The checks of one folded checkpoint and the error of every layer's output.

    ``layers`` holds (name, stock's error, folded's error) against float64, relative Frobenius.
    """

    checks: tuple[Check, ...]
    layers: tuple[tuple[str, float, float], ...] = field(default=())

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return all(check.passed for check in self.checks)

    def tables(self) -> list[Table]:
        """The checks, and the layers, as rich tables."""
        from rich.table import Table

        checks = Table("check", "value", "limit", "")
        for check in self.checks:
            verdict = "[green]ok[/green]" if check.passed else "[red]FAILED[/red]"
            checks.add_row(check.name, check.value, check.limit, verdict)
        layers = Table("output of", "stock error", "folded error", "ratio")
        for name, stock, folded in self.layers:
            ratio = f"{folded / stock:.3f}" if stock else ""
            layers.add_row(name, f"{stock:.2e}", f"{folded:.2e}", ratio)
        return [checks, layers]


def verify_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    text: str | None = None,
    device: str = "cpu",
    reference: torch.dtype = torch.float64,
    seed: int | None = None,
) -> Verification:
    """Compare a folded checkpoint with the one it was made from.

    The contract: the folded model's errors against the source in ``reference`` (float64) are at
    most 1.25 times those of the source model run in the folded one's dtype, over logits and over
    every layer's output, on fixed and on random tokens. Held-out perplexity (``text``, where one is
    given) may rise by half a percent, and greedy choices agree with float64's as stock's do.
    Where there is a record of the fold, the source's config and weights have the hashes that it
    gives, and files, names, dtypes and shapes are compared.

    Args:
        src, dst: folders or hub ids.
        text: a text that the model was not trained on; the source's tokenizer cuts it up.
        device: where the three models (source, folded, reference) are held, all at once.
        reference: float32 halves the memory of the third, for half-precision checkpoints.
        seed: of the random tokens; None draws one and tells it.

    Raises ValueError or OSError for folders that cannot be loaded.
    """
    source = open_source(*locate(src))
    folded = open_source(*locate(dst))
    checks = _source_checks(source, folded) + _layout_checks(source, folded)
    ours = _model(folded.path, "auto", device)
    dtype = next(ours.parameters()).dtype
    stock = _model(source.path, dtype, device)
    exact = _model(source.path, reference, device)
    seed = int(torch.randint(1 << 31, ())) if seed is None else seed
    random = torch.Generator().manual_seed(seed)
    size = exact.get_input_embeddings().weight.shape[0]
    tokens = {
        "fixed tokens": (torch.arange(_BATCH * _LENGTH).view(_BATCH, -1) * 7919 + 13) % size,
        f"random tokens (seed {seed})": torch.randint(size, (_BATCH, _LENGTH), generator=random),
    }
    skip_last = _head_folded(folded)
    layers: dict[str, list[_Sum]] = {}
    for name, ids in tokens.items():
        checks += _compare(name, ids.to(device), exact, stock, ours, layers, skip_last)
    floor = _floor(exact, dtype)
    told = tuple((name, one.relative, two.relative) for name, (one, two) in layers.items())
    ratios = torch.tensor([two / max(one, floor) for _, one, two in told])
    worst = float(ratios.max()) if len(ratios) else 0.0  # torch's max keeps a NaN
    checks.append(at_most("worst layer, folded / stock", worst, ERROR_RATIO))
    if text is not None:
        checks += _perplexity(text, source.path, exact, stock, ours)
    checks += _generation(next(iter(tokens.values()))[:1, :8].to(device), stock, ours)
    return Verification(tuple(checks), told)


@dataclass
class _Sum:
    """Squares of an error and of what it is relative to; ``each`` is the error of every token."""

    off: float = 0.0
    total: float = 0.0
    each: list[Tensor] = field(default_factory=list)

    def add(self, got: Tensor, wanted: Tensor) -> None:
        wide = wanted.double()
        off = got.double() - wide
        self.off += float(off.square().sum())
        self.total += float(wide.square().sum())
        self.each.append((off.norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-300)).flatten())

    @property
    def relative(self) -> float:
        return math.sqrt(self.off / self.total) if self.total else math.sqrt(self.off)

    @property
    def typical(self) -> float:
        """The median token's error: a few tokens may have been routed to other experts."""
        return float(torch.cat(self.each).median())


def _floor(model: nn.Module, dtype: torch.dtype) -> float:
    """The error that nobody is blamed for: one rounding, or in wide dtypes that of summing K terms
    in any order, which grows like sqrt(K)."""
    if dtype == torch.float64:
        return _FLOAT64_FLOOR
    half_ulp = torch.finfo(dtype).eps / 2
    width = model.get_input_embeddings().weight.shape[-1]
    return half_ulp * (math.sqrt(width) if dtype == torch.float32 else 1.0)


@torch.no_grad()
def _compare(
    name: str,
    ids: Tensor,
    exact: nn.Module,
    stock: nn.Module,
    ours: nn.Module,
    layers: dict[str, list[_Sum]],
    skip_last: bool,
) -> list[Check]:
    outputs = [_run(model, ids) for model in (exact, stock, ours)]
    wanted, *others = (output.logits for output in outputs)
    sums = [_Sum(), _Sum()]
    for one, got in zip(sums, others, strict=True):
        one.add(got, wanted)
    hidden = [output.hidden_states or () for output in outputs]
    for place in range(len(hidden[0]) - skip_last):
        key = f"layer {place - 1}" if place else "the embedding"
        pair = layers.setdefault(key, [_Sum(), _Sum()])
        for one, states in zip(pair, hidden[1:], strict=True):
            one.add(states[place], hidden[0][place])
    floor = _floor(exact, others[0].dtype)
    routed = any(".experts" in path for path, _ in exact.named_modules())
    stock_error, our_error = (one.typical if routed else one.relative for one in sums)
    choices = [(got.argmax(-1) == wanted.argmax(-1)).double().mean().item() for got in others]
    measure = "median token's logit error" if routed else "logit error"
    return [
        at_most(f"{name}: {measure}", our_error, ERROR_RATIO * max(stock_error, floor), ".2e"),
        at_least(
            f"{name}: greedy choice as the reference's", choices[1], choices[0] - _AGREEMENT_LOSS
        ),
    ]


@torch.no_grad()
def _perplexity(
    text: str, folder: Path, exact: nn.Module, stock: nn.Module, ours: nn.Module
) -> list[Check]:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    if len(tokens) < 2:
        raise ValueError("the text for the perplexity has fewer than two tokens")
    errors = {"stock": Errors(), "ours": Errors()}
    for inputs, targets in windows(tokens.to(exact.device), _WINDOW):
        wanted = _run(exact, inputs[None]).logits[0].double()
        for name, model in (("stock", stock), ("ours", ours)):
            errors[name].add(_run(model, inputs[None]).logits[0], wanted, targets)
    before, after = errors["stock"].perplexity, errors["ours"].perplexity
    return [at_most("held-out perplexity", after, PERPLEXITY_RATIO * before)]


def _generation(prompt: Tensor, stock: nn.Module, ours: nn.Module) -> list[Check]:
    """Where the two models' greedy texts part; told, not judged: the first near-tie decides."""
    if stock.config.is_encoder_decoder or not hasattr(stock, "generate"):
        return []
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": _GENERATED,
        "min_new_tokens": _GENERATED,
        "attention_mask": torch.ones_like(prompt),
        "pad_token_id": 0,
    }
    texts = [model.generate(prompt, **options)[0, prompt.shape[1] :] for model in (stock, ours)]
    differs = (texts[0] != texts[1]).nonzero()
    same = int(differs[0]) if len(differs) else _GENERATED
    return [Check("greedy tokens equal to stock's", f"first {same} of {_GENERATED}", "told", True)]


def _run(model: nn.Module, ids: Tensor) -> Any:
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, **extra)
    if model.config.is_encoder_decoder:
        output.hidden_states = output.decoder_hidden_states
    return output


def _model(folder: Path, dtype: Any, device: str) -> nn.Module:
    import transformers

    named = (json.loads((folder / "config.json").read_text()).get("architectures") or [None])[0]
    auto_class = getattr(transformers, named, None) if named else None
    model = load(folder, auto_class=auto_class, dtype=dtype)
    if dtype == torch.float64:  # the grouped matmul of experts has no float64
        model.config.get_text_config()._experts_implementation = "eager"
        model.config._experts_implementation = "eager"
    return model.to(device).eval().requires_grad_(False)


def _head_folded(folded: Source) -> bool:
    record = _record(folded)
    return bool(record and record["head"])


def _record(folded: Source) -> Mapping[str, Any] | None:
    path = folded.path / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _source_checks(source: Source, folded: Source) -> list[Check]:
    """Is this the source that the record names? By its hashes of weights and config."""
    record = _record(folded)
    if record is None:
        return []
    name = record["source"].get("digest", "sha256")  # schema 1 had no other
    recorded = record["source"]["files"]
    wanted = {file: recorded.get(file) for file in (CONFIG, *source.shards)}
    try:
        choose(name)
    except ValueError as error:
        return [Check(f"source files, {name}", "not compared", str(error), True)]
    wrong = [file for file, one in wanted.items() if one != hash_file(name, source.path / file)]
    value = f"differs at {wrong[0]}" if wrong else f"{len(wanted)} files alike"
    return [Check(f"source files, {name}", value, "as recorded", not wrong)]


def _layout_checks(source: Source, folded: Source) -> list[Check]:
    """Files, names, dtypes and shapes, where the record promises them."""
    record = _record(folded)
    if record is None:
        return []
    removed, added = set(record["removed"]), {record["untied"]} - {None}
    cast = record["converted"]
    wanted = {
        name: (source.weight_map[name], cast.get(entry.dtype, entry.dtype), entry.shape)
        for name, entry in source.entries.items()
        if name not in removed
    }
    found = {
        name: (folded.weight_map[name], entry.dtype, entry.shape)
        for name, entry in folded.entries.items()
        if name not in added
    }
    wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    value = f"differs at {wrong[0]}" if wrong else f"{len(found)} tensors alike"
    return [Check("file, name, dtype, shape", value, "as the source's", not wrong)]
