"""Memory that split-K kernels need between their programs: parts and counters.

The parts (fp32) come from torch's allocator for every call: on any stream, and inside a graph
capture, it hands out memory that nobody else uses before the call has ended. The counters must be
zero before a launch, and each launch leaves them zero, so they are kept. Two launches that may run
at the same time must never share a counter:

* outside capture, every (device, stream) has its own counters, and a stream runs one launch at a
  time;
* a captured launch may be replayed on any stream, beside anything, so each captured launch gets
  counters that nobody else ever gets (a graph never runs beside itself).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from flashnorm_triton.limits import MOST_SPLIT_TILES

_BLOCK = 1 << 20
_PER_STREAM = MOST_SPLIT_TILES
_lock = threading.Lock()
_blocks: dict[int, tuple[Tensor, int]] = {}
_of_stream: dict[tuple[int, int], Tensor] = {}


def counters(device: int, stream: int, count: int) -> Tensor:
    """``count`` zeroed int32 counters for one launch on CUDA device ``device``, raw ``stream``."""
    if torch.cuda.is_current_stream_capturing():
        return _take(device, count)
    if count > _PER_STREAM:
        raise ValueError(f"{count} split-K tiles; at most {_PER_STREAM} have counters")
    kept = _of_stream.get((device, stream))
    if kept is None:
        kept = _of_stream[device, stream] = _take(device, _PER_STREAM)
    return kept


def parts(like: Tensor, count: int) -> Tensor:
    """``count`` fp32 values of scratch memory on the device of ``like``, for one launch."""
    return torch.empty(count, dtype=torch.float32, device=like.device)


def _take(device: int, count: int) -> Tensor:
    """The next ``count`` unused counters. A block is never given back: 4 MiB serve a model."""
    count = -(-count // 4) * 4  # 16 bytes, the alignment that a compiled kernel takes for granted
    with _lock:
        block, used = _blocks.get(device, (None, 0))
        if block is None or used + count > _BLOCK:
            # Inside a capture this block becomes part of the graph, which then also zeroes it at
            # every replay: right, and never shared with work outside the graph.
            block, used = torch.zeros(_BLOCK, dtype=torch.int32, device=f"cuda:{device}"), 0
            if torch.cuda.is_current_stream_capturing():
                return block[:count]
            # Other streams take their share of the block without waiting for this one.
            torch.cuda.current_stream(device).synchronize()
        _blocks[device] = block, used + count
        return block[used : used + count]
