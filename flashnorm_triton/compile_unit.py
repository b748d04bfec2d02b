"""What it takes to compile one kernel in one configuration, with no GPU and no tensors.

Kernels' launchers describe themselves in this form; the ahead-of-time compiler and the
buffer-depth lint (`flashnorm_triton.tuning`) read it. Nothing here imports Triton, so describing
kernels is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TARGETS = ("sm80", "sm90", "sm100", "gfx942")
"""Every target a kernel may claim, oldest NVIDIA generation first."""


@dataclass(frozen=True)
class CompileUnit:
    """One kernel in one configuration.

    `signature` names every argument in order, as Triton spells types: `"*bf16"`, `"i32"`, `"fp32"`,
    `"constexpr"`, `"tensordesc<bf16[64, 128]>"` (with the layout's repr after a comma for Gluon).
    `constexprs` gives the value of every argument whose type is `"constexpr"`. `divisible_by_16`
    lists the indices, in that order, of arguments known to be multiples of 16 (pointers: bytes).
    `max_registers` caps the registers of a thread (0: no cap).
    `targets` are those the kernel claims to support; the rest are refused with `UnsupportedTarget`.

    Raises ValueError, naming the unit, for a description that contradicts itself.
    """

    name: str
    fn: object
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[int, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 0
    gluon: bool = False
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        declared = {name for name, kind in self.signature.items() if kind == "constexpr"}
        given = set(self.constexprs)
        if declared != given:
            raise ValueError(
                f"unit {self.name!r}: constexpr arguments {sorted(declared - given)} have no value "
                f"and {sorted(given - declared)} have a value but no 'constexpr' in the signature"
            )
        outside = [i for i in self.divisible_by_16 if not 0 <= i < len(self.signature)]
        if outside:
            raise ValueError(
                f"unit {self.name!r}: divisible_by_16 names arguments {outside}, but there are "
                f"{len(self.signature)}"
            )
        unknown = [t for t in self.targets if t not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(
                f"unit {self.name!r}: targets {self.targets!r} must be a non-empty choice of "
                f"{TARGETS}"
            )
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1) or self.num_stages < 1:
            raise ValueError(
                f"unit {self.name!r}: num_warps {self.num_warps} must be a power of two and "
                f"num_stages {self.num_stages} at least 1"
            )
