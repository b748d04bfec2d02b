"""What a candidate must show before it is timed: each planted defect is found by its check."""

from __future__ import annotations

import warnings

import pytest
import racing_family
import torch
from fake_machine import FakeCompiler, FakeMachine
from torch.nn.functional import linear

from flashnorm_triton import ops, reference
from flashnorm_triton.plans import UNFUSED, Plan, Problem
from flashnorm_triton.tuning import validate
from flashnorm_triton.tuning.tuner import Tuner

EPS = 1e-6


@pytest.fixture(autouse=True)
def _fewer_rows(monkeypatch):
    monkeypatch.setattr(validate, "_LEAST_OUTPUTS", 1 << 13)


DTYPES = ("bfloat16", "float16", "float32")


def case_of(dtype="bfloat16", m=16, has_bias=False, has_gain=False, n=96, k=192) -> validate.Case:
    problem = Problem(dtype, m, n, k, has_bias, has_gain)
    weight = torch.randn(n, k) / k**0.5 * (0.5 + torch.rand(k))
    return validate.make_case(problem, weight.to(getattr(torch, dtype)), EPS)


def right(case: validate.Case, eps: float = EPS, bias: bool = True, gain: bool = True):
    """A fused operation done right: fp32 throughout, rounded once."""

    def run(x):
        wide = x.float() if case.gain is None or not gain else x.float() * case.gain.float()
        y = linear(wide, case.weight.float()) * reference.scale_of(x, eps)
        y = y if case.bias is None or not bias else y + case.bias.float()
        return x.new_empty(y.shape).copy_(y)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "extras"), [(1, False), (16, True), (700, False)])
def test_a_right_candidate_passes(dtype, m, extras):
    case = case_of(dtype, m, has_bias=extras, has_gain=extras)
    found = validate.check(case, right(case), launches=6)
    assert found.reason is None
    assert 0 < found.rel_err <= found.rel_err_stock * 1.05
    assert sum(len(part) for part in case.parts) >= 64


EPILOGUES = {
    "centred": {"centred": True},
    "silu, gated, residual": {"activation": "silu", "gated": True, "has_residual": True},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "centred, relu2, residual": {"centred": True, "activation": "relu2", "has_residual": True},
    "gated alone": {"gated": True},
}


def with_epilogue(case: validate.Case, problem: Problem, without: str = ""):
    """norm_linear in plain torch, wide and rounded once, with one part of it left out."""
    dropped = {"centred": "row_sums", "has_residual": "residual"}.get(without, without)
    more = {name: value for name, value in case.epilogue.items() if name != dropped}

    def run(x):
        wide = {
            name: value.double() if isinstance(value, torch.Tensor) else value
            for name, value in more.items()
        }
        y = ops.norm_linear(x.double(), case.weight.double(), case.eps, case.bias.double(), **wide)
        return x.new_empty(y.shape).copy_(y)

    return run


@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_is_checked_as_a_whole(name):
    problem = Problem("bfloat16", 24, 96, 192, has_bias=True, **EPILOGUES[name])
    weight = torch.randn(96, 192) / 192**0.5 * (0.5 + torch.rand(192))
    case = validate.make_case(problem, weight.bfloat16(), EPS)
    assert case.wanted.shape[1] == problem.width and len(case.parts) > 1
    assert validate.check(case, with_epilogue(case, problem), launches=6).reason is None
    for without in EPILOGUES[name]:
        if without != "gated":  # without it, the width is another
            wrong = validate.check(case, with_epilogue(case, problem, without), launches=2)
            assert "stock has" in wrong.reason


def test_the_inputs_are_hard():
    x = torch.cat(case_of(m=32).parts).double()
    rms = x.square().mean(1).sqrt()
    assert rms.min() == 0  # a zero row
    assert rms[rms > 0].min() < 1e-3 and rms.max() > 1e2  # eps matters here, and not there
    peak = x.abs().amax(1) / rms
    assert (peak > 0.9 * x.shape[1] ** 0.5).any()  # one channel is nearly the whole row
    in_fp16 = torch.cat(case_of("float16", m=32).parts)
    assert torch.isfinite(in_fp16).all() and in_fp16.abs().max() > 1e3


def test_the_rows_of_a_layer_norm_are_off_centre():
    weight = torch.randn(8, 4096) / 64
    problem = Problem("bfloat16", 32, 8, 4096, centred=True)
    x = torch.cat(validate.make_case(problem, weight.bfloat16(), EPS).parts).double()
    plain = x[0::3][x[0::3].abs().amax(1) > 0]
    means = plain.mean(1) / plain.std(1)
    assert 2 < means.abs().mean() < 4 and means.abs().std() > 0.5
    assert (means > 1).any() and (means < -1).any()
    other = Problem("bfloat16", 32, 8, 4096)
    x = torch.cat(validate.make_case(other, weight.bfloat16(), EPS).parts).double()
    assert (x[0::3].mean(1).abs() < 0.2).all()


