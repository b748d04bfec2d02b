"""Random calls of norm_linear and what they may give: hypothesis draws, float64 judges.

Shapes, strides, offsets, dtypes and kinds of rows are hypothesis's, so that a failing call shrinks;
numbers come from a seed. The judge bounds every element by the roundings that the contract allows:
no luck of a draw decides. Rows with inf or NaN are NaN, as in the stock modules, and nothing else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from conftest import HAS_GPU
from hypothesis import strategies as st
from torch import Tensor

from flashnorm_triton.checks import ACTIVATIONS

# How far a row's numbers reach: (scale, dtypes that hold it); a non-finite one spoils its row.
ROWS: dict[str, float] = {
    "usual": 1.0,
    "small": 1e-4,
    "large": 1e4,
    "tiny": 0.0,  # subnormal
    "zero": 0.0,
    "huge": 1e15,  # squares fit float32
    "overflowing": 1e24,  # squares do not, products do: the scale is 0, as in stock
    "extreme": 1e38,  # products do not either: any answer, in this row alone
    "inf": 1.0,
    "both infs": 1.0,
    "nan": 1.0,
    "outlier": 1.0,
    "shifted": 1.0,  # mean far above the deviation
}
NOT_FINITE = ("inf", "both infs", "nan")
# Interpreted, a conversion to bfloat16 cuts off.
_BF16 = 2.0**-8 if HAS_GPU else 2.0**-7
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: _BF16, torch.float32: 2.0**-24}
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
# Largest slope of an activation; relu2's depends on z.
_SLOPE = {None: 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "relu": 1.0}
EPS = (1e-12, 1e-6, 1e-5, 1e-2, 1.0)


class Strided(NamedTuple):
    """How a tensor lies in memory: the order of its dimensions from the slowest, what is left free
    after each, steps, an offset in elements, and which dimensions repeat (stride 0)."""

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int
    repeated: tuple[bool, ...]

    def lay(self, values: Tensor) -> Tensor:
        """``values`` laid out so, amid NaNs (what repeats is the first of it)."""
        shape, strides, stride = values.shape, [0] * values.dim(), 1
        for place in reversed(self.order):
            size = 1 if self.repeated[place] else shape[place]
            strides[place] = 0 if self.repeated[place] else stride * self.steps[place]
            stride *= max(size, 1) * self.steps[place]
            stride += self.gaps[place]
        room = self.offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        flat = torch.full((max(room, 1),), math.nan, dtype=values.dtype, device=values.device)
        laid = flat.as_strided(shape, strides, self.offset)
        for place, again in enumerate(self.repeated):
            if again:
                values = values.narrow(place, 0, min(1, shape[place])).expand(shape)
        return laid.copy_(values) if not any(self.repeated) else _copy_repeated(laid, values)


def _copy_repeated(laid: Tensor, values: Tensor) -> Tensor:
    once = [slice(0, 1) if s == 0 else slice(None) for s in laid.stride()]
    laid[tuple(once)].copy_(values[tuple(once)])
    return laid


def _dense(dims: int) -> Strided:
    return Strided(tuple(range(dims)), (0,) * dims, (1,) * dims, 0, (False,) * dims)


class Call(NamedTuple):
    """One call, its tensors laid out; ``kinds`` are the rows', ``spoilt`` which outputs' columns
    have a weight or a bias that is not finite."""

    x: Tensor
    weight: Tensor
    eps: float
    bias: Tensor | None
    gain: Tensor | None
    more: dict[str, Any]
    kinds: tuple[str, ...]
    spoilt: int | None

    @property
    def tensors(self) -> list[Tensor]:
        own = [t for t in self[:5] if isinstance(t, Tensor)]
        return own + [t for t in self.more.values() if isinstance(t, Tensor)]


class Sizes(NamedTuple):
    """What a profile draws from: rows, N and K (compiled kernels: a few, for each is a compile)."""

    rows: st.SearchStrategy[int]
    n: st.SearchStrategy[int]
    k: st.SearchStrategy[int]


@st.composite
def strided(draw: Any, dims: int, last_contiguous: bool = False, repeats: bool = True) -> Strided:
    order = tuple(draw(st.permutations(range(dims)))) if not last_contiguous else range(dims)
    plain = st.just(0)
    gaps = draw(st.tuples(*[st.sampled_from((0, 0, 1, 3, 8)) for _ in range(dims)]))
    steps = draw(st.tuples(*[st.sampled_from((1, 1, 1, 2)) for _ in range(dims)]))
    repeated = [False] * dims
    if repeats and dims > 1 and draw(st.integers(0, 4)) == 0:
        repeated[draw(st.integers(0, dims - 2))] = True
    if last_contiguous:
        steps = (1,) * dims
    elif dims == 1:
        steps = (draw(st.sampled_from((1, 2))),)
    elif draw(st.booleans()):  # the usual case: rows that only lie apart
        order, steps = range(dims), (1,) * dims
    if draw(st.integers(0, 2)) == 0:
        gaps = draw(st.tuples(*[plain] * dims))
    offset = draw(st.sampled_from((0, 0, 0, 1, 2, 3, 8)))
    return Strided(tuple(order), gaps, steps, offset, tuple(repeated))


@st.composite
def calls(draw: Any, sizes: Sizes, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Call:
    """A call that is well formed, of any strides and values."""
    dtype = draw(st.sampled_from(dtypes))
    k, gated = draw(sizes.k), draw(st.booleans())
    n = draw(sizes.n)
    n += n % 2 if gated else 0
    lead = draw(st.sampled_from(("one", "one", "two", "none", "three")))
    m = draw(sizes.rows)
    shape = {"none": (k,), "one": (m, k), "two": (2, m, k), "three": (1, m, 2, k)}[lead]
    count = math.prod(shape[:-1])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def new(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    kinds, x = rows_of(draw, shape, dtype, generator)
    x = x.to(device)
    # What lies strangely in memory: all of it, or one operand alone, which nothing then covers up.
    strange = draw(
        st.sampled_from(("all", "all", "x", "x", "weight", "bias", "gain", "row_sums", "residual"))
    )

    def has(name: str) -> bool:
        return strange == name or draw(st.booleans())

    centred = strange == "row_sums" or draw(st.integers(0, 2)) == 0
    weight = (new(n, k) / math.sqrt(k)).to(device, dtype)
    bias = new(n).to(device, dtype) if has("bias") else None
    gain = None
    if has("gain"):
        gain = (0.1 + 2 * torch.rand(k, generator=generator)).to(device)
        gain = gain if draw(st.booleans()) else gain.to(dtype)
    spoilt = draw(st.integers(0, max(n - 1, 0))) if n and draw(st.integers(0, 5)) == 0 else None
    if spoilt is not None:
        weight[spoilt, draw(st.integers(0, k - 1))] = draw(st.sampled_from((math.inf, math.nan)))

    def lay(name: str, values: Tensor, **more: bool) -> Tensor:
        if strange not in ("all", name):
            return values
        return draw(strided(values.dim(), **more)).lay(values)

    weight = lay("weight", weight, last_contiguous=True, repeats=False)
    more: dict[str, Any] = {}
    if centred:
        wide = weight.double() * (1.0 if gain is None else gain.double())
        more["row_sums"] = lay("row_sums", wide.sum(1).float(), repeats=False)
    if draw(st.booleans()):
        more["activation"] = draw(st.sampled_from(ACTIVATIONS))
    if gated:
        more["gated"] = True
    if has("residual"):
        width = n // 2 if gated else n
        residual = new(*shape[:-1], width).to(device, dtype)
        more["residual"] = lay("residual", residual)
    x_layout = draw(strided(len(shape))) if strange in ("all", "x") else _dense(len(shape))
    laid = x_layout.lay(x)
    if any(x_layout.repeated):  # the kinds of the rows that are repeated
        index = torch.arange(count).reshape(shape[:-1])
        for place, again in enumerate(x_layout.repeated[:-1]):
            index = (
                index.narrow(place, 0, min(1, shape[place])).expand(shape[:-1]) if again else index
            )
        kinds = tuple(kinds[i] for i in index.flatten().tolist())
    return Call(
        laid, weight, draw(st.sampled_from(EPS)),
        None if bias is None else lay("bias", bias, repeats=False),
        None if gain is None else lay("gain", gain, repeats=False),
        more, kinds, spoilt,
    )  # fmt: skip


def rows_of(
    draw: Any, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> tuple[tuple[str, ...], Tensor]:
    """Rows (..., K) of drawn kinds, and the kind of each."""
    count, k = math.prod(shape[:-1]), shape[-1]
    allowed = [kind for kind, scale in ROWS.items() if dtype != torch.float16 or scale < 5e4]
    some = draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=min(count or 1, 6)))
    kinds = tuple(some[i % len(some)] for i in range(count))
    rows = [_row(kind, torch.randn(k, generator=generator), dtype) for kind in kinds]
    x = torch.stack(rows) if rows else torch.empty(0, k)
    return kinds, x.reshape(shape).to(dtype)


def rounding_of(dtype: torch.dtype) -> tuple[float, float, float]:
    """The unit roundoff, the least number that is surely kept, and the largest."""
    return _ROUNDING[dtype], _LEAST[dtype], torch.finfo(dtype).max


def _row(kind: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of a kind, in float32."""
    k = len(x)
    if kind == "zero":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "tiny":
        return x * torch.finfo(dtype).tiny / 64
    x = x * ROWS[kind]
    if kind == "overflowing":
        x = torch.where(x.abs() < 1e22, 1e22, x)
    elif kind == "extreme":
        x = x.clamp(-3.0, 3.0)
    elif kind == "inf":
        x[k // 2] = -math.inf
    elif kind == "both infs":
        x[0], x[-1] = math.inf, -math.inf
    elif kind == "nan":
        x[-1] = math.nan
    elif kind == "outlier":
        x[k // 3] *= 1e3
    elif kind == "shifted":
        x += 50.0
    return x


def act64(z: Tensor, activation: str | None) -> Tensor:
    """The activations by their formulas, in float64."""
    match activation:
        case "silu":
            return z / (1 + torch.exp(-z))
        case "gelu":
            return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        case "gelu_tanh":
            return z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "relu":
            return z.clamp(min=0)
        case "relu2":
            return z.clamp(min=0) ** 2
    return z


def _act_error(z: Tensor, off: Tensor, activation: str | None) -> Tensor:
    slope = 2 * (z.abs() + off) if activation == "relu2" else _SLOPE[activation]
    own = (
        0.0
        if activation is None
        else 1e-6 * (z.abs() + 1) * (z.abs() if activation == "relu2" else 1)
    )
    return slope * off + own


def judge(call: Call, y: Tensor, roundings: int) -> None:
    """Assert that y is what the call may give.

    ``roundings``: 1 where all is fp32 up to the result; 2 where the normed rows, their product with
    the gain, or the product with the weight is rounded to the dtype as well.
    """
    x, weight, eps, bias, gain, more, kinds, spoilt = call
    m, k, n = len(kinds), x.shape[-1], weight.shape[0]
    width = n // 2 if more.get("gated") else n
    assert y.shape == (*x.shape[:-1], width) and y.dtype == x.dtype and y.is_contiguous()
    if not m or not width:
        return
    y, rows = y.reshape(m, width).double(), x.reshape(m, k).double()
    live = torch.tensor([kind not in NOT_FINITE for kind in kinds], device=y.device)
    columns = torch.ones(width, dtype=torch.bool, device=y.device)
    if spoilt is not None:
        columns[spoilt % width] = False
    spoilt_rows = y[~live][:, columns]
    assert spoilt_rows.isnan().all(), "a row with inf or NaN must be NaN throughout"
    dead = torch.tensor([kind == "overflowing" for kind in kinds], device=y.device)
    live &= torch.tensor([kind != "extreme" for kind in kinds], device=y.device)
    if "row_sums" in more:
        live &= ~dead  # a LayerNorm's mean overflows as well: any answer, in this row alone
    ref, off = _bounds(call, rows, dead, roundings)
    if "residual" in more:
        ref = ref + more["residual"].reshape(m, width).double()
    u, least = _ROUNDING[x.dtype], _LEAST[x.dtype]
    off = 1.01 * (off + u * ref.abs() + least)
    fits = (ref.abs() + off) < torch.finfo(x.dtype).max
    asked = live[:, None] & columns[None, :] & fits
    wrong = asked & ~((y - ref).abs() <= off)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} of {int(asked.sum())} values are wrong; first at row {row} "
            f"({kinds[row]}), column {column}: {y[row, column]:.8g}, wanted "
            f"{ref[row, column]:.8g} within {off[row, column]:.3g}"
        )


