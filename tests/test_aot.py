"""Kernels compile for every target they claim, without a GPU, within its registers and memory."""

from __future__ import annotations

import json
import os
import re

import pytest
from aot_runs import FIXTURES, SHIPPED, Run, command, compiled

from flashnorm_triton.compile_unit import TARGETS, CompileUnit
from flashnorm_triton.tuning import aot

# A thread's spilled bytes that are let pass, by target: none on the GPUs the package is tuned for;
# elsewhere a handful of registers, which no timing has to answer for yet.
MOST_SPILLED = {"sm80": 64, "sm90": 0, "sm100": 64, "gfx942": 64}


@pytest.fixture(scope="module")
def fixtures() -> Run:
    return compiled(FIXTURES)


@pytest.fixture(scope="module")
def shipped() -> Run:
    return compiled(SHIPPED)


def unit(**changes: object) -> CompileUnit:
    fields = {"name": "u", "fn": len, "signature": {"x": "*bf16"}, "targets": ("sm90",)}
    return CompileUnit(**{**fields, **changes})


# The shipped kernels


def test_every_shipped_kernel_compiles_for_every_target_it_claims(shipped):
    failed = {key: row["error"] for key, row in shipped.records().items() if row["error"]}
    assert not failed
    assert {target for _, target in shipped.records()} == set(TARGETS)


def test_every_shipped_kernel_fits_its_targets_shared_memory(shipped):
    oversize = {
        key: row["shared_bytes"]
        for target in TARGETS
        for key, row in shipped.records(target).items()
        if not row["fits"]
    }
    assert not oversize


@pytest.mark.parametrize("target", TARGETS)
def test_register_spills_of_shipped_kernels(shipped, target, capsys):
    rows = shipped.records(target)
    spilled = {name: row["spill_bytes"] for (name, _), row in rows.items() if row["spill_bytes"]}
    with capsys.disabled():
        most = max(row["registers"] for row in rows.values())
        print(f"\n{target}: {len(rows)} kernels, at most {most} registers, spills {spilled or 0}")
    assert not {name: spill for name, spill in spilled.items() if spill > MOST_SPILLED[target]}


# The compiler front


@pytest.mark.parametrize(
    ("target", "kind", "mark"),
    [
        ("sm80", "ptx", ".target sm_80"),
        ("sm90", "ptx", ".target sm_90a"),
        ("sm100", "ptx", ".target sm_100a"),
        ("gfx942", "amdgcn", "amdgcn-amd-amdhsa--gfx942"),
    ],
)
def test_one_kernel_on_every_target(fixtures, target, kind, mark):
    row = fixtures.records()["everywhere-w4s2", target]
    assert row["error"] is None and row["fits"] and row["findings"] == []
    assert 32 <= row["registers"] <= 255
    assert row["num_warps"] == 4
    # Two 64x64 bf16 tiles a stage; Triton keeps as few stages as it can on some targets.
    assert 16_384 <= row["shared_bytes"] <= 2 * 16_384 + 64
    assert mark in fixtures.text("everywhere-w4s2", target, kind)


def test_spills_are_seen(fixtures):
    rows = fixtures.records("sm90")
    assert rows["spilling-w4s2", "sm90"]["spill_bytes"] > 100
    assert rows["spilling-w4s2", "sm90"]["registers"] == 255
    assert rows["gemm-w4s3", "sm90"]["spill_bytes"] == 0


def test_gcn_usage_reads_the_metadata():
    text = (
        "    .private_segment_fixed_size: 24\n    .vgpr_count:     102\n    .vgpr_spill_count: 3\n"
    )
    assert aot._gcn_usage(text) == (102, 24)
    assert aot._gcn_usage(text.replace("size: 24", "size: 0")) == (102, 12)
    with pytest.raises(aot.AotError, match="vgpr_count"):
        aot._gcn_usage(text.replace(".vgpr_count", ".other"))


def test_warps_are_those_asked_for_and_producers_are_counted(fixtures):
    assert fixtures.records()["racing_pointer-w8s3", "sm90"]["num_warps"] == 8
    # Four consumer warps and one producer, rounded up to whole warp groups.
    assert fixtures.records()["ring_waits", "sm90"]["num_warps"] == 8


