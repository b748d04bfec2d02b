"""Whatever fails at run time: the results are right, and one warning says why.

Kernels run in the interpreter on a GPU that is none (fake_gpu.py); what needs a real one is last.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HAS_GPU
from fake_gpu import FAULTS, HOPPER, break_kernels, gpu, launched
from numerics import assert_contract, make_case
from tiny_models import tiny_model, token_ids
from torch import Tensor

import flashnorm_triton as fn
from flashnorm_triton import ops, runtime
from flashnorm_triton.heads import Head, HeadNorms, Heads
from flashnorm_triton.ops import norm_linear, rms_norm
from flashnorm_triton.plans import Device

pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(HAS_GPU, reason="the interpreter stands in for a GPU")
ROOT = Path(__file__).resolve().parents[1]
EACH = pytest.mark.parametrize("fault", FAULTS)


def head_norms() -> HeadNorms:
    heads = (Heads(0, 2, (Head(16, (0,)),)), Heads(32, 1, (Head(24),)))
    return HeadNorms(heads, (1e-6,), (False,))


def told(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The action's result, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    # Triton 3.6's interpreter meets NumPy's deprecations.
    ours = [w for w in caught if not issubclass(w.category, DeprecationWarning)]
    return result, [str(warning.message) for warning in ours]


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def everything(norms: HeadNorms | None = None) -> dict[str, Tensor]:
    """Every public operation once, by name; the inputs are the same at every call."""
    norms = norms or head_norms()
    draw = torch.Generator().manual_seed(7)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x, weight, gain, residual = new(3, 32), new(12, 32), new(32), new(3, 6)
    more = {"activation": "silu", "gated": True, "residual": residual}
    return {
        "norm_linear": norm_linear(x, weight, 1e-6, new(12), gain),
        "one row": norm_linear(x[:1], weight, 1e-6),
        "many rows": norm_linear(new(40, 32), weight, 1e-6, activation="gelu"),
        "gated": norm_linear(x, weight, 1e-6, **more),
        "LayerNorm": norm_linear(x, weight, 1e-6, row_sums=weight.sum(1), activation="relu"),
        "registered": torch.ops.flashnorm.norm_linear(x, weight, 1e-6, None, gain),
        "rms_norm": rms_norm(x, 1e-6, gain),
        "heads": norms(new(3, 56), (new(16),), new(3, 20), 1e-6),
    }


@pytest.fixture
def right() -> dict[str, Tensor]:
    """What the operations give in plain torch."""
    return everything()


def check(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, wanted in right.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-5, msg=name)


@on_cpu
def test_the_fake_gpu_runs_kernels(right) -> None:
    with gpu() as patch:
        names = launched(patch)
        got, messages = told(everything)
    assert {"norm_gemv_kernel", "rms_norm_kernel", "finish_kernel", "heads_kernel"} <= set(names)
    assert not messages
    check(got, right)


@on_cpu
@EACH
def test_no_kernel_runs_at_all(right, fault: str) -> None:
    """Then torch computes everything; one warning for all operations and layers."""
    error, said = FAULTS[fault]
    with gpu() as patch:
        failed, norms = break_kernels(patch, error), head_norms()
        got, messages = told(lambda: everything(norms))
        assert failed and len(messages) == 1
        tried = len(failed)
        again, silence = told(lambda: everything(norms))
        assert not silence and len(failed) == tried, "a failed plan was tried again"
    assert matches(said, messages[0]) and "instead" in messages[0]
    check(got, right)
    check(again, right)


@on_cpu
@EACH
def test_a_fused_kernel_that_fails_gives_way_to_the_unfused_pair(right, fault: str) -> None:
    error, said = FAULTS[fault]
    with gpu() as patch:
        names = launched(patch)
        break_kernels(patch, error, only="gemv")
        got, messages = told(everything)
    assert len(messages) == 1 and matches(said, messages[0])
    assert "single_pass/gemv failed for K = 32, N = 12" in messages[0]
    assert "unfused/library instead" in messages[0]
    assert "rms_norm_kernel" in names and "norm_gemv_kernel" not in names
    check(got, right)


@on_cpu
def test_a_failed_plan_is_not_tried_again_for_another_number_of_rows() -> None:
    """A compile that fails takes its time; prompts have ever new lengths."""
    x, weight = torch.randn(4, 32), torch.randn(12, 32)
    with gpu() as patch:
        failed = break_kernels(patch, FAULTS["compiler"][0], only="gemv")
        for m in (3, 4, 3):
            norm_linear(x[:m], weight, 1e-6)
    assert len(failed) == 1


@on_cpu
def test_two_reasons_are_two_warnings_and_forgotten_ones_are_told_again() -> None:
    x, weight = torch.randn(1, 32), torch.randn(12, 32)
    with gpu() as patch:
        break_kernels(patch, FAULTS["compiler"][0], only="gemv")
        assert len(told(lambda: norm_linear(x, weight, 1e-6))[1]) == 1
        assert not told(lambda: norm_linear(x, weight[:8], 1e-6))[1]
        break_kernels(patch, FAULTS["launch"][0], only="rms_norm")
        assert len(told(lambda: rms_norm(x, 1e-6))[1]) == 1
        ops.forget_plans()
        assert len(told(lambda: norm_linear(x, weight, 1e-6))[1]) == 1


@on_cpu
def test_paths_and_numbers_do_not_make_another_reason() -> None:
    """gcc fails on a file of another name every time."""
    names = iter(range(100))

    def error() -> Exception:
        return subprocess.CalledProcessError(1, ["/usr/bin/gcc", f"/tmp/tmp{next(names)}a/main.c"])

    with gpu() as patch:
        break_kernels(patch, error)
        assert len(told(everything)[1]) == 1


@on_cpu
def test_out_of_memory_stays_an_error_in_every_operation() -> None:
    def error() -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory")

    x, weight = torch.randn(3, 32), torch.randn(12, 32)
    norms = head_norms()
    with gpu() as patch:
        break_kernels(patch, error)
        for call in (
            lambda: norm_linear(x, weight, 1e-6),
            lambda: rms_norm(x, 1e-6),
            lambda: norms(torch.randn(3, 56), (torch.randn(16),)),
        ):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                call()
        patch.undo()
    with gpu():
        norm_linear(x, weight, 1e-6)  # what ran out of memory is not held against the plan


@on_cpu
def test_a_driver_without_the_copy_engine() -> None:
    """Gluon cannot be interpreted: a Hopper whose own kernels all fail, whatever the rows."""
    weight = torch.randn(64, 64).half()
    with gpu(HOPPER) as patch:
        names, messages = launched(patch), []
        for m in (16, 64, 200, 16):
            case = make_case(m, 64, 64, torch.float16, bias=True)._replace(weight=weight)
            y, said = told(lambda case=case: norm_linear(*case))
            assert_contract(y, case)
            messages += said
    assert len(messages) == 1 and "single_pass/hopper_swap failed" in messages[0]
    assert names and set(names) <= {"rms_norm_kernel", "norm_tiles_kernel"}


@on_cpu
def test_a_gpu_that_is_too_old(right) -> None:
    """Alone it makes Triton unavailable; beside a newer one it is told apart by its index."""
    with gpu(Device("cuda", 75, 40)) as patch:
        names = launched(patch)
        got, messages = told(everything)
    assert not names and len(messages) == 1
    assert "plain torch: compute capability 7.5" in messages[0] and "below 8.0" in messages[0]
    check(got, right)


@on_cpu
def test_triton_that_is_not_there_to_run(right) -> None:
    for reason in ("Triton is not installed (pip install triton)", "Triton needs a C compiler"):
        with gpu() as patch:
            patch.setattr(runtime, "triton_unavailable", lambda reason=reason: reason)
            names = launched(patch)
            got, messages = told(everything)
        assert not names and len(messages) == 1 and reason in messages[0]
        check(got, right)


# Models


@on_cpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("fold", [True, False], ids=["fold", "gain"])
def test_a_patched_model_without_kernels(family: str, fold: bool) -> None:
    """Patched as ever, right, one warning for all of its layers; reverted, it is as it was."""
    model = tiny_model(family)
    tokens = token_ids()
    values = {name: p.clone() for name, p in model.state_dict().items()}
    modules = {name: id(m) for name, m in model.named_modules()}
    with torch.no_grad():
        expected = model(tokens).logits
        with gpu() as patch:
            break_kernels(patch, FAULTS["compiler"][0])
            handle, messages = told(lambda: fn.patch(model, fold=fold))
            assert handle.changed and len(messages) <= 1
            assert not any("could not be patched" in site.reason for site in handle.report.sites)
            logits, later = told(lambda: model(tokens).logits)
            assert len(messages) + len(later) == 1
            assert not told(lambda: model(tokens[:, :5]).logits)[1]
            handle.revert()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(tokens).logits, expected)
    assert {name: id(m) for name, m in model.named_modules()} == modules
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in values.items())


@on_cpu
@pytest.mark.parametrize("fold", [True, False], ids=["fold", "gain"])
def test_no_memory_to_pack_any_site(fold: bool, monkeypatch) -> None:
    """The device is full: no weight has moved, and one warning says why.

    The final norm, one launch of its own, needs no memory.
    """
    model = tiny_model("llama")
    modules = {name: id(m) for name, m in model.named_modules()}
    tensors = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(token_ids()).logits
        allocate = Tensor.new_empty

        def full(self: Tensor, shape: Any, **options: Any) -> Tensor:
            if isinstance(shape, tuple) and len(shape) == 2 and shape[0] > 64:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return allocate(self, shape, **options)

        monkeypatch.setattr(Tensor, "new_empty", full)
        handle, messages = told(lambda: fn.patch(model, fold=fold))
        monkeypatch.undo()
        assert len(messages) == 1 and "Tried to allocate 2.00 GiB" in messages[0]
        torch.testing.assert_close(model(token_ids()).logits, expected, rtol=1e-5, atol=1e-5)
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == tensors
        kept = handle.report.kept
        assert len(kept) == 4 and all("OutOfMemoryError" in site.reason for site in kept)
        handle.revert()
        assert {name: id(m) for name, m in model.named_modules()} == modules
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == tensors
        assert torch.equal(model(token_ids()).logits, expected)
    with fn.patched(model, fold=fold) as handle:  # with room again
        assert len(handle.report.fused) == 4


# Processes of their own


def python(script: str, **environment: str) -> list[str]:
    """The lines that a script prints, with nothing interpreted unless it says so."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@on_cpu
