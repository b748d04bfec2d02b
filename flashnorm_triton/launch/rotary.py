"""The kernel that prepares attention's inputs, ready to launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashnorm_triton.block_reference import Layout
from flashnorm_triton.compile_unit import CompileUnit
from flashnorm_triton.compiled import TRITON_DTYPE, Kernel
from flashnorm_triton.launch.common import cdiv, empty_of

WIDEST = 1024  # columns of a head that one program holds


class RotaryHeads:
    """One layout of heads: ``rotary`` is the width of cos and sin, 0 without; ``shared`` says that
    they are the same for the whole batch; ``places`` where tokens go: "" one after the other, from
    the first on, "each" to a place of its own, "first" one after the other from a given place."""

    def __init__(
        self,
        layout: Layout,
        rotary: int,
        *,
        q_gain: bool,
        k_gain: bool,
        shared: bool,
        places: str,
        tile: int,
    ) -> None:
        from flashnorm_triton.kernels.rotary import rotary_heads_kernel

        block = 1 << max(layout.head_dim - 1, 15).bit_length()
        total = layout.q_heads + 2 * layout.kv_heads
        heads = max(1, min(1 << (total - 1).bit_length(), tile // block))
        self.layout, self.parts = layout, cdiv(total, heads)
        self.kernel = Kernel(
            rotary_heads_kernel,
            {
                "Q_HEADS": layout.q_heads,
                "KV_HEADS": layout.kv_heads,
                "D": layout.head_dim,
                "R": rotary,
                "HEADS": heads,
                "BLOCK_D": block,
                "NORMED": layout.eps is not None,
                "HAS_Q_GAIN": q_gain,
                "HAS_K_GAIN": k_gain,
                "ONE_PLUS": layout.one_plus,
                "INTERLEAVED": layout.interleaved,
                "SHARED": shared,
                "PLACES": places,
            },
            num_warps=max(1, min(4, heads * block // 256)),
        )

    def bind(self, batch: int, tokens: int, places: int, like: Tensor) -> Callable[..., Tensor]:
        """run(qkv, cos, sin, q_gain, k_gain, position, k, v) -> q, which it allocates.

        k and v (B, kv, places, D) contiguous are written. ``like`` is a qkv.
        """
        device = like.get_device()
        eps = float(self.layout.eps or 0.0)
        grid = (batch * tokens, self.parts, 1)
        launch = self.kernel.bind(grid, device, last=(tokens, places, eps))
        shape = (batch, tokens, self.layout.q_heads, self.layout.head_dim)
        empty = empty_of(shape, like.dtype, device)

        def run(
            qkv: Tensor,
            cos: Tensor | None,
            sin: Tensor | None,
            q_gain: Tensor | None,
            k_gain: Tensor | None,
            position: Tensor | None,
            k: Tensor,
            v: Tensor,
        ) -> Tensor:
            q = empty(qkv)
            launch(qkv, cos, sin, q_gain, k_gain, position, q, k, v)
            return q.transpose(1, 2)

        return run

    def unit(self, name: str, dtype: str, angles: str = "float32") -> CompileUnit:
        """The same kernel described for a compile without a GPU; all pointers count as aligned."""
        constants = dict(self.kernel.constants)
        absent = {
            "cos_ptr": not constants["R"],
            "sin_ptr": not constants["R"],
            "q_gain_ptr": not constants["HAS_Q_GAIN"],
            "k_gain_ptr": not constants["HAS_K_GAIN"],
            "position_ptr": not constants["PLACES"],
        }
        kinds = {
            "cos_ptr": f"*{TRITON_DTYPE[angles]}", "sin_ptr": f"*{TRITON_DTYPE[angles]}",
            "position_ptr": "*i64", "tokens": "i32", "places": "i32", "eps": "fp32",
        }  # fmt: skip
        signature = {}
        for argument in self.kernel.fn.arg_names:
            if argument in constants:
                signature[argument] = "constexpr"
            elif absent.get(argument):
                signature[argument], constants[argument] = "constexpr", None
            else:
                signature[argument] = kinds.get(argument, f"*{TRITON_DTYPE[dtype]}")
        aligned = tuple(place for place, kind in enumerate(signature.values()) if kind[0] == "*")
        warps = self.kernel.options["num_warps"]
        return CompileUnit(name, self.kernel.fn, signature, constants, aligned, num_warps=warps)
