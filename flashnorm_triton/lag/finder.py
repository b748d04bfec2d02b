"""find_lag: generate with the patched model, lead the stock model along, compare step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.lag import judging, steps
from flashnorm_triton.lag.concluding import conclude
from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.report import LagReport
from flashnorm_triton.lag.settings import Settings, check_model, text_config, window_of
from flashnorm_triton.lag.sites import Site, sites_to_watch
from flashnorm_triton.lag.stepping import Decoder, Sampler, Text
from flashnorm_triton.lag.steps import Steps
from flashnorm_triton.lag.taps import Taps, inputs_of
from flashnorm_triton.models import audit, patch
from flashnorm_triton.models.installers import sites_of

Progress = Callable[[str, float], None]
_PROMPT = 16


def find_lag(
    model: nn.Module | tuple[nn.Module, nn.Module],
    prompt: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    tokens: int = 4096,
    mode: str = "eager",
    cache: Any = None,
    layers: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    restart: bool = False,
    repeats: bool = True,
    reference: torch.dtype | None = None,
    progress: Progress | None = None,
) -> LagReport:
    """Whether a patched model answers with what belongs to the step before.

    The patched model generates; a stock copy in a wider dtype (the reference) and the stock model
    in its own (the control) then read the same tokens, ``chunk`` steps at a time. Each step's
    logits are compared with the reference's at t and at t-1. The control's distances say what
    rounding alone does; a step beyond that which t-1 explains is lagged. docs/staleness.md derives
    the statistic and its limits.

    Args:
        model: a causal language model, stock or patched, which is left as it is (copies are
            made); or a pair (patched, stock), of which no copies are made but the reference.
        prompt: token ids (B, P), P ≥ 2; None: 16 random ones.
        attention_mask: (B, P), zeros where a left-padded prompt is padding, two real tokens or more
            a row; None: no padding.
        tokens: to generate a row. The end token does not end it.
        mode: "eager", "compiled" (torch.compile of the decode step) or "graph" (a CUDA graph of the
            step, replayed; a GPU only). The last two run with a static cache.
        cache: "dynamic", "static", or a function of (model, batch, length) that makes one.
        layers: also watch every patched site, input and output, and name the first that is off.
            Taps copy rows between kernels; a fault of timing may hide behind them, so run without
            as well.
        temperature: 0 is greedy. Greedy texts may run in circles, in which steps cannot be told
            apart; the report counts how many could.
        top_k: sample from the likeliest ones only; None: from all.
        seed: of the sampling, and of a random prompt.
        chunk: steps held in memory at a time: chunk · B · vocabulary logits of three models.
        restart: begin anew, with the last tokens as the prompt, when the positions run out.
        repeats: also let the stock model generate, to compare how much the texts repeat.
        reference: dtype of the reference; None: float32 for half precisions, else float64.
        progress: called with (what runs, its share done).

    Returns:
        A LagReport: ``lag`` (None, or the first step, layer and site), ``clean``, every step's
        figures, ``summary()``, ``to_json()``.

    Raises ValueError for what cannot be done (see Settings), before anything is copied or run.
    """
    settings = Settings(
        tokens, mode, cache, layers, temperature, top_k, seed, chunk, restart, repeats
    )
    first = model[0] if isinstance(model, tuple) else model
    device = next(first.parameters()).device
    check_model(first, device, mode)
    if prompt is None:
        prompt = _random_prompt(first, seed)
    prompt, mask = _checked(prompt, attention_mask, device, first)
    window = window_of(first, prompt, settings)
    trio = _trio(model, reference)
    with torch.no_grad(), _evaluating(trio.candidate, trio.control, trio.reference):
        return _Search(trio, settings, prompt, mask, window, progress or _silent).run()


@dataclass(frozen=True)
class Trio:
    """The model under test, the stock one in its dtype, and the stock one in a wider dtype."""

    candidate: nn.Module
    control: nn.Module
    reference: nn.Module


def _silent(what: str, done: float) -> None: ...


def _random_prompt(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.get_input_embeddings().weight.shape[0], (1, _PROMPT), generator=draw)


def _checked(
    prompt: Tensor, mask: Tensor | None, device: torch.device, model: nn.Module
) -> tuple[Tensor, Tensor | None]:
    size = model.get_input_embeddings().weight.shape[0]
    if prompt.dim() != 2 or prompt.shape[1] < 2:
        raise ValueError(
            f"a prompt of shape {tuple(prompt.shape)}: (rows, tokens) with at least two tokens, "
            "for the first step to have one before it"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= size:
        raise ValueError(f"the prompt has token ids outside 0 … {size - 1}: use the model's own")
    if mask is not None:
        if mask.shape != prompt.shape or not bool((mask[:, 1:] >= mask[:, :-1]).all()):
            raise ValueError(
                f"an attention_mask of shape {tuple(mask.shape)} for a prompt of "
                f"{tuple(prompt.shape)}: zeros on the left, then ones (pad on the left)"
            )
        if not bool(mask[:, -2:].all()):
            raise ValueError("a row of the prompt has fewer than two real tokens: give it more")
        mask = None if bool(mask.all()) else mask.to(device)
    return prompt.to(device), mask


def _trio(model: nn.Module | tuple[nn.Module, nn.Module], reference: torch.dtype | None) -> Trio:
    if isinstance(model, tuple):
        candidate, stock = model
    elif sites_of(model):
        if any(site.freed for site in sites_of(model)):
            raise ValueError(
                f"{type(model).__name__} was patched with revertible=False, which freed its stock "
                "weights: give the pair (patched, stock)"
            )
        candidate, stock = model, copy.deepcopy(model)
        patch_handle(stock).revert()
    else:
        candidate, stock = copy.deepcopy(model), model
        patch(candidate)
    dtype = next(stock.parameters()).dtype
    wide = reference or (torch.float32 if dtype.itemsize < 4 else torch.float64)
    return Trio(candidate, stock, stock if wide == dtype else _widened(stock, wide))


def _widened(stock: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(stock).to(dtype)
    if dtype == torch.float64:  # the grouped matmul of experts has no float64
        for config in (model.config, text_config(model)):
            config._experts_implementation = "eager"
    return model


def patch_handle(model: nn.Module) -> Any:
    """The handle of a model that is already patched."""
    from flashnorm_triton.models.patcher import PatchHandle

    return PatchHandle(model, sites_of(model)[0].audit, changed=False)


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    before = [(model, model.training) for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in before:
            model.train(training)


@dataclass
class _Found:
    """What is kept of a run: figures of every step, not the logits."""

    steps: list[Steps] = field(default_factory=list)
    sites: dict[Site, list[SiteSteps]] = field(default_factory=dict)


class _Search:
    """One run: windows of a text, chunks of a window, steps of a chunk."""

    def __init__(
        self,
        trio: Trio,
        settings: Settings,
        prompt: Tensor,
        mask: Tensor | None,
        window: int,
        progress: Progress,
    ) -> None:
        self.trio, self.settings, self.progress = trio, settings, progress
        self.prompt, self.mask, self.window = prompt, mask, window
        self.batch = prompt.shape[0]
        self.length = prompt.shape[1] + window
        self.found = _Found()
        self.sites: list[Site] = []

    def run(self) -> LagReport:
        settings, trio = self.settings, self.trio
        if settings.layers:
            sites = sites_of(trio.candidate)
            report = sites[0].audit if sites else audit(trio.candidate)
            self.sites = sites_to_watch(report)
        texts: dict[str, list[Tensor]] = {}
        places = [place for site in self.sites for place in site.places]
        taps = Taps(trio.candidate, places, self.batch, settings.chunk)
        try:
            texts["patched"] = self._generate(trio.candidate, "patched", taps)
        finally:
            taps.remove()
        if settings.repeats:
            texts["stock"] = self._generate(trio.control, "stock", None)
        wide = next(trio.reference.parameters()).dtype
        dtype = next(trio.control.parameters()).dtype
        run = {
            "model": type(trio.control).__name__,
            "mode": settings.mode,
            "dtype": str(dtype).removeprefix("torch."),
            "reference": str(wide).removeprefix("torch."),
            "tokens": settings.tokens,
            "batch": self.batch,
            "prompt": self.prompt.shape[1],
        }
        figures = {site: judging.joined(parts) for site, parts in self.found.sites.items()}
        unseen = tuple(site.norm for site in self.sites if site not in figures)
        return conclude(run, dtype, steps.joined(self.found.steps), figures, unseen, texts)

    def _generate(self, model: nn.Module, name: str, taps: Taps | None) -> list[Tensor]:
        """The windows (T, B) of a run's tokens; with taps, compared on the way."""
        settings = self.settings
        sampler = Sampler(settings.temperature, settings.top_k, settings.seed, self.prompt.device)
        decoder = Decoder(model, settings.mode, settings.cache, self.batch, self.length)
        prompt, mask = self.prompt, self.mask
        texts: list[Tensor] = []
        while (left := settings.tokens - sum(map(len, texts))) > 0:
            done = settings.tokens - left
            window = _Window(self, decoder, sampler, prompt, mask, taps)
            pieces = []
            for piece in window.chunks(min(self.window, left)):
                pieces.append(piece)
                done += len(piece)
                self.progress(name, done / settings.tokens)
            texts.append(torch.cat(pieces))
            recent = torch.cat([prompt, texts[-1].T], 1)
            prompt, mask = recent[:, -self.prompt.shape[1] :].contiguous(), None
        return texts