def test_a_machine_without_triton() -> None:
    """The package neither imports it nor misses it: a model is patched, and computes the same."""
    script = """
        import importlib.util, sys, warnings
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: (
            None if name.split(".")[0] == "triton" else find(name, *more))

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        import torch
        from tiny_models import tiny_model, token_ids
        import flashnorm_triton as fn
        from flashnorm_triton import fallback

        fallback.has_kernels = lambda x: not x.is_meta
        warnings.simplefilter("always")
        model, tokens = tiny_model("llama"), token_ids()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            expected = model(tokens).logits
            fn.patch(model)
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
            fn.rms_norm(tokens.float(), 1e-6)
        assert "triton" not in sys.modules
        ours = [str(w.message) for w in caught if "flashnorm_triton" in str(w.message)]
        print(*ours, sep="\\n")
    """
    (message,) = python(script)
    assert "plain torch: Triton is not installed (pip install triton)" in message


_COMPILE = """
    from flashnorm_triton import fallback
    from flashnorm_triton.plans import Device, Plan, Problem
    from flashnorm_triton.tuning.build import Job, Target, compile_plan

    plan, problem = Plan("single_pass", "gemv", 1, 2, 256, 1), Problem("bfloat16", 1, 8, 256)
    try:
        compile_plan(Job(plan, problem, Device("cuda", 80, 108), Target("cuda", 80, 32)))
    except Exception as error:
        print(fallback.reason_of(error))
    else:
        print("compiled")
"""


