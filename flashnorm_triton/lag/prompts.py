"""What the command line lets a model go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH = 64


def prompts(
    tokenizer: Any | None,
    given: Sequence[str],
    text: str | None,
    rows: int,
    vocabulary: int,
    seed: int,
) -> tuple[Tensor, Tensor | None, str]:
    """(ids (B, P), mask (B, P) or None, what they are) of ``given`` prompts, one a row and padded
    on the left, or of ``rows`` pieces of a text, or random.

    Raises ValueError for words without a tokenizer, a text that is too short, or prompts of fewer
    than two tokens.
    """
    if tokenizer is None:
        if given or text is not None:
            raise ValueError("the model has no tokenizer: leave --prompt and --text out")
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (rows, LENGTH), generator=draw)
        return ids, None, f"{LENGTH} random tokens a row (the model has no tokenizer)"
    if given:
        return *_padded([_ids(tokenizer, one) for one in given]), "the given prompts"
    ids = torch.tensor(_ids(tokenizer, text))
    if len(ids) < rows * LENGTH:
        raise ValueError(
            f"the text has {len(ids)} tokens, {rows} rows need {rows * LENGTH}: give a longer one"
        )
    starts = [(2 * row + 1) * (len(ids) - LENGTH) // (2 * rows) for row in range(rows)]
    return torch.stack([ids[s : s + LENGTH] for s in starts]), None, f"{LENGTH} tokens of the text"


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise ValueError(f"prompt {number} has {len(row)} tokens: at least two are needed")
    longest = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, None if bool(mask.all()) else mask


def tokenizer_of(model: str | Path) -> Any | None:
    """The tokenizer that comes with a model; None when there is none."""
    from transformers import AutoTokenizer

    from flashnorm_triton import demo_model

    if Path(model) == demo_model.FOLDER:
        return demo_model.tokenizer()
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError):
        return None