class _Window:
    """One prefill and the steps after it."""

    def __init__(
        self,
        search: _Search,
        decoder: Decoder,
        sampler: Sampler,
        prompt: Tensor,
        mask: Tensor | None,
        taps: Taps | None,
    ) -> None:
        self.search, self.decoder, self.sampler, self.taps = search, decoder, sampler, taps
        self.prompt, self.mask = prompt, mask
        if taps is not None:
            sizes = (search.batch, search.length, mask)
            self.reference = Text(search.trio.reference, "dynamic", *sizes)
            self.control = Text(search.trio.control, "dynamic", *sizes)

    def chunks(self, count: int) -> Iterator[Tensor]:
        """Generate ``count`` tokens; yields them (T, B) chunk by chunk."""
        logits = self.decoder.prefill(self.prompt, self.mask)[:, -1]
        if self.taps is not None:
            self._compare_prefill(logits)
        token = self.sampler(logits)
        yield token[None]
        left = count - 1
        kept = None
        while left > 0:
            length = min(self.search.settings.chunk, left)
            if kept is None:
                kept = logits.new_empty(length, *logits.shape)
            fed, chosen = [], []
            for place in range(length):
                fed.append(token)
                logits = self.decoder.step(token)
                if self.taps is not None:
                    kept[place].copy_(logits)
                    self.taps.keep(place)
                token = self.sampler(logits)
                chosen.append(token)
            if self.taps is not None:
                self._compare(kept[:length], torch.stack(fed, 1))
            left -= length
            yield torch.stack(chosen)

    def _compare_prefill(self, logits: Tensor) -> None:
        wanted, inputs = self._led(self.reference, self.prompt)
        control, _ = self._led(self.control, self.prompt)
        found = self.search.found
        found.steps.append(steps.compare(logits[None], control[-1:], wanted[-1:], wanted[-2]))
        self.before = wanted[-1]
        self.inputs_before = {path: rows[-1] for path, rows in inputs.items()}
        self.tapped_before = {
            place: tap.last.clone()
            for place, tap in self.taps.by_place.items()
            if place[1] and tap.last is not None
        }
        for site in self._visible():
            found.sites.setdefault(site, []).append(judging.nothing(self.search.batch))

    def _visible(self) -> list[Site]:
        return [s for s in self.search.sites if all(self.taps.seen(place) for place in s.places)]

    def _led(self, text: Text, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (T, B, V) of ids (B, T), and the sites' inputs (T, B, K) by path."""
        paths = [site.norm for site in self.search.sites]
        with inputs_of(text.model, paths) as seen:
            logits = text.feed(ids).transpose(0, 1)
        rows = {
            path: calls[0].reshape(*ids.shape, -1).transpose(0, 1)
            for path, calls in seen.items()
            if len(calls) == 1
        }
        return logits, rows

    def _compare(self, logits: Tensor, ids: Tensor) -> None:
        search, count = self.search, len(logits)
        wanted, inputs = self._led(self.reference, ids)
        control, control_inputs = self._led(self.control, ids)
        search.found.steps.append(steps.compare(logits, control, wanted, self.before))
        self.before = wanted[-1]
        for site in self._visible():
            place = (site.norm, True)
            candidate = {each: self.taps.kept[each][:count] for each in site.places}
            known = torch.cat([self.inputs_before[site.norm][None], inputs[site.norm]])
            search.found.sites[site].append(
                judging.judge(
                    site,
                    candidate,
                    self.tapped_before[place],
                    known,
                    control_inputs[site.norm],
                    search.trio.reference,
                    search.trio.control,
                )
            )
            self.inputs_before[site.norm] = inputs[site.norm][-1]
            self.tapped_before[place] = candidate[place][-1].clone()
