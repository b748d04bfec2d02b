"""Which pre-norms can be dropped because the linears behind them are normalised again.

Source: FlashNorm (arXiv 2407.09577). With s = 1/sqrt(mean(x^2) + eps1), norm -> bias-free linear
gives s·p, p = x W*ᵀ, and a norm over (part of) that row divides s out again, up to its own eps:
``s p / sqrt(mean((s p)^2) + eps2) = p / sqrt(mean(p^2) + eps2 (mean(x^2) + eps1))``.

The sites are those that the audit would fuse; what lies between linear and later norm is found by
data flow (:mod:`cancel_trace`). A site whose columns are all normalised again is "cancel", one
where only some are (q and k but not v; a latent but not its rotary slice) is "partial".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm_triton.models.cancel_trace import ColumnTracer, LinearUse
from flashnorm_triton.models.installers import replacements_in
from flashnorm_triton.models.norms import NormReader
from flashnorm_triton.models.report import AuditReport, SiteReport
from flashnorm_triton.models.shadow import HOOK_TABLES

CHOICES = (False, "exact", "fast")
_MOST_REASONS = 2
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Piece:
    """``width`` neighbouring columns, normalised by each of ``norms`` (none: only scaled by s)."""

    width: int
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The columns of one linear: ``heads`` times the same ``pieces``, one behind another."""

    heads: int
    pieces: tuple[Piece, ...]

    @property
    def columns_out(self) -> int:
        """Columns handed on: those that two norms read (k = v layers) come once for each."""
        return self.heads * sum(p.width * max(1, len(p.norms)) for p in self.pieces)


@dataclass(frozen=True)
class LaterNorm:
    """A norm behind a consumer whose work is done in the site's own launches."""

    norm: str
    convention: str
    eps: float


