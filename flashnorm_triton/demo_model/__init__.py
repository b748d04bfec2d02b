"""The small trained Llama that ships with the package: real weights without a hub.

How it was made, on which text and how good it is: MODEL_CARD.md and training.json in this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

FOLDER = Path(__file__).resolve().parent


def _need(name: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        raise FileNotFoundError(
            f"the shipped model lacks {path}: the installation is incomplete, install it again"
        )
    return path


def load(dtype: torch.dtype | None = None, device: str = "cpu") -> LlamaForCausalLM:
    """The model in evaluation mode, without gradients; ``dtype`` None means bfloat16, as shipped.

    Raises FileNotFoundError naming the file when the package was installed without its weights.
    """
    import torch
    from transformers import LlamaForCausalLM

    _need("model.safetensors")
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=dtype or torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)


def tokenizer() -> PreTrainedTokenizerBase:
    """The byte-level BPE that the model was trained with; any text round-trips."""
    from transformers import PreTrainedTokenizerFast

    _need("tokenizer.json")
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


def heldout_text() -> str:
    """Up to 60 KB of standard-library source that the training never saw."""
    return _need("heldout.txt").read_text(encoding="utf-8")


def training() -> dict[str, Any]:
    """What training.json records: data, steps, losses, held-out perplexity, gain statistics."""
    return json.loads(_need("training.json").read_text(encoding="utf-8"))
