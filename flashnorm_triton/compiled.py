"""One Triton kernel bound to its compile-time arguments: compiled once, then launched directly.

Triton's own ``kernel[grid](...)`` binds and hashes every argument again at each launch, which costs
more host time than a decode step's kernels take on the GPU. The owner keeps one ``Kernel`` per set
of shapes, dtypes and pointer alignments, since a compiled kernel holds for those alone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.runtime import interpreting, triton_release

TRITON_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MOST_ENCODED = 512  # addresses of one operand
_thread = threading.local()
_POINTER = {
    "s_ptr": "*fp32", "mean_ptr": "*fp32", "row_sums_ptr": "*fp32", "partial_ptr": "*fp32",
    "counter_ptr": "*i32",
}  # fmt: skip


Grid = tuple[int, int, int]


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


TileMaker = Callable[[Any], Tile]


class _At:
    """Memory as Triton's encoder asks about it, without keeping it."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _with_context() -> None:
    """Give this thread a CUDA context, which the driver's encoding of descriptors asks for.

    A new thread has none before its first call of the runtime.
    """
    if not hasattr(_thread, "has_context"):
        torch.cuda.mem_get_info()
        _thread.has_context = True


class Descriptors(dict[int, tuple[Any, ...]]):
    """Address -> the TMA descriptor of the tensor there, as Triton's launcher takes its parts.

    One mapping serves one operand of one shape and strides, and a descriptor holds nothing but
    those and the address, never the memory or what is in it: so at an address that has been freed
    and handed out again it is, bit for bit, what would be encoded anew.
    """

    def __init__(self, tile: TileMaker, encode: Callable[[Tile], Sequence[Any]]) -> None:
        super().__init__()
        self.tile, self.encode = tile, encode

    def __missing__(self, address: int) -> tuple[Any, ...]:
        _with_context()
        if len(self) >= _MOST_ENCODED:
            self.clear()
        found = self[address] = tuple(self.encode(self.tile(_At(address))))
        return found


class Direct(NamedTuple):
    """The part of Triton's launcher that launches, and its arguments after grid and stream.

    ``launch(*grid, stream, *before, *operands, *values)``, with descriptors among the operands in
    parts; ``encoders`` makes these, one for every descriptor.
    """

    launch: Callable[..., None]
    before: tuple[Any, ...]
    values: tuple[Any, ...]
    encoders: tuple[Callable[[Tile], Sequence[Any]], ...] = ()


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
        self.direct: Direct | None = None
        self._run: Any = None

    def __call__(self, grid: Grid, device: int, *args: Any) -> None:
        """Launch on the current stream of CUDA device ``device``, which must be current."""
        if self._run is None:
            if interpreting():
                self.fn[grid](*_real(args), **self.constants)
                return
            self._compile(grid, args)
        if self.descriptors:
            _with_context()
        if self.hooks.calls:
            # A profiler listens to Triton's launches: go the way that tells it about them.
            self.fn[grid](*_real(args), **self.constants, **self.options)
            return
        self._run(grid, self.stream_of(device), args)

    def bind(
        self,
        grid: Grid,
        device: int,
        tiles: Sequence[TileMaker] = (),
        last: tuple[Any, ...] = (),
    ) -> Callable[..., None]:
        """What launches calls of one shape: ``launch(*operands)``, tensors or None.

        Of the first operands, none, two or three, ``tiles`` makes descriptors; ``last`` are the
        numbers that follow the operands. As ``__call__``, with all that the calls share prepared.
        """

        def whole(*operands: Any) -> None:
            described = (tile(operand) for tile, operand in zip(tiles, operands, strict=False))
            self(grid, device, *described, *operands[len(tiles) :], *last)

        if not tiles:
            return _plain_launch(self, grid, device, last, whole)
        launch = {2: _two_tiles, 3: _three_tiles}[len(tiles)]
        return launch(self, grid, device, last, whole, tiles)

    def prepared(self, last: tuple[Any, ...], tiles: Sequence[TileMaker] = ()) -> tuple[Any, ...]:
        """For a direct launch: hooks, the stream's getter, arguments before and after, maps."""
        maps = map(Descriptors, tiles, self.direct.encoders)
        after = (*last, *self.direct.values)
        return self.hooks, self.stream_of, self.direct.before, after, *maps

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
        self.hooks = knobs.runtime.launch_enter_hook
        self.stream_of = driver.active.get_current_stream
        values = tuple(self.constants.values())
        self.direct = _direct(compiled, run, values)
        self._run = _launcher(compiled, run, values, self.direct)

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


