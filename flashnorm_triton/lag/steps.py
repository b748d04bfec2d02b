"""The numbers of each step: how far a candidate's logits are from the reference at t and at t-1."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """One figure a step and row, all (T, B), float64.

    Distances are Euclidean, of centred logits (a constant added to all of them changes no
    probability), over the norm of the reference's at t. ``at_t`` and ``at_before`` are those of the
    candidate to the reference at t and at t-1, ``moved`` that between the two, ``noise`` and
    ``noise_before`` those of the stock model in its own dtype to the reference at t and at t-1.
    ``kl`` is KL(reference ‖ candidate), ``kl_back`` KL(candidate ‖ reference), ``kl_noise``
    KL(reference ‖ stock), in nats.
    """

    at_t: np.ndarray
    at_before: np.ndarray
    moved: np.ndarray
    noise: np.ndarray
    noise_before: np.ndarray
    kl: np.ndarray
    kl_back: np.ndarray
    kl_noise: np.ndarray


def compare(candidate: Tensor, control: Tensor, reference: Tensor, before: Tensor) -> Steps:
    """The figures of a chunk of logits, each (T, B, V), one step at a time in ``reference``'s dtype
    or float32, whichever is wider. ``before`` (B, V) is the reference one step before the first."""
    rows = []
    previous = _wide(before)
    for ours, stock, wanted in zip(candidate, control, reference, strict=True):
        wanted = _wide(wanted)
        rows.append(_step(ours.to(wanted), stock.to(wanted), wanted, previous))
        previous = wanted
    stacked = torch.stack(rows).double().cpu().numpy()  # (T, 8, B)
    return Steps(*(stacked[:, place] for place in range(stacked.shape[1])))


def joined(parts: list[Steps]) -> Steps:
    """The chunks behind one another."""
    names = [field.name for field in fields(Steps)]
    return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _step(ours: Tensor, stock: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    size = _centred_norm(wanted)
    log = [x.log_softmax(-1) for x in (wanted, ours, stock)]
    chance, own = log[0].exp(), log[1].exp()
    return torch.stack(
        [
            _centred_norm(ours - wanted) / size,
            _centred_norm(ours - before) / size,
            _centred_norm(wanted - before) / size,
            _centred_norm(stock - wanted) / size,
            _centred_norm(stock - before) / size,
            (chance * (log[0] - log[1])).sum(-1),
            (own * (log[1] - log[0])).sum(-1),
            (chance * (log[0] - log[2])).sum(-1),
        ]
    )


def _centred_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - x.mean(-1, keepdim=True), dim=-1)
