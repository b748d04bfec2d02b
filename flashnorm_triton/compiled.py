"""One Triton kernel bound to its compile-time arguments: compiled once, then launched directly.

Triton's own ``kernel[grid](...)`` binds and hashes every argument again at each launch, which costs
more host time than a decode step's kernels take on the GPU. The owner keeps one ``Kernel`` per set
of shapes, dtypes and pointer alignments, since a compiled kernel holds for those alone.
"""

from __future__ import annotations

from typing import Any

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.runtime import interpreting

TRITON_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Kernel:
    """One @triton.jit function with its compile-time arguments and launch options fixed.

    Every kernel of this package takes its run-time arguments first, then its constexprs.
    """

    def __init__(
        self,
        fn: Any,
        constants: dict[str, Any],
        descriptors: dict[str, str] | None = None,
        **options: int,
    ) -> None:
        self.fn = fn
        self.constants = constants
        self.descriptors = descriptors or {}
        self.options = options
        self._values = tuple(constants.values())
        self._run: Any = None

    def __call__(self, grid: tuple[int, int, int], device: int, *args: Any) -> None:
        """Launch on the current stream of CUDA device ``device``, which must be current."""
        if self._run is None:
            if interpreting():
                self.fn[grid](*args, **self.constants)
                return
            self._compile(grid, args)
        if self._hooks.calls:
            # A profiler listens to Triton's launches: go the way that tells it about them.
            self.fn[grid](*args, **self.constants, **self.options)
            return
        stream = self._stream_of(device)
        self._run(
            *grid, stream, self._function, self._packed, None, None, None, *args, *self._values
        )

    def _compile(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        from triton import knobs
        from triton.runtime import driver

        compiled = self.fn.warmup(*args, grid=grid, **self.constants, **self.options)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        self._hooks = knobs.runtime.launch_enter_hook
        self._stream_of = driver.active.get_current_stream
        self._packed = compiled.packed_metadata
        self._run = compiled.run
        self._function = compiled.function

    def unit(self, name: str, dtype: str, targets: tuple[str, ...] = TARGETS) -> CompileUnit:
        """The same kernel described for a compile without a GPU; pointers count as aligned.

        A pointer that these constants switch off is passed as None at run time, which Triton
        compiles as a constexpr.
        """
        element = TRITON_DTYPE[dtype]
        absent = {
            "bias_ptr": not self.constants.get("HAS_BIAS"),
            "gain_ptr": not self.constants.get("HAS_GAIN"),
            "s_ptr": self.constants.get("SQUARES", "given") != "given",
        }
        signature, constants = {}, dict(self.constants)
        for argument in self.fn.arg_names:
            if argument in constants:
                kind = "constexpr"
            elif absent.get(argument):
                kind, constants[argument] = "constexpr", None
            elif argument.endswith("_desc"):
                kind = self.descriptors[argument].format(element)
            elif argument.endswith("_ptr"):
                kind = "*fp32" if argument == "s_ptr" else f"*{element}"
            else:
                kind = "fp32" if argument == "eps" else "i32"
            signature[argument] = kind
        aligned = tuple(i for i, kind in enumerate(signature.values()) if kind.startswith("*"))
        options = {key: value for key, value in self.options.items() if key != "maxnreg"}
        gluon = self.fn.is_gluon()
        return CompileUnit(
            name, self.fn, signature, constants, aligned, gluon=gluon, targets=targets, **options
        )
