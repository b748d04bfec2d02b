"""The result file: what is written is what is read, and what is malformed is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flashnorm_triton import atomic, results

ROOT = Path(__file__).resolve().parents[1]
HEAD = {
    "schema": 1,
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "driver": "580.1",
    "kernel_hash": "ab" * 20,
    "date": "2026-01-02T03:04:05Z",
    "copy_tb_s": 4.25,
    "matmul_tflops": 790.0,
}
OPERATION = {
    "case": "llama-3.2-1b.qkv",
    "op": "norm_linear",
    "dtype": "bfloat16",
    "m": 1,
    "n": 3072,
    "k": 2048,
    "plan": {"strategy": "single_pass"},
    "us": 5.25,
    "us_q20": 5.125,
    "us_q80": 5.5,
    "baselines_us": {"gemm_only": 6.5, "rms_norm+linear": 11.25},
    "floor_us": 2.96,
    "rel_err": 0.00171,
    "rel_err_stock": 0.0023,
    "extra": [1, 2],
}
MODEL = {
    "model": "llama-3.2-1b",
    "mode": "eager",
    "variant": "patched",
    "ms": 14.5,
    "tokens_per_s": 69.0,
    "launches": 320,
    "fraction_of_bandwidth": 0.04,
}
PATCHING = {
    "patching": "llama-3.1-8b",
    "variant": "patch()",
    "dtype": "bfloat16",
    "sites": 64,
    "patch_s": 9.5,
    "weights_gb": 16.06,
    "largest_site_gb": 0.235,
    "peak_gb": 16.31,
    "rel_err": 0.031,
    "rel_err_stock": 0.033,
    "revert_s": 1.7,
    "bit_equal": True,
    "missed": [],
}


def git(*args: str, cwd: Path, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["git", *args], cwd=cwd, input=stdin, capture_output=True, text=True, check=True
    )
    return done.stdout


def git_hash(root: Path) -> str:
    listing = git("ls-files", "-s", "flashnorm_triton/kernels", "flashnorm_triton/ops.py", cwd=root)
    return git("hash-object", "--stdin", cwd=root, stdin=listing).strip()


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")


@needs_git
def test_kernel_hash_is_gits(tmp_path):
    package = tmp_path / "flashnorm_triton"
    shutil.copytree(results.PACKAGE / "kernels", package / "kernels")
    (package / "ops.py").write_text("x = 1\n")
    (package / "kernels" / "a-b.py").write_text("")  # sorts before "a.py" and "a/…" by bytes
    (package / "kernels" / "a.py").write_text("é = 1\n", encoding="utf-8")
    (package / "kernels" / "a").mkdir()
    (package / "kernels" / "a" / "z.py").write_text("y = 2\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git("init", "-q", cwd=tmp_path)
    git("config", "core.autocrlf", "false", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    expected = git_hash(tmp_path)
    assert results.kernel_hash(package) == expected
    cache = package / "kernels" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "a.cpython-312.pyc").write_bytes(b"\0")
    assert results.kernel_hash(package) == expected
    (package / "ops.py").write_text("x = 2\n")
    assert results.kernel_hash(package) != expected


@needs_git
def test_kernel_hash_is_gits_in_a_clean_checkout():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    sources = ["flashnorm_triton/kernels", "flashnorm_triton/ops.py"]
    if git("status", "--porcelain", "--", *sources, cwd=ROOT):
        pytest.skip("the kernel sources have uncommitted changes")
    assert results.kernel_hash() == git_hash(ROOT)


def test_kernel_hash_of_nothing_is_refused(tmp_path):
    with pytest.raises(results.ResultsError, match="no kernel sources"):
        results.kernel_hash(tmp_path)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb"),
        ("AMD Radeon (TM) Pro", "amd_radeon_tm_pro"),
    ],
)
def test_gpu_slug(name, slug):
    assert results.gpu_slug(name) == slug


def test_gpu_slug_of_nothing_is_refused():
    with pytest.raises(results.ResultsError, match="' /'"):
        results.gpu_slug(" /")


@pytest.mark.parametrize(
    "record", [OPERATION, MODEL, PATCHING], ids=["operation", "model", "patching"]
)
def test_what_is_saved_is_what_is_loaded(tmp_path, record):
    path = tmp_path / "deep" / "norm_linear.json"
    results.save(path, HEAD, [record])
    assert results.load(path) == results.Results(header=HEAD, records=(record,))
    assert json.loads(path.read_text())["schema"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["norm_linear.json"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    results.save(path, HEAD, [OPERATION])
    before = path.read_bytes()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(atomic.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        results.save(path, HEAD, [OPERATION, OPERATION])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_refused_record_does_not_touch_the_file(tmp_path):
    path = tmp_path / "r.json"
    results.save(path, HEAD, [OPERATION])
    with pytest.raises(results.ResultsError, match="NaN or infinity"):
        results.save(path, HEAD, [{**OPERATION, "extra": {"deep": [float("nan")]}}])
    assert results.load(path).records == (OPERATION,)


@pytest.mark.parametrize("field", sorted(results.HEADER_FIELDS))
def test_every_header_field_is_required(tmp_path, field):
    head = {name: value for name, value in HEAD.items() if name != field}
    with pytest.raises(results.ResultsError, match=f"header has no '{field}'"):
        results.save(tmp_path / "r.json", head, [])


@pytest.mark.parametrize(
    ("record", "field"),
    [(OPERATION, f) for f in results.OPERATION_FIELDS if f != "op"]
    + [(MODEL, f) for f in results.MODEL_FIELDS]
    + [(PATCHING, f) for f in results.PATCHING_FIELDS if f != "patching"],
)
def test_every_record_field_is_required(record, field):
    broken = copy.deepcopy(record)
    del broken[field]
    with pytest.raises(results.ResultsError, match=f"record 1 has no '{field}'"):
        results.validate(HEAD, [record, broken])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": "5.3"}, "us = '5.3'.*int or float"),
        ({"m": True}, "m = True.*int"),
        ({"us_q20": None}, "us_q20 = None"),
        ({"baselines_us": [1.0]}, "baselines_us = "),
        ({"baselines_us": {"compiled": None}}, "baselines_us has compiled = None"),
    ],
)
def test_a_wrong_type_is_named(change, message):
    with pytest.raises(results.ResultsError, match=message):
        results.validate(HEAD, [{**OPERATION, **change}])


def test_a_record_with_an_error_needs_only_its_identity():
    identity = {name: OPERATION[name] for name in ("case", "op", "dtype", "m", "n", "k")}
    results.validate(HEAD, [{**identity, "error": "out of memory"}])
    with pytest.raises(results.ResultsError, match="has no 'k'"):
        del identity["k"]
        results.validate(HEAD, [{**identity, "error": "out of memory"}])
    results.validate(HEAD, [{"model": "m", "mode": "eager", "variant": "stock", "error": "x"}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no list 'records'"),
        ('{"schema": 1}', "no list 'records'"),
        (json.dumps({**HEAD, "schema": 2, "records": []}), "schema 2 is not the schema 1"),
        (json.dumps({**HEAD, "records": [3]}), "record 0 is 3"),
    ],
)
def test_a_foreign_file_is_refused_with_its_path(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(results.ResultsError, match=message) as caught:
        results.load(path)
    assert "r.json" in str(caught.value)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(results.ResultsError, match="cannot read .*r.json: No such file"):
        results.load(tmp_path / "r.json")


def test_header_describes_this_machine():
    head = results.header(copy_tb_s=1.0, matmul_tflops=2.0, gpu="no GPU")
    results.validate(head, [])
    assert head["kernel_hash"] == results.kernel_hash()
    assert head["gpu"] == "no GPU" and head["triton"] != "absent"


def test_header_without_a_gpu_asks_for_a_name(monkeypatch):
    monkeypatch.setattr(results.torch.cuda, "is_available", lambda: False)
    with pytest.raises(results.ResultsError, match="pass gpu="):
        results.header(copy_tb_s=1.0, matmul_tflops=2.0)


@pytest.mark.gpu
def test_header_on_a_gpu_names_it_and_its_driver():
    head = results.header(copy_tb_s=1.0, matmul_tflops=2.0)
    assert head["gpu"] == results.torch.cuda.get_device_name()
    assert head["driver"][0].isdigit()