@dataclass(frozen=True)
class CancelReport(SiteReport):
    """A site with decision "cancel" or "partial": ``layouts`` are parallel to ``consumers``.

    ``how`` is "exact" (the later eps corrected, row by row) or "fast" (left as it is; no statistics
    of x are taken). A partial site needs s for its other columns, so it is always exact.
    """

    layouts: tuple[Layout, ...] = ()
    later: tuple[LaterNorm, ...] = ()
    how: str = "exact"

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, with the later norms by name."""
        return {**super().to_dict(), "how": self.how, "later": [n.norm for n in self.later]}


def check_cancel(cancel: Any) -> None:
    """Raise ValueError unless ``cancel`` is False, "exact" or "fast"."""
    if cancel is not False and cancel not in CHOICES[1:]:
        raise ValueError(f"cancel={cancel!r}: use one of {CHOICES}")


def cancellations(
    model: nn.Module,
    report: AuditReport,
    cancel: str | bool,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
) -> AuditReport:
    """The report with decisions "cancel" and "partial" where the pre-norm's s can be dropped.

    ``report`` is the finished audit of ``model``, which is only read. Sites where nothing can be
    dropped stay as they are, with the obstacle added to their reason.

    Raises ValueError for a ``cancel`` that is not False, "exact" or "fast".
    """
    check_cancel(cancel)
    if any(True for _ in replacements_in(model)):
        return report  # patched: its report says already what was done
    modules = dict(model.named_modules())
    sites = [site for site in report.sites if _may_cancel(site, modules)]
    if not cancel or not sites:
        return report
    widths = {name: modules[name].out_features for site in sites for name in site.consumers}
    readers = [site.norm for site in report.sites if isinstance(modules.get(site.norm), nn.Module)]
    try:
        tracer = ColumnTracer(model, widths, readers, example_inputs)
    except Exception as error:
        return _untouched(report, sites, f"the model could not be copied: {error}")
    failure = tracer.observe()
    if failure is not None:
        return _untouched(report, sites, f"the model could not be followed: {failure}")
    return _Decider(model, modules, report, sites, tracer).decide(str(cancel))


def _may_cancel(site: SiteReport, modules: dict[str, nn.Module]) -> bool:
    return (
        site.decision == "fuse"
        and getattr(site, "form", "") in ("", "packed")
        and site.kind == "rms"
        and all(type(modules[name]) is nn.Linear for name in site.consumers)
    )


def _untouched(report: AuditReport, sites: list[SiteReport], why: str) -> AuditReport:
    told = {site.norm: replace(site, reason=f"{site.reason}; not cancelled: {why}")
            for site in sites}  # fmt: skip
    return replace(report, sites=tuple(told.get(s.norm, s) for s in report.sites))


class _Decider:
    """One pass over the sites of one model, with what the tracer saw."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        report: AuditReport,
        sites: list[SiteReport],
        tracer: ColumnTracer,
    ) -> None:
        self.report, self.sites, self.tracer, self.modules = report, sites, tracer, modules
        self.traits = NormReader()
        self.shared = _shared(modules)
        self.site_of = {name: site for site in sites for name in site.consumers}
        self.obstacles = {
            name: why for name in tracer.norm_uses if (why := self._obstacle(name)) is not None
        }
        self.later = set(tracer.norm_uses) - set(self.obstacles)

    def decide(self, cancel: str) -> AuditReport:
        """Settle which norms are taken over, and write it into the report."""
        self._settle()
        # A norm can be the head of one site or the tail of another. Being dropped altogether comes
        # first, then having anything to drop behind it.
        heads = [site for site in self.sites if any(self._taken(name) for name in site.consumers)]
        self._drop({site.norm for site in heads}, "it is the pre-norm of another such site")
        entries = self._entries(cancel)
        place = self._rehearse(entries)
        if place is not None:
            twice = {n for use in self.tracer.linear_uses.values() for n in _twice(use, self.later)}
            self._drop(twice, f"with the columns of both norms {place} returns other shapes")
            entries = self._entries(cancel)
            place = self._rehearse(entries)
        if place is not None:
            why = f"with the later norms done before {place} fails or returns other shapes"
            return _untouched(self.report, self.sites, why)
        return replace(self.report, sites=self._written(entries))

    def _entries(self, cancel: str) -> dict[str, SiteReport]:
        entries = {}
        for site in self.sites:
            taken = [norm for name in site.consumers for norm in self._taken(name)]
            entries[site.norm] = self._entry(site, taken, cancel)
        return entries

    def _rehearse(self, entries: dict[str, SiteReport]) -> str | None:
        """Where the model's shapes part from the stock ones with these sites put in, if they do."""
        stand_ins: dict[str, Callable[[Tensor], Tensor]] = {}
        for entry in entries.values():
            if isinstance(entry, CancelReport):
                stand_ins.update(_stand_ins(entry))
        return self.tracer.replay(stand_ins) if stand_ins else None

    def _written(self, entries: dict[str, SiteReport]) -> tuple[SiteReport, ...]:
        homes = {
            later.norm: entry.norm
            for entry in entries.values()
            if isinstance(entry, CancelReport)
            for later in entry.later
        }
        written = []
        for site in self.report.sites:
            entry = entries.get(site.norm, site)
            if site.norm in homes:
                reason = f"done in the same launches as {homes[site.norm]}, which is dropped for it"
                entry = replace(site, decision="keep", reason=reason, launches_saved=0)
            written.append(entry)
        return tuple(written)

    def _entry(self, site: SiteReport, taken: list[str], cancel: str) -> SiteReport:
        names = list(dict.fromkeys(taken))
        if not names:
            why = "; ".join(list(dict.fromkeys(self._why_not(site)))[:_MOST_REASONS])
            return replace(site, reason=f"{site.reason}; not cancelled: {why}")
        layouts = tuple(self._layout(name) for name in site.consumers)
        whole = all(piece.norms for layout in layouts for piece in layout.pieces)
        how = cancel if whole else "exact"
        later = tuple(self._later_norm(name) for name in names)
        listed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        if whole:
            reason = f"every column behind it is normalised again ({listed})"
        else:
            needs = ", ".join(dict.fromkeys(self._why_not(site)))
            reason = f"columns normalised again ({listed}) need no scale; the others do: {needs}"
        if how == "exact":
            reason += "; exact, the later eps is corrected for each row"
        else:
            worst = max(norm.eps for norm in later)
            reason += (
                f"; approximate, the later eps ({worst:g}) stays as it is: rows are off by up to "
                "eps / mean(p^2) where p, the unnormalised projection, is small"
            )
        saved = sum(self.tracer.norm_uses[name].operations for name in names) - 1
        fields = {key: value for key, value in vars(site).items() if key in _SITE_FIELDS}
        fields.update(
            decision="cancel" if whole else "partial",
            reason=reason,
            launches_saved=site.launches_saved + saved,
        )
        return CancelReport(**fields, layouts=layouts, later=later, how=how)

    def _later_norm(self, name: str) -> LaterNorm:
        traits = self.traits.read(self.modules[name])
        return LaterNorm(name, traits.convention, float(traits.eps))

    def _why_not(self, site: SiteReport) -> list[str]:
        reasons = []
        for name in site.consumers:
            use, short = self.tracer.linear_uses[name], name.rpartition(".")[2]
            if self.modules[name].bias is not None:
                reasons.append(f"{short} has a bias")
            elif not all(piece.norms for piece in self._layout(name).pieces):
                norms = [n for n in use.normed if n not in self.later]
                told = [f"{n}: {self.obstacles[n]}" for n in norms if n in self.obstacles]
                reasons += told or [f"{short} is {why}" for why in list(use.other.values())[:1]]
        return reasons or ["nothing behind it is normalised again"]

    def _obstacle(self, name: str) -> str | None:
        """Why the norm ``name`` cannot be taken over into the site before it; None if it can."""
        use, module = self.tracer.norm_uses[name], self.modules[name]
        traits = self.traits.read(module)
        if traits.kind != "rms" or traits.eps is None or not traits.eps > 0:
            return "not recognised as an RMS norm over its last dimension with eps > 0"
        if use.obstacles:
            return next(iter(use.obstacles))
        if not use.sources:
            return "it does not read a linear's output"
        if len(use.sources) > 1 or len(use.grids) > 1:
            return "it reads other columns at other calls"
        (grid,) = use.grids
        if traits.size is not None and {width for _, width in grid} != {traits.size}:
            return "its size is not that of the rows it is given"
        (linear,) = use.sources
        if self.modules[linear].bias is not None:
            return f"{linear} has a bias, which s does not scale"
        seen = self.tracer.linear_uses[linear]
        for start, width in grid:
            for column in range(start, start + width):
                if column in seen.other:
                    return f"what it reads is also {seen.other[column]}"
        return self._module_obstacle(name, self.modules[linear].weight)

    def _module_obstacle(self, name: str, weight: Tensor) -> str | None:
        module = self.modules[name]
        if hasattr(module, "_hf_hook"):
            return "accelerate manages it (offloaded or spread over devices)"
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        for table in HOOK_TABLES:
            for hook in (getattr(module, table, None) or {}).values():
                if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
                    return "it has a hook that sees its output"
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or parameter.dtype not in _FLOATS:
                return "its gain is not a plain parameter"
            if id(parameter) in self.shared:
                return "it shares its gain with another module"
            if parameter.device != weight.device:
                return "its gain is on another device than the linear before it"
        return None

    def _settle(self) -> None:
        """Leave only norms whose columns are wholly theirs, or shared by two that can both go."""
        while True:
            out = {name for name in self.later if not self._agrees(name)}
            if not out:
                return
            self._drop(out, "its columns are also read by a norm that stays")

    def _drop(self, names: set[str], why: str) -> None:
        gone = names & self.later
        self.later -= gone
        self.obstacles.update(dict.fromkeys(gone, why))
        if gone:
            self._settle()

    def _agrees(self, name: str) -> bool:
        (linear,) = self.tracer.norm_uses[name].sources
        use, grid = self.tracer.linear_uses[linear], self.tracer.norm_uses[name].grids
        columns = _columns(*grid)
        others = [n for n in use.normed if n != name and _columns(use.normed[n]) & columns]
        if not others:
            return True
        same = {frozenset(use.normed[n]) for n in others} == set(grid)
        whole = len(columns) == use.columns and use.heads_before_last
        return len(others) == 1 and others[0] in self.later and same and whole

    def _taken(self, linear: str) -> list[str]:
        return [norm for norm in self.tracer.linear_uses[linear].normed if norm in self.later]

    def _layout(self, linear: str) -> Layout:
        return layout_of(self.tracer.linear_uses[linear], self._taken(linear))