@pytest.mark.parametrize("gluon", [False, True])
def test_what_triton_is_asked_for(monkeypatch, gluon):
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import JITFunction

    asked = {}

    def compile(source, target, options):
        asked.update(source=source, target=target, options=options)
        raise RuntimeError("far enough")

    monkeypatch.setattr(triton, "compile", compile)
    kernel = object.__new__(JITFunction)
    kernel.__name__ = "kernel"
    described = unit(
        fn=kernel,
        signature={"x": "*bf16", "B": "constexpr", "n": "i32"},
        constexprs={"B": 64},
        divisible_by_16=(0, 2),
        num_warps=8,
        num_stages=5,
        gluon=gluon,
    )
    with pytest.raises(aot.CompileFailed, match="u for sm90: RuntimeError: far enough"):
        aot.compile_unit(described, "sm90")
    assert isinstance(asked["source"], GluonASTSource) is gluon
    assert asked["source"].signature == dict(described.signature)
    assert asked["source"].constants == {(1,): 64}
    assert asked["source"].attrs == {(i,): [["tt.divisibility", 16]] for i in (0, 2)}
    assert (asked["target"].backend, asked["target"].arch) == ("cuda", 90)
    assert asked["options"] == {"num_warps": 8, "num_stages": 5}


def test_more_shared_memory_than_there_is_is_refused(fixtures):
    row = fixtures.records()["oversize-w8s5", "sm90"]
    assert row["shared_bytes"] > aot.SHARED_LIMIT["sm90"] and not row["fits"]
    assert "more than the 232448 bytes there are" in fixtures.output


def test_a_kernel_that_does_not_compile_is_a_record_with_its_reason(fixtures):
    row = fixtures.records()["refusing-w4s1", "sm90"]
    assert "refusing-w4s1 for sm90" in row["error"] and "never compiles" in row["error"]
    assert fixtures.status == 1


def test_clean_units_end_with_status_zero_and_again_from_the_disk_cache(tmp_path):
    def rows() -> list[dict]:
        done = command(
            *("--json", str(tmp_path / "r.json"), "--targets", "sm80", "gfx942"),
            *("--units", "lint_kernels:compile_units"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        records = json.loads((tmp_path / "r.json").read_text())["records"]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in records]

    first = rows()
    assert [row["target"] for row in first] == ["sm80", "gfx942"]
    assert rows() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--targets", "sm70"), "sm70.* none of sm80, sm90, sm100, gfx942"),
        (("--units", "racing_kernel:nothing"), "no compile units at 'racing_kernel:nothing'"),
        (("--units", "no_such_module:f"), "no compile units at 'no_such_module:f'"),
        (("--units", "racing_kernel"), "no compile units at 'racing_kernel'"),
        (("--units", *FIXTURES, FIXTURES[0]), "different names; repeated: racing_descriptor-w4s1"),
    ],
)
def test_bad_command_lines(tmp_path, arguments, message):
    units = () if "--units" in arguments else ("--units", FIXTURES[0])
    done = command("--json", str(tmp_path / "r.json"), *units, *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert not (tmp_path / "r.json").exists()


def test_unknown_target():
    with pytest.raises(aot.UnknownTarget, match="'sm75' is none of sm80"):
        aot.compile_unit(unit(), "sm75")


def test_unclaimed_target():
    with pytest.raises(aot.UnsupportedTarget, match="claims sm90, so it is not built for sm80"):
        aot.compile_unit(unit(), "sm80")


def test_something_that_is_no_kernel():
    with pytest.raises(aot.InterpretedKernel, match="Unset TRITON_INTERPRET"):
        aot.compile_unit(unit(), "sm90")


def test_results_keep_their_order_and_a_crash_names_its_unit(monkeypatch):
    def compile_unit(unit: CompileUnit, target: str) -> aot.Compiled:
        if unit.name == "crashes":
            os._exit(139)
        if unit.name == "fails":
            raise aot.CompileFailed("fails for sm90: no")
        return aot.Compiled(unit.name, target, "", "", 1, 0, 0, 4, 0.0)

    monkeypatch.setattr(aot, "compile_unit", compile_unit)
    names = ["first", "fails", "crashes", "last"]
    results = aot.compile_all([unit(name=n) for n in names], ["sm80", "sm90"], jobs=2)
    assert [r.name for r in results] == names
    assert [type(r) for r in results] == [aot.Compiled, aot.Failure, aot.Failure, aot.Compiled]
    assert results[1].error == "fails for sm90: no"
    assert "crashed the process" in results[2].error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signature": {"x": "*bf16", "B": "constexpr"}}, r"\['B'\] have no value"),
        ({"constexprs": {"x": 1}}, r"\['x'\] have a value but no 'constexpr'"),
        ({"divisible_by_16": (0, 1)}, r"names arguments \[1\], but there are 1"),
        ({"targets": ()}, "non-empty choice"),
        ({"targets": ("sm90", "sm75")}, "non-empty choice"),
        ({"num_warps": 3}, "num_warps 3 must be a power of two"),
        ({"num_warps": 0}, "num_warps 0 must be a power of two"),
        ({"num_stages": 0}, "num_stages 0 at least 1"),
    ],
)
def test_units_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=message):
        unit(**changes)
