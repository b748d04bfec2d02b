"""The level at which a model is patched, and making its layers blocks where that is called for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from flashnorm_triton.models.block.find import at_norm_level
from flashnorm_triton.models.installers import Declined, Installer
from flashnorm_triton.models.report import BLOCK, AuditReport, BlockReport

LEVELS = ("auto", "norm", "block")
FAILED = "could not run as a block: "


def at_level(report: AuditReport, level: str) -> AuditReport:
    """The report of an audit, as ``patch(level=...)`` carries it out.

    Raises ValueError where ``level`` is "block" and a layer is none.
    """
    if level == "norm":
        asked = "patched with level='norm'"
        return replace(report, blocks=tuple(at_norm_level(block, asked) for block in report.blocks))
    others = [block for block in report.blocks if block.level != BLOCK]
    if level == BLOCK and (others or not report.blocks):
        told = f"{others[0].layer}: {others[0].reason}" if others else "no layer could be one"
        raise ValueError(
            f"level='block' asks for whole layers, and of {report.model_class} "
            f"{len(others)} of {len(report.blocks)} are none ({told}): level='auto' runs the "
            "others as blocks and these module by module"
        )
    return report


def make_blocks(
    model: nn.Module, blocks: tuple[BlockReport, ...], sites: Mapping[str, Installer]
) -> tuple[BlockReport, ...]:
    """Make the proven layers blocks, one of each kind being tried first; the records of them all.

    ``sites`` are the installers of the norms, by path, at work already.
    """
    from flashnorm_triton.models.block.site import BlockSite, tried

    entries: list[BlockReport] = []
    answers: dict[Any, str | None] = {}
    for block in blocks:
        if block.level == BLOCK and block.spec is not None:
            why: str | None = None
            try:
                site = BlockSite(model, block, sites)
                site.take()
            except Declined as reason:
                why = str(reason)
            except Exception as error:
                why = f"{FAILED}{type(error).__name__}: {error}"
            else:
                kind = _kind(site.layer, block)
                if kind not in answers:
                    answers[kind] = tried(site.layer, block.spec)
                why = answers[kind]
                if why is not None:
                    site.give_back()
            if why is not None:
                block = at_norm_level(block, why)
        entries.append(block)
    return tuple(entries)


def undo_blocks(model: nn.Module) -> None:
    """Give every layer of ``model`` that is a block its own class again."""
    for module in list(model.modules()):
        block = vars(module).get("block")
        if hasattr(block, "give_back") and hasattr(module, "runner"):
            block.give_back()


def _kind(layer: nn.Module, block: BlockReport) -> Any:
    """What layers have in common that give the same answer."""
    spec = block.spec
    assert spec is not None
    weights = [(p.shape, p.dtype, p.device) for p in layer.parameters()]
    attention = replace(spec.attention, layer_index=None)
    return replace(spec, attention=attention), type(layer), tuple(weights)