def layout_of(use: LinearUse, norms: list[str]) -> Layout:
    """The columns of a linear as repeated pieces, when ``norms`` are taken over."""
    starts: dict[int, tuple[int, list[str]]] = {}
    for norm in norms:
        for start, width in use.normed[norm]:
            starts.setdefault(start, (width, []))[1].append(norm)
    if not starts:
        return Layout(1, (Piece(use.columns),))
    pieces, column, scaled = [], 0, 0
    while column < use.columns:
        width, readers = starts.get(column, (1, []))
        if readers and scaled:
            pieces.append(Piece(scaled))
            scaled = 0
        if readers:
            pieces.append(Piece(width, tuple(readers)))
        else:
            scaled += 1
        column += width
    if scaled:
        pieces.append(Piece(scaled))
    period = next(
        n
        for n in range(1, len(pieces) + 1)
        if len(pieces) % n == 0 and pieces[:n] * (len(pieces) // n) == pieces
    )
    return Layout(len(pieces) // period, tuple(pieces[:period]))


@dataclass(frozen=True)
class _Emit:
    """What a site's norm does with shapes: ``width`` columns come out."""

    width: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.width))


@dataclass(frozen=True)
class _Take:
    """What a site's linear does with shapes: it takes its range of the columns."""

    start: int
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.narrow(-1, self.start, self.width)