def _direct(compiled: Any, run: Any, values: tuple[Any, ...]) -> Direct | None:
    """How a compiled kernel is launched without Triton's questions; None where that is not known.

    ``run`` is Triton's launcher, most of whose host time goes into asking for scratch memory that
    these kernels have none of, and into encoding TMA descriptors anew. ``values`` are the kernel's
    constexprs. Known, and timed, is the launcher of one release.
    """
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if type(run).__name__ != "CudaLauncher" or scratch != [0, 0] or triton_release() != (3, 6):
        return None
    flags = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    before = (*flags, compiled.packed_metadata, None, None, None)
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if not metas:
        return Direct(run.launch, before, values)
    launch = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if launch is None or not all(metas):
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    encoders = tuple(partial(make_tensordesc_arg, metadata=meta) for meta in metas)
    return Direct(launch, before, values, encoders)


def _launcher(
    compiled: Any, run: Any, values: tuple[Any, ...], direct: Direct | None
) -> Callable[[Grid, int, tuple[Any, ...]], None]:
    """What launches a compiled kernel on (grid, stream, arguments), descriptors whole."""
    if direct is not None and not direct.encoders:
        launch, before = direct.launch, direct.before

        def short(grid: Grid, stream: int, args: tuple[Any, ...]) -> None:
            launch(*grid, stream, *before, *args, *values)

        return short
    function, packed = compiled.function, compiled.packed_metadata

    def whole(grid: Grid, stream: int, args: tuple[Any, ...]) -> None:
        run(*grid, stream, function, packed, None, None, None, *args, *values)

    return whole


# The launches that ``Kernel.bind`` gives out, by their number of descriptors: written out, because
# a loop over descriptors costs as much as one of them. Until the first call has compiled the kernel
# there is no ``run``; it is set last, since other threads go by it.
Whole = Callable[..., None]


def _plain_launch(kernel: Kernel, grid: Grid, device: int, last: tuple, whole: Whole) -> Whole:
    x, y, z = grid
    run = hooks = stream_of = before = after = None

    def launch(*operands: Any) -> None:
        nonlocal run, hooks, stream_of, before, after
        if run is not None and not hooks.calls:
            run(x, y, z, stream_of(device), *before, *operands, *after)
            return
        whole(*operands)
        if kernel.direct is not None:
            hooks, stream_of, before, after = kernel.prepared(last)
            run = kernel.direct.launch

    return launch


def _two_tiles(
    kernel: Kernel, grid: Grid, device: int, last: tuple, whole: Whole, tiles: Sequence[TileMaker]
) -> Whole:
    x, y, z = grid
    run = hooks = stream_of = before = after = of_a = of_b = None

    def launch(a: Tensor, b: Tensor, *operands: Any) -> None:
        nonlocal run, hooks, stream_of, before, after, of_a, of_b
        if run is not None and not hooks.calls:
            described = *of_a[a.data_ptr()], *of_b[b.data_ptr()]
            run(x, y, z, stream_of(device), *before, *described, *operands, *after)
            return
        whole(a, b, *operands)
        if kernel.direct is not None:
            hooks, stream_of, before, after, of_a, of_b = kernel.prepared(last, tiles)
            run = kernel.direct.launch

    return launch


def _three_tiles(
    kernel: Kernel, grid: Grid, device: int, last: tuple, whole: Whole, tiles: Sequence[TileMaker]
) -> Whole:
    x, y, z = grid
    run = hooks = stream_of = before = after = of_a = of_b = of_c = None

    def launch(a: Tensor, b: Tensor, c: Tensor, *operands: Any) -> None:
        nonlocal run, hooks, stream_of, before, after, of_a, of_b, of_c
        if run is not None and not hooks.calls:
            described = *of_a[a.data_ptr()], *of_b[b.data_ptr()], *of_c[c.data_ptr()]
            run(x, y, z, stream_of(device), *before, *described, *operands, *after)
            return
        whole(a, b, c, *operands)
        if kernel.direct is not None:
            hooks, stream_of, before, after, of_a, of_b, of_c = kernel.prepared(last, tiles)
            run = kernel.direct.launch

    return launch


def _real(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.real() if isinstance(a, Tile) else a for a in args)
