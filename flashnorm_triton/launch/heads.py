"""The kernel of a packed projection's head norms ready to launch, with its table of heads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashnorm_triton.compile_unit import CompileUnit
from flashnorm_triton.compiled import TRITON_DTYPE, Kernel
from flashnorm_triton.launch.common import Geometry, cdiv

GAINS = 4  # a launch takes up to so many
WIDEST = 8192  # columns of a head that one program holds
_TILE = 1024
_PROGRAMS = 264  # with fewer rows than this, a row's heads are spread over several programs


class Entry(NamedTuple):
    """One head: its first column in z and in y, its width, which gain, eps, and what is done."""

    source: int
    target: int
    width: int
    gain: int = -1
    eps: float = 0.0
    normed: bool = False
    one_plus: bool = False

    def packed(self) -> tuple[int, ...]:
        """As the kernel reads it: six 32-bit integers."""
        (bits,) = struct.unpack("<i", struct.pack("<f", self.eps))
        flags = int(self.normed) + 2 * int(self.one_plus)
        return self.source, self.target, self.width, self.gain, bits, flags


class HeadNorm:
    """All head norms of z (M, n) in one launch; ``k`` is x's width, or None when x is not read."""

    def __init__(
        self,
        entries: Sequence[Entry],
        n: int,
        n_out: int,
        k: int | None,
        gains: int,
        device: torch.device,
    ) -> None:
        from flashnorm_triton.kernels.heads import heads_kernel

        widest = max((entry.width for entry in entries if entry.normed), default=1)
        block = 1 << max(widest - 1, 15).bit_length()
        entries = [piece for entry in entries for piece in _cut(entry, block)]
        table = [entry.packed() for entry in entries]
        self.table = torch.tensor(table, dtype=torch.int32, device=device)
        self.rows = max(1, min(1 << (len(entries) - 1).bit_length(), _TILE // block))
        self.gains, self.n_out, self.groups = gains, n_out, cdiv(len(entries), self.rows)
        self.kernel = Kernel(
            heads_kernel,
            {
                "K": k or 1,
                "N": n,
                "N_OUT": n_out,
                "ENTRIES": len(entries),
                "BLOCK_K": min(1 << max((k or 1) - 1, 15).bit_length(), 4096),
                "BLOCK_D": block,
                "ROWS": self.rows,
                "GAINS": gains,
                "HAS_X": k is not None,
            },
            num_warps=4 if block <= 2048 else 8,
        )

    def bind(self, geometry: Geometry, eps: float) -> Callable[..., Tensor]:
        """run(z, x, gains) -> y for M rows; ``gains`` has GAINS places, None where there is none.

        The geometry's stride and eps are x's.
        """
        m, stride, lead, device = geometry
        parts = min(self.groups, max(1, cdiv(_PROGRAMS, m)))
        each = cdiv(self.groups, parts) * self.rows
        grid = (m, cdiv(self.groups * self.rows, each), 1)
        launch, shape = (
            self.kernel.bind(grid, device, last=(stride, eps, each)),
            (*lead, self.n_out),
        )
        table = self.table

        def run(z: Tensor, x: Tensor | None, gains: tuple[Tensor | None, ...]) -> Tensor:
            y = z.new_empty(shape)
            launch(z, x, y, table, *gains)
            return y

        return run

    def unit(self, name: str, dtype: str) -> CompileUnit:
        """The same kernel described for a compile without a GPU; all pointers count as aligned."""
        constants = dict(self.kernel.constants)
        given = {
            "z_ptr",
            "y_ptr",
            *("gain_ptr", "gain1_ptr", "gain2_ptr", "gain3_ptr")[: self.gains],
        }
        given |= {"x_ptr"} if constants["HAS_X"] else set()
        kinds = {"table_ptr": "*i32", "eps": "fp32", "stride_xm": "i32", "per_program": "i32"}
        signature = {}
        for argument in self.kernel.fn.arg_names:
            if argument in given:
                signature[argument] = f"*{TRITON_DTYPE[dtype]}"
            elif argument in kinds:
                signature[argument] = kinds[argument]
            else:
                signature[argument] = "constexpr"
                constants.setdefault(argument, None)
        aligned = tuple(
            place
            for place, (argument, kind) in enumerate(signature.items())
            if kind[0] == "*" or argument == "stride_xm"
        )
        warps = self.kernel.options["num_warps"]
        return CompileUnit(name, self.kernel.fn, signature, constants, aligned, num_warps=warps)


def _cut(entry: Entry, block: int) -> list[Entry]:
    """Columns that are only scaled, in pieces that fit one block."""
    if entry.normed:
        return [entry]
    starts = range(0, entry.width, block)
    return [
        entry._replace(
            source=entry.source + s, target=entry.target + s, width=min(block, entry.width - s)
        )
        for s in starts
    ]
