"""One Triton kernel bound to its compile-time arguments: compiled once, then launched directly.

Triton's own ``kernel[grid](...)`` binds and hashes every argument again at each launch, which costs
more host time than a decode step's kernels take on the GPU. The owner keeps one ``Kernel`` per set
of shapes, dtypes and pointer alignments, since a compiled kernel holds for those alone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.runtime import interpreting, triton_release

TRITON_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MOST_ENCODED = 4096
_thread = threading.local()
_POINTER = {
    "s_ptr": "*fp32", "mean_ptr": "*fp32", "row_sums_ptr": "*fp32", "partial_ptr": "*fp32",
    "counter_ptr": "*i32",
}  # fmt: skip


class Tile:
    """A TMA descriptor as Triton's launcher reads one, without the checks of Triton's class.

    The checks cost more host time than the launch; they run once, when ``real`` builds Triton's
    own descriptor for the compile. ``layout`` is Gluon's shared-memory layout, or None.
    """

    __slots__ = ("base", "shape", "strides", "block_shape", "layout")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self,
        base: Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: Any,
    ) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.layout = layout

    def real(self) -> Any:
        """The same descriptor as an object of Triton's class."""
        common = (self.base, self.shape, self.strides, self.block_shape)
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(*common)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(*common, self.layout)


class Kernel:
    """One @triton.jit function with its compile-time arguments and launch options fixed.

    Every kernel of this package takes its run-time arguments first, then its constexprs.
    ``descriptors`` spells the types of the arguments that are TMA descriptors.
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
        self._tiles = bool(self.descriptors)
        self._run: Any = None

    def __call__(self, grid: tuple[int, int, int], device: int, *args: Any) -> None:
        """Launch on the current stream of CUDA device ``device``, which must be current."""
        if self._run is None:
            if interpreting():
                self.fn[grid](*_real(args), **self.constants)
                return
            self._compile(grid, args)
        if self._tiles and not hasattr(_thread, "has_context"):
            # Triton encodes descriptors with a driver call that needs this thread to have a CUDA
            # context, and a new thread has none before its first call of the runtime.
            torch.cuda.mem_get_info(device)
            _thread.has_context = True
        if self._hooks.calls:
            # A profiler listens to Triton's launches: go the way that tells it about them.
            self.fn[grid](*_real(args), **self.constants, **self.options)
            return
        self._run(grid, self._stream_of(device), args)

    def stream(self, device: int) -> int:
        """The raw handle of the current stream of a CUDA device."""
        from triton.runtime import driver

        return driver.active.get_current_stream(device)

    def _compile(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        from triton import knobs
        from triton.runtime import driver

        compiled = self.fn.warmup(*_real(args), grid=grid, **self.constants, **self.options)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        run = compiled.run  # loads the binary, which sets .function
        self._hooks = knobs.runtime.launch_enter_hook
        self._stream_of = driver.active.get_current_stream
        values = tuple(self.constants.values())
        self._run = _launcher(compiled, run, values)

    def _missing(self, argument: str) -> bool:
        return argument.endswith("_desc") and argument not in self.descriptors

    def unit(self, name: str, dtype: str, targets: tuple[str, ...] = TARGETS) -> CompileUnit:
        """The same kernel described for a compile without a GPU; all pointers count as aligned.

        A pointer that these constants switch off, or a descriptor without a type, is passed as None
        at run time, which Triton compiles as a constexpr.
        """
        element = TRITON_DTYPE[dtype]
        split = self.constants.get("SPLIT", 1) > 1
        given = self.constants.get("SQUARES", "given") == "given"
        absent = {
            "bias_ptr": not self.constants.get("HAS_BIAS"),
            "gain_ptr": not self.constants.get("HAS_GAIN"),
            "row_sums_ptr": not self.constants.get("CENTRED"),
            "residual_ptr": not self.constants.get("HAS_RESIDUAL"),
            "s_ptr": not given,
            "mean_ptr": not (given and self.constants.get("CENTRED")),
            "partial_ptr": not split,
            "counter_ptr": not split,
        }
        signature, constants = {}, dict(self.constants)
        for argument in self.fn.arg_names:
            if argument in constants:
                kind = "constexpr"
            elif absent.get(argument) or self._missing(argument):
                kind, constants[argument] = "constexpr", None
            elif argument.endswith("_desc"):
                kind = self.descriptors[argument].format(element)
            elif argument.endswith("_ptr"):
                kind = _POINTER.get(argument, f"*{element}")
            else:
                kind = "fp32" if argument == "eps" else "i32"
            signature[argument] = kind
        aligned = tuple(
            i for i, (a, kind) in enumerate(signature.items()) if kind[0] == "*" or a == "stride_xm"
        )
        return CompileUnit(
            name,
            self.fn,
            signature,
            constants,
            aligned,
            num_warps=self.options["num_warps"],
            max_registers=self.options.get("maxnreg", 0),
            gluon=self.fn.is_gluon(),
            targets=targets,
        )


Launch = Callable[[tuple[int, int, int], int, tuple[Any, ...]], None]


def _launcher(compiled: Any, run: Any, values: tuple[Any, ...]) -> Launch:
    """What launches a compiled kernel on (grid, stream, arguments); ``values`` are its constexprs.

    ``run`` is Triton's launcher, most of whose host time goes into asking for scratch memory that
    these kernels have none of, and into encoding TMA descriptors anew. In the release whose
    launcher is known, and timed, the part below that is called directly.
    """
    function, packed = compiled.function, compiled.packed_metadata
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if type(run).__name__ == "CudaLauncher" and scratch == [0, 0] and triton_release() == (3, 6):
        flags = (function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        before = (*flags, packed, None, None, None)
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        if not metas:
            return _direct(run.launch, before, values)
        raw = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
        if raw is not None and all(metas):
            return _direct_with_tiles(raw, before, values, metas)

    def whole(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        run(*grid, stream, function, packed, None, None, None, *args, *values)

    return whole


def _direct(launch: Any, before: tuple[Any, ...], values: tuple[Any, ...]) -> Launch:
    def direct(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        launch(*grid, stream, *before, *args, *values)

    return direct


def _direct_with_tiles(
    launch: Any, before: tuple[Any, ...], values: tuple[Any, ...], metas: Sequence[Any]
) -> Launch:
    """As ``_direct``, with descriptors kept: one depends on an address and sizes, on no content."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    encoded: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def direct(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        final: list[Any] = []
        place = 0
        for arg in args:
            if type(arg) is not Tile:
                final.append(arg)
                continue
            key = (place, arg.base.data_ptr(), *arg.shape, arg.strides[0])
            found = encoded.get(key)
            if found is None:
                if len(encoded) >= _MOST_ENCODED:
                    encoded.clear()
                found = encoded[key] = tuple(make_tensordesc_arg(arg, metas[place]))
            final += found
            place += 1
        launch(*grid, stream, *before, *final, *values)

    return direct


def _real(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.real() if isinstance(a, Tile) else a for a in args)
