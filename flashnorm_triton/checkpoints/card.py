"""The model card of a folded checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flashnorm_triton.checkpoints.flags import TAG
from flashnorm_triton.checkpoints.source import CARD, RECORD, SOURCE_CARD

_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def make_card(folder: Path, record: dict[str, Any]) -> str:
    """The text of README.md for a fold that ``record`` (flashnorm.json) describes.

    ``folder`` is the source: what its own card says of licence and language is kept.
    """
    import yaml

    origin = record["source"]
    source = origin["name"]
    at = f", revision `{origin['revision']}`" if origin["revision"] else ""
    card = folder / CARD
    meta = {key: value for key, value in _front(card).items() if key in _KEPT}
    meta.setdefault("library_name", "transformers")
    if _HUB_ID.fullmatch(source):
        meta["base_model"] = source
    meta["tags"] = [*([TAG] if record["marks"] else []), "flashnorm"]
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    folds = record["folds"]
    moved = sum(fold["bias"] == "moved" for fold in folds)
    strict = record["mode"] == "strict"
    norms = (
        "The norms' weights are left out: load it with "
        "`flashnorm_triton.AutoFlashNormForCausalLM.from_pretrained`."
        if strict
        else "The norms' weights are still there and do nothing (ones, or zeros where the model "
        "adds one), so it loads wherever the source model does, with nothing else to do."
    )
    lines = [
        f"# {source}, norm gains folded (FlashNorm)",
        f"The same function as `{source}`: the gains of {len(folds)} normalisation layers are "
        "multiplied into the weights that follow them ([FlashNorm](https://arxiv.org/abs/"
        f"2407.09577)), in {record['arithmetic']} with one rounding. {norms}",
    ]
    if moved:
        lines.append(f"The biases of {moved} of them moved into the biases of those weights.")
    if record["head"]:
        lines.append(
            "The final norm's gain is folded into the output head, so `last_hidden_state` and the "
            "last of `hidden_states` are without that gain; logits are the same."
        )
    if record["untied"]:
        lines.append("The output head was tied to the embedding and has a tensor of its own now.")
    lines += [
        "Quantize this checkpoint, not the source, if the quantized model is to be folded: gains "
        "cannot be folded into quantized weights.",
        "## Provenance",
        f"- made by flashnorm_triton {record['flashnorm_triton']}, mode {record['mode']}\n"
        f"- source: `{source}`{at}, {origin['digest']} over its files `{origin['hash']}`\n"
        f"- every fold, and the norms that were left alone: `{RECORD}`"
        + (f"\n- the source's own card: `{SOURCE_CARD}`" if card.is_file() else ""),
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(lines) + "\n"


def _front(card: Path) -> dict[str, Any]:
    """What a card's YAML header says; nothing where it has none, or none that can be read."""
    from huggingface_hub import ModelCard

    if not card.is_file():
        return {}
    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, OSError):
        return {}
