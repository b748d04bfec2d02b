"""Draws the diagrams of docs/: python docs/figures/draw.py [--out FOLDER]"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sheet import FAINT, Sheet

HERE = Path(__file__).resolve().parent


def algebra() -> Sheet:
    """Norm and linear: stock, folded, deferred."""
    sheet = Sheet(90, 45)
    rows = ("Stock", "Fold", "Defer")
    for row, name in enumerate(rows):
        y = 3 + 15 * row
        sheet.note(1, y + 4.5, name, bold=True, size=10)
        sheet.box(10, y + 1.5, 7, 6, "x", "tensor")
        if row:
            sheet.rule(y - 3)
    sheet.box(22, 3.5, 18, 8, "RMSNorm\n$x\\cdot s\\circ g$")
    sheet.box(45, 3.5, 18, 8, "matmul\n$(x\\cdot s\\circ g)\\,W^\\top$")
    sheet.box(68, 4.5, 7, 6, "y", "tensor")
    sheet.box(22, 18.5, 18, 8, "weightless norm\n$x\\cdot s$")
    sheet.box(45, 18.5, 18, 8, "matmul\n$(x\\cdot s)\\,W^{*\\top}$")
    sheet.box(68, 19.5, 7, 6, "y", "tensor")
    sheet.box(22, 33.5, 41, 8, "one kernel\n$s\\cdot(x\\,W^{*\\top})$,  s from the same tiles of x")
    sheet.box(68, 34.5, 7, 6, "y", "tensor")
    for row in range(3):
        y = 7.5 + 15 * row
        sheet.arrow((17, y), (22, y))
        if row < 2:
            sheet.arrow((40, y), (45, y))
        sheet.arrow((63, y), (68, y))
    sheet.note(77, 7.5, "x is read twice,\nits norm written\nand read again", color=FAINT, size=7.5)
    sheet.note(77, 22.5, "$W^*=W\\,\\mathrm{diag}(g)$,\nonce, when patched", color=FAINT, size=7.5)
    sheet.note(77, 37.5, "x is read once;\nnothing between", color=FAINT, size=7.5)
    return sheet


def single_pass() -> Sheet:
    """What one program of the fused kernel does."""
    sheet = Sheet(90, 37)
    sheet.box(2, 3, 16, 8, "tile of x\nBLOCK_M × BLOCK_K", "tensor", 7.5)
    sheet.box(2, 20, 16, 8, "tile of $W^*$\nBLOCK_N × BLOCK_K", "weights", 7.5)
    sheet.box(
        28, 3, 22, 8, "sum of squares of each row\n$q \\leftarrow q + \\sum x^2$   (fp32)", size=7.5
    )
    sheet.box(28, 20, 22, 8, "product\n$a \\leftarrow a + x\\,W^{*\\top}$   (fp32)", size=7.5)
    sheet.arrow((18, 7), (28, 7))
    sheet.arrow((18, 24), (28, 24))
    sheet.arrow((10, 11), (10, 15.5), (39, 15.5), (39, 20))
    sheet.note(23, 33, "for every step along K", color=FAINT, size=7.5, align="center")
    sheet.box(
        58,
        11,
        29,
        9,
        "epilogue, once\n$s = 1/\\sqrt{q/K+\\varepsilon}$,   $z = s\\cdot a + c$",
        size=7.5,
    )
    sheet.arrow((50, 7), (54, 7), (54, 14), (58, 14))
    sheet.arrow((50, 24), (54, 24), (54, 17), (58, 17))
    sheet.note(
        72.5,
        23,
        "LayerNorm: the mean off before s. Then\nactivation, gate · up, residual: all in fp32",
        color=FAINT,
        size=7.5,
        align="center",
    )
    sheet.arrow((72.5, 26), (72.5, 29.5))
    sheet.box(62, 29.5, 21, 6, "y: one rounding, one store", "tensor", 7.5)
    return sheet


def strategies() -> Sheet:
    """The four strategies as launches over time."""
    sheet = Sheet(90, 50)
    names = (
        ("single_pass", "one launch"),
        ("stats_then_gemm", "two launches"),
        ("overlap", "two streams, three launches"),
        ("unfused", "two launches"),
    )
    for row, (name, what) in enumerate(names):
        y = 4 + 12 * row
        sheet.note(1, y + 2, name, bold=True, size=9)
        sheet.note(1, y + 5, what, color=FAINT, size=7.5)
        if row:
            sheet.rule(y - 3.5)
    sheet.box(24, 4, 40, 7, "tiles: product and squares, then s")
    sheet.box(24, 16, 12, 7, "s of\nevery row")
    sheet.box(38, 16, 34, 7, "matmul of raw x, s in its epilogue")
    sheet.box(24, 25.5, 34, 5.2, "library's matmul of raw x, fp32 result", size=7.5)
    sheet.box(24, 31, 12, 4.5, "s of every row", size=6.5)
    sheet.box(62, 28, 14, 6, "scale, bias, …")
    sheet.arrow((58, 28.1), (60, 28.1), (60, 30), (62, 30))
    sheet.arrow((36, 33.2), (60, 33.2), (60, 32), (62, 32))
    sheet.box(24, 40, 14, 7, "weightless\nnorm")
    sheet.box(40, 40, 30, 7, "library's matmul")
    sheet.note(73, 43.5, "… and what follows,\nif anything", color=FAINT, size=7.5)
    sheet.note(78, 31, "joined by\nevents", color=FAINT, size=7.5)
    sheet.arrow((24, 49), (88, 49))
    sheet.note(21, 49, "time", color=FAINT, size=7.5, align="right")
    return sheet


def modules() -> Sheet:
    """What the patch puts in the place of a norm and its linears."""
    sheet = Sheet(90, 42)
    sheet.note(1, 3, "Stock", bold=True, size=10)
    sheet.note(47, 3, "Patched", bold=True, size=10)
    for left, kind, norm, linear in (
        (1, "launch", "input_layernorm\nnorm: 6 to 8 launches", "{}_proj\nmatmul"),
        (47, "idle", "", "{}_proj\nits columns"),
    ):
        sheet.box(left + 14, 6, 15, 5, "hidden_states", "tensor", 7.5)
        sheet.arrow((left + 21.5, 11), (left + 21.5, 14))
        if norm:
            sheet.box(left + 9, 14, 25, 8, norm, kind)
        else:
            sheet.box(
                left + 6,
                14,
                31,
                8,
                "input_layernorm: FusedNormLinear\none launch: all of q | k | v",
            )
        for index, name in enumerate("qkv"):
            x = left + 1.5 + 14 * index
            sheet.arrow((left + 21.5, 22), (left + 21.5, 24.5), (x + 6, 24.5), (x + 6, 27))
            sheet.box(x, 27, 12, 8, linear.format(name), kind, 7.5)
            sheet.arrow((x + 6, 35), (x + 6, 38))
            sheet.note(x + 6, 39.5, name, align="center")
    sheet.note(69.5, 23.2, "packed rows", color=FAINT, size=7)
    return sheet


def lookup() -> Sheet:
    """Which plan runs: the order of look-ups, and what happens when a plan cannot run."""
    sheet = Sheet(90, 36)
    sheet.note(1, 3, "Which plan?  The first that has the cell", bold=True, size=9)
    asked = (
        "your table\nflashnorm tune", "shipped table of\nexactly this GPU",
        "shipped table, same\ncompute capability", "built-in rule\n(plans.py)",
    )  # fmt: skip
    for index, text in enumerate(asked):
        x = 2 + 22 * index
        sheet.box(x, 6, 19, 8, text, "weights" if index < 3 else "module", 7.5)
        if index:
            sheet.arrow((x - 3, 10), (x, 10))
    sheet.note(
        1, 19, "It cannot be built or launched here?  The next, and one warning", bold=True, size=9
    )
    tried = ("the plan found", "the built-in rule's", "unfused pair", "plain torch")
    for index, text in enumerate(tried):
        x = 2 + 22 * index
        sheet.box(x, 22, 19, 7, text, "module" if index == 3 else "launch", 7.5)
        if index:
            sheet.arrow((x - 3, 25.5), (x, 25.5))
    sheet.note(
        2,
        33,
        "Once for each problem; after that a call is a dictionary read and a launch.",
        color=FAINT,
        size=7.5,
    )
    return sheet


def cancelled() -> Sheet:
    """A norm before a projection that is normalised again."""
    sheet = Sheet(90, 27)
    for row, name in enumerate(("Fused", "Cancelled")):
        y = 2 + 13 * row
        sheet.note(1, y + 4, name, bold=True, size=10)
        sheet.box(14, y, 7, 8, "x", "tensor")
        sheet.arrow((21, y + 4), (25, y + 4))
        sheet.arrow((51, y + 4), (57, y + 4))
        sheet.arrow((83, y + 4), (88, y + 4))
    sheet.rule(12.5)
    sheet.box(25, 2, 26, 8, "q = $s\\cdot x\\,W_q^{*\\top}$")
    sheet.box(
        57, 2, 26, 8, "norm of each head\n$q/\\sqrt{\\mathrm{mean}(q^2)+\\varepsilon_2}$", size=7.5
    )
    sheet.box(25, 15, 26, 8, "p = $x\\,W_q^{*\\top}$   (no s)")
    sheet.box(
        57,
        15,
        26,
        8,
        "norm of each head, with\n$\\varepsilon_2\\,(\\mathrm{mean}(x^2)+\\varepsilon_1)$",
        size=7.5,
    )
    sheet.note(54, 25, "s = 1/√(mean(x²) + ε₁) divides out", align="center", color=FAINT, size=7.5)
    return sheet


FIGURES: dict[str, Callable[[], Sheet]] = {
    "algebra": algebra, "single_pass": single_pass, "strategies": strategies, "modules": modules,
    "lookup": lookup, "cancelled": cancelled,
}  # fmt: skip


def edition() -> str:
    """What says from which text of these two files a figure was drawn."""
    digest = hashlib.sha256()
    for name in ("sheet.py", "draw.py"):
        digest.update((HERE / name).read_bytes())
    return f"drawn by docs/figures/draw.py, {digest.hexdigest()[:16]}"


def draw(folder: Path) -> list[Path]:
    """All figures, as SVG and PNG, into a folder."""
    title = edition()
    return [path for name, make in FIGURES.items() for path in make().save(folder, name, title)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args(argv)
    for path in draw(args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