@dataclass(frozen=True)
class _Share:
    """What a later norm does with shapes: it takes its ``1 / of`` of the heads."""

    of: int

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.of == 1 else x.narrow(-2, 0, x.shape[-2] // self.of)


def _stand_ins(entry: CancelReport) -> dict[str, Callable[[Tensor], Tensor]]:
    """What the modules of a site do with shapes: equal where two sites are alike."""
    widths = [layout.columns_out for layout in entry.layouts]
    stand_ins: dict[str, Callable[[Tensor], Tensor]] = {entry.norm: _Emit(sum(widths))}
    for index, name in enumerate(entry.consumers):
        stand_ins[name] = _Take(sum(widths[:index]), widths[index])
    for layout in entry.layouts:
        for piece in layout.pieces:
            stand_ins.update(dict.fromkeys(piece.norms, _Share(len(piece.norms))))
    return stand_ins


def _twice(use: LinearUse, later: set[str]) -> list[str]:
    """The norms that read the same columns of one linear as another one does."""
    names = [name for name in use.normed if name in later]
    return [n for n in names if any(m != n and use.normed[m] & use.normed[n] for m in names)]


def _columns(ranges: Any) -> set[int]:
    return {column for start, width in ranges for column in range(start, start + width)}


def _shared(modules: dict[str, nn.Module]) -> set[int]:
    seen: dict[int, int] = {}
    for module in modules.values():
        for parameter in module._parameters.values():
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


_SITE_FIELDS = frozenset(SiteReport.__dataclass_fields__)