def _bounds(call: Call, rows: Tensor, dead: Tensor, roundings: int) -> tuple[Tensor, Tensor]:
    """The result in float64 but for the residual, and how far off it may be before its rounding."""
    _, weight, eps, bias, gain, more, _, _ = call
    k, dtype = rows.shape[1], weight.dtype
    u, grown = _ROUNDING[dtype], 4 * (k + 16) * 2.0**-24
    w = weight.double() if gain is None else weight.double() * gain.double()
    sums, raw = more.get("row_sums"), rows
    if sums is not None:
        rows = rows - rows.mean(1, keepdim=True)
    s = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    s = torch.where(dead[:, None], 0.0, s)
    z, size = (rows @ w.T) * s, (rows.abs() @ w.abs().T) * s
    reach = (raw.abs() @ w.abs().T) * s
    off = grown * (reach + z.abs()) + s * w.abs().sum(1) * 2.0**-126
    if sums is not None:
        off = off + grown * s * raw.mean(1, keepdim=True).abs() * sums.double().abs()
    if bias is not None:
        z = z + bias.double()
        off = off + 2.0**-23 * z.abs()
    if roundings > 1:
        off = off + u * size + u * z.abs() + _LEAST[dtype] * (1 + w.abs().sum(1))
    activation = more.get("activation")
    if not more.get("gated"):
        return act64(z, activation), _act_error(z, off, activation)
    half = z.shape[1] // 2
    gate, up = z[:, :half], z[:, half:]
    gate_off, up_off = _act_error(gate, off[:, :half], activation), off[:, half:]
    gate = act64(gate, activation)
    return gate * up, gate_off * up.abs() + gate.abs() * up_off + gate_off * up_off


def judge_norm(call: Call, y: Tensor) -> None:
    """Assert that y is the rows' norm: NaN where the stock module has it, right elsewhere."""
    x, gain, dtype = call.x.double(), call.gain, call.x.dtype
    gains = 1.0 if gain is None else gain.double()
    # float32, for what overflows there; without the gain, which is finite.
    wide = call.x.float()
    stock = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + call.eps)
    s = torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps)
    ref = x * s * gains
    dead = torch.rsqrt(wide.square().mean(-1, keepdim=True)) == 0
    ref = torch.where(dead, stock.double(), ref)
    assert torch.equal(y.isnan(), stock.isnan()), "NaN elsewhere than in the stock module"
    # Subnormal numbers may count as zero, and the interpreter takes bfloat16's for others.
    off = (_ROUNDING[dtype] + 2.0**-18) * ref.abs() + _LEAST[dtype] + 2.0**-126 * s * gains
    off = 1.01 * off
    wrong = ~stock.isnan() & ~((y.double() - ref).abs() <= off)
    assert not wrong.any(), f"{int(wrong.sum())} values are wrong: {y[wrong][:3]}, {ref[wrong][:3]}"