def centred(case: validate.Case, fault: str = ""):
    """A LayerNorm and linear with the mean taken off after the product, in fp32; or nearly."""

    def run(x):
        wide = x.float()
        mean = wide.mean(1, keepdim=True)
        variance = (wide - mean).square().mean(1, keepdim=True)
        if fault == "a mean of its own rounding":
            mean = mean.to(x.dtype).float()
        if fault == "the mean square for the variance":
            variance = wide.square().mean(1, keepdim=True)
        term = mean * case.epilogue["row_sums"]
        term = {"no mean term": 0 * term, "the mean term added": -term}.get(fault, term)
        y = (linear(wide, case.weight.float()) - term) * torch.rsqrt(variance + EPS)
        return x.new_empty(y.shape).copy_(y)

    return run


@pytest.mark.parametrize(
    "fault",
    ["", "no mean term", "the mean term added", "a mean of its own rounding",
     "the mean square for the variance"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_that_is_not_taken_off_is_found(fault, dtype):
    """K so large that the mean of a row of random values is nearly 0."""
    problem = Problem(dtype, 16, 96, 3072, centred=True)
    weight = (torch.randn(96, 3072) / 3072**0.5).to(getattr(torch, dtype))
    case = validate.make_case(problem, weight, EPS)
    reason = validate.check(case, centred(case, fault), launches=2).reason
    assert "stock has" in reason if fault else reason is None


def test_reference_rows_meet_every_block_of_rows():
    for count in (1, 64, 513, 8192):
        rows = validate._spread(count, torch.device("cpu"))
        assert len(rows) <= 512 and len(set(rows.tolist())) == len(rows)
        assert rows.min() >= 0 and rows.max() < count
        assert set((rows // 64).tolist()) == set(range(-(-count // 64)))
    places = validate._spread(8192, torch.device("cpu")) % 16
    assert set(places.tolist()) == set(range(16))


DEFECTS = {
    "a scale that is off by 1 %": lambda case: lambda x: right(case)(x) * 1.01,
    "another eps": lambda case: right(case, eps=1e-5),
    "no bias": lambda case: right(case, bias=False),
    "no gain": lambda case: right(case, gain=False),
    "rounded twice": lambda case: (
        lambda x: (
            (linear(x, case.weight * case.gain) * reference.scale_of(x, EPS)).to(x.dtype)
            + case.bias
        )
    ),
    "the last column of K left out": lambda case: (
        lambda x: right(case)(torch.cat([x[:, :-1], torch.zeros_like(x[:, :1])], 1))
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_candidate_is_found(defect):
    case = case_of(has_bias=True, has_gain=True)
    found = validate.check(case, DEFECTS[defect](case), launches=2)
    assert found.reason is not None and "stock has" in found.reason, defect


def test_one_wrong_value_is_found_by_the_largest_error():
    """Too little to move the Frobenius norm, at a place of a row that the reference holds."""
    case = case_of(m=64)

    def run(x):
        y = right(case)(x)
        row = y[int(case.rows[1])]
        row[row.abs().argmax()] *= 1.02
        return y

    found = validate.check(case, run, launches=2)
    assert "largest error" in found.reason and found.rel_err < 1.25 * found.rel_err_stock


def test_many_small_errors_are_found_by_the_norm():
    """None larger than the stock modules' largest, but in every value."""
    case = case_of(m=64)

    def run(x):
        y = right(case)(x)
        bound = 0.8 * case.stock[1] * y.float().abs().amax(1, keepdim=True)
        return y + (bound * torch.randn_like(y).sign()).to(y.dtype)

    assert "relative error" in validate.check(case, run, launches=2).reason


def test_an_error_in_a_zero_row_is_found():
    case = case_of(m=64)
    zero = (torch.cat(case.parts) == 0).all(1).nonzero().item()

    def run(x):
        y = right(case)(x)
        empty = (x == 0).all(1)
        y[empty] = 1e-6
        return y

    assert zero in case.rows
    assert "largest error" in validate.check(case, run, launches=2).reason


def test_what_is_not_written_is_found():
    case = case_of(m=16)

    def run(x):
        y = x.new_empty(len(x), case.weight.shape[0])
        y[:, :-1] = right(case)(x)[:, :-1]
        return y

    assert "unwritten" in validate.check(case, run, launches=2).reason


def test_scratch_that_is_read_before_it_is_written_is_found():
    case = case_of(m=16)

    def run(x):
        return right(case)(x) + 0 * torch.empty(1, dtype=x.dtype)

    assert "unwritten" in validate.check(case, run, launches=2).reason


def test_poisoning_ends_with_its_block():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with validate.poisoned_memory():
            assert torch.zeros(1).new_empty(7, dtype=torch.bfloat16).isnan().all()
        assert not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with validate.poisoned_memory():
                pass
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(False)


class Moving:
    """A right candidate whose lowest bit moves in every ``every``-th launch: a mild race.

    (A prime that no number of parts is a multiple of, or each part would always move alike.)
    """

    def __init__(self, case: validate.Case, every: int = 7) -> None:
        self.run, self.every, self.launches = right(case), every, 0

    def __call__(self, x):
        y = self.run(x)
        self.launches += 1
        if self.launches % self.every == 0:
            y.view(torch.int16)[0, y[0].abs().argmin()] ^= 1
        return y


@pytest.mark.parametrize("m", [1, 16, 128])
def test_moving_bits_are_found_even_where_every_value_is_right(m):
    case = case_of(m=m)
    values, _ = validate.check_values(case, Moving(case))
    assert values.reason is None  # the first check alone lets it pass
    found = validate.check(case, Moving(case), launches=24)
    assert "other bits in" in found.reason and "of 24" in found.reason


def test_every_launch_comes_with_load_on_the_other_stream():
    case, loads = case_of(m=16), []
    assert validate.check(case, right(case), 9, lambda: loads.append(1)).reason is None
    assert len(loads) == 9


def test_minus_zero_and_nan_are_compared_by_their_bits():
    case = case_of(m=64)
    outputs = [right(case)(part) for part in case.parts]
    outputs[0][0, 0] = float("nan")
    again = iter([value.clone() for value in outputs])
    assert validate.check_bits(case, lambda x: next(again), outputs, 1, lambda: None) is None
    outputs[0][0, 0] = 0.0
    minus = outputs[0].clone()
    minus[0, 0] = -0.0
    assert validate.check_bits(case, lambda x: minus, outputs, 1, lambda: None)


def test_the_tuner_rejects_the_racing_form_by_the_bits_alone(tmp_path):
    """The lint is told to find nothing; a launcher whose bits move stands in for the race."""
    case = case_of(m=16)
    machine = FakeMachine(
        lambda problem, plan: 1.0 if plan == racing_family.RACING else 10.0,
        lambda problem, plan: validate.check(
            case, Moving(case) if plan == racing_family.RACING else right(case), launches=24
        ),
    )
    listed = (UNFUSED, racing_family.RACING, Plan("single_pass", "gemv", 1, 4, 256))
    work = Tuner(machine, FakeCompiler(), tmp_path / "t.json", candidates=lambda *_: listed)
    report = work.tune([Problem("bfloat16", 16, 96, 192)])
    assert [plan for _, plan, _ in report.rejected] == [racing_family.RACING]
    assert "other bits" in report.rejected[0][2]
    assert ("time", racing_family.RACING) not in machine.events
    assert next(iter(report.done.values())).plan != racing_family.RACING


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the race is Hopper's",
)
def test_the_racing_form_races_and_is_found_on_a_real_gpu(monkeypatch):
    """By its bits alone, by its values alone; the unpipelined form and a shipped plan pass."""
    from flashnorm_triton import dispatch, launch, ops
    from flashnorm_triton.tuning.rig import Rig

    monkeypatch.setitem(launch.FAMILIES, "tiles", racing_family.Racing)
    monkeypatch.setattr(dispatch, "unfit", lambda *_: None)  # the gate that keeps the form out
    dispatch._families.clear()
    dispatch._ready.clear()
    rig = Rig()
    try:
        bench = rig.open(Problem("bfloat16", 256, 6144, 4096))
        case = bench.case

        def racing(x):
            return ops.norm_linear(x, case.weight, case.eps, plan=racing_family.RACING)

        outputs = [racing(part) for part in case.parts]
        moved = validate.check_bits(case, racing, outputs, 24, lambda: rig.load(4))
        assert moved is not None and "other bits" in moved
        values, _ = validate.check_values(case, racing)
        assert values.reason is not None
        assert bench.verify(racing_family.RACING, 24).reason is not None
        assert bench.verify(racing_family.TAME, 24).reason is None
        assert bench.verify(UNFUSED, 24).reason is None
        shipped = Plan("single_pass", "hopper_swap", 64, 128, 64, 4, 6, in_flight=1)
        assert bench.verify(shipped, 24).reason is None
    finally:
        rig.close()
        dispatch._families.clear()
        dispatch._ready.clear()
