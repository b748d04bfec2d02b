"""The three models of a run: the patched one, stock in its own dtype, and stock in a wider one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from flashnorm_triton.lag.settings import text_config
from flashnorm_triton.models import AuditReport, PatchHandle, audit, patch
from flashnorm_triton.models.installers import sites_of


@dataclass(frozen=True)
class Trio:
    """``candidate`` is under test, ``control`` says what rounding does, ``reference`` is right."""

    candidate: nn.Module
    control: nn.Module
    reference: nn.Module

    @property
    def dtype(self) -> torch.dtype:
        """That of the models under test."""
        return next(self.control.parameters()).dtype

    @property
    def wide(self) -> torch.dtype:
        """That of the reference."""
        return next(self.reference.parameters()).dtype

    @property
    def audit(self) -> AuditReport:
        """What was done to the candidate's norms; an audit of it where it is not patched."""
        sites = sites_of(self.candidate)
        return sites[0].audit if sites else audit(self.candidate)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """All three in evaluation mode within the block, without gradients."""
        before = [(model, model.training) for model in vars(self).values()]
        try:
            for model, _ in before:
                model.eval()
            with torch.no_grad():
                yield
        finally:
            for model, training in before:
                model.train(training)


def trio_of(model: nn.Module | tuple[nn.Module, nn.Module], reference: torch.dtype | None) -> Trio:
    """The models for a stock model, a patched one, or a pair (patched, stock).

    Raises ValueError for a patched model whose stock weights were freed.
    """
    if isinstance(model, tuple):
        candidate, stock = model
    elif sites := sites_of(model):
        if any(site.freed for site in sites):
            raise ValueError(
                f"{type(model).__name__} was patched with revertible=False, which freed its stock "
                "weights: give the pair (patched, stock)"
            )
        candidate, stock = model, copy.deepcopy(model)
        PatchHandle(stock, sites[0].audit, changed=False).revert()
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