def damage(folder: Path) -> int:
    """Cut the descriptions of compiled kernels short; how many."""
    # Triton 3.7 makes the lists of a kernel's files, __grp__*, anew where they are damaged.
    found = [path for path in folder.rglob("*.json") if not path.name.startswith("__grp__")]
    for path in found:
        path.write_bytes(path.read_bytes()[:-40])
    return len(found)


def test_what_triton_says_of_a_damaged_or_forbidden_cache(tmp_path: Path) -> None:
    """The compiler's own errors, which the warnings translate."""
    assert python(_COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == ["compiled"]
    assert damage(tmp_path)
    (said,) = python(_COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert f"damaged: delete {tmp_path}" in said
    (said,) = python(_COMPILE, TRITON_CACHE_DIR="/proc/no-folder-can-be-made-here")
    assert "TRITON_CACHE_DIR" in said and "/proc/no-folder" in said


_FORWARD = """
    import warnings
    import torch
    from numerics import assert_contract, make_case, norm64
    from flashnorm_triton import norm_linear, rms_norm

    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as caught:
        for m in (1, 16, 200):
            case = make_case(m, 512, 1024, torch.bfloat16, "cuda", bias=True)
            assert_contract(norm_linear(*case), case, limit=2.0)
            y = rms_norm(case.x, 1e-6).double()
            assert (y - norm64(case.x, 1e-6)).norm() <= 4e-3 * y.norm()
    for warning in caught:
        if "flashnorm_triton" in str(warning.message):
            print(str(warning.message).replace("\\n", " "))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", None),
        ("forbidden cache", "TRITON_CACHE_DIR"),
        ("damaged cache", "damaged: delete"),
        ("no C compiler", "needs a C compiler"),
        ("a C compiler that fails", "false"),
    ],
)
def test_on_a_gpu(fault: str, said: str | None, tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path)}
    if fault == "forbidden cache":
        environment["TRITON_CACHE_DIR"] = "/proc/no-folder-can-be-made-here"
    elif fault == "damaged cache":
        assert python(_FORWARD, **environment) == [] and damage(tmp_path)
    elif fault.endswith("compiler"):
        environment["CC"] = "/no/compiler/of/this/name"
    elif fault.endswith("fails"):
        environment["CC"] = "/bin/false"
    messages = python(_FORWARD, **environment)
    assert len(messages) == (said is not None)
    assert said is None or said in messages[0]
