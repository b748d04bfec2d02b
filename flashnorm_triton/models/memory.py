"""What patching takes of the device's memory, measured while it goes from site to site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class PatchMemory:
    """Bytes. ``weights``: the model's parameters and buffers on the watched devices when patching
    began. ``largest_site``: the largest site's packed tensors. ``peak``: the most that was
    allocated on CUDA devices while patching, other tensors of the process not counted; None for a
    model that is not on one.
    """

    weights: int
    largest_site: int
    peak: int | None

    @property
    def within_goal(self) -> bool | None:
        """Whether the peak stayed within the weights and 1.1 times the largest site."""
        if self.peak is None:
            return None
        return self.peak <= self.weights + 1.1 * self.largest_site


class Watch:
    """Follows the memory of one ``patch``; reads torch's counters and resets none of them."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        self._devices = sorted({t.device.index for t in tensors if t.is_cuda})
        watched = [t for t in tensors if t.is_cuda] if self._devices else tensors
        self._weights = sum(t.nbytes for t in watched)
        self._largest = 0
        self._before = {d: torch.cuda.memory_allocated(d) for d in self._devices}
        self._peak_before = {d: torch.cuda.max_memory_allocated(d) for d in self._devices}
        self._most = dict(self._before)

    def built(self, nbytes: int) -> None:
        """A site's own tensors have been made, and the stock ones are still there."""
        self._largest = max(self._largest, nbytes)
        for device in self._devices:
            self._most[device] = max(self._most[device], torch.cuda.memory_allocated(device))

    def result(self) -> PatchMemory:
        """The record, once all sites are done."""
        if not self._devices:
            return PatchMemory(self._weights, self._largest, None)
        added = 0
        for device in self._devices:
            peak = torch.cuda.max_memory_allocated(device)
            # The process may have peaked higher before: then the samples are what is known.
            most = peak if peak > self._peak_before[device] else self._most[device]
            added += most - self._before[device]
        return PatchMemory(self._weights, self._largest, self._weights + added)
