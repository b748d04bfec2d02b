"""``flashnorm bench``: its words, its flow over made-up benches, what a break leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
import warnings

import pytest
import torch
from typer.testing import CliRunner

from flashnorm_triton import plots, results, runtime
from flashnorm_triton.bench import display, norm_linear, report, resuming, running, stages, summary
from flashnorm_triton.cli import app
from flashnorm_triton.plans import Device
from flashnorm_triton.tuning import measure

HEAD = results.header(copy_tb_s=4.0, matmul_tflops=800.0, gpu="NVIDIA H200")


def call(*words: str):
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU, an empty current folder, and no pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "NVIDIA H200")
    monkeypatch.setattr(results, "header", lambda **rates: dict(HEAD))
    monkeypatch.setattr(measure, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(measure, "matmul_tflops", lambda: 800.0)
    monkeypatch.setattr(plots, "draw", lambda paths, out, say: [out / "curve.svg"])
    return tmp_path / "flashnorm-results" / "nvidia_h200"


def record(m: int, speedup: float) -> dict:
    return {
        "case": "a.qkv", "op": "norm_linear", "dtype": "bfloat16", "m": m, "n": 64, "k": 32,
        "plan": {}, "us": 2.0, "us_q20": 1.9, "us_q80": 2.1,
        "baselines_us": {"stock": 2.0 * speedup}, "floor_us": 1.0, "rel_err": 1e-3,
        "rel_err_stock": 1e-3, "speedup": speedup, "speedup_q20": speedup, "speedup_q80": speedup,
        "best_unfused": "stock", "vs_gemm": 0.9, "contract_ok": True,
    }  # fmt: skip


class Made:
    """A bench of four cells; ``at`` is called before each and may break it."""

    def __init__(self, monkeypatch, module: str, at=lambda m: None, speedups=(2.0, 1.5, 0.9, 1.2)):
        self.file, self.at, self.speedups = f"{module}.json", at, speedups
        self.argv: list[list[str]] = []
        self.measured: list[int] = []
        fake = types.SimpleNamespace(main=self.main)
        monkeypatch.setitem(sys.modules, f"flashnorm_triton.bench.{module}", fake)

    def main(self, argv):
        self.argv.append(list(argv))
        parser = running.parser("", resume=True)
        parser.add_argument("--budget", type=float)
        args, _ = parser.parse_known_args(argv)
        log = report.Log()
        path = running.result_file(args.out, "NVIDIA H200", self.file)
        kept = resuming.begin(path, running.header(), {}, resume=args.resume, log=log)
        cells = [m for m in range(1, 5) if not kept.has(m=m)]
        for m in report.progress(cells, self.file):
            self.at(m)
            self.measured.append(m)
            kept.save([record(m, self.speedups[m - 1])])
            log(f"M={m} measured")
        return running.ended(log, path, failed=False)


def test_one_command_gives_a_folder_a_table_and_pictures(gpu, monkeypatch):
    op, decode = Made(monkeypatch, "norm_linear"), Made(monkeypatch, "decode")
    done = call("--what", "op,decode", "--budget", "9000")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in gpu.iterdir()) == [
        "bench.log", "decode.json", "norm_linear.json",
    ]  # fmt: skip
    lines = done.output.splitlines()
    (row,) = [line for line in lines if line.startswith("norm_linear ")]
    # losses are shown beside the best
    assert "2.00x a.qkv M=1" in row and "0.90x a.qkv M=3" in row and "1 of 4" in row
    assert any("norm_linear.json 2/4" in line and "best so far 2.00x" in line for line in lines)
    assert "[1/2] op" in lines and "[2/2] decode" in lines
    assert any(line.endswith("figures/curve.svg") for line in lines)
    assert "M=4 measured" in (gpu / "bench.log").read_text()
    (argv,) = op.argv
    assert "--resume" in argv and argv[argv.index("--out") + 1] == str(
        gpu.relative_to(gpu.parents[1])
    )
    budgets = [float(a[a.index("--budget") + 1]) for a in (op.argv[0], decode.argv[0])]
    assert 5500 < budgets[0] <= 6000 < 8500 < budgets[1] <= 9000  # what op leaves goes to decode


def test_when_the_time_is_up_what_is_left_is_told(gpu, monkeypatch):
    op, decode = (
        Made(monkeypatch, name, lambda m: time.sleep(0.03)) for name in ("norm_linear", "decode")
    )
    done = call("--what", "op,decode", "--budget", "0.1")
    assert done.exit_code == 1 and "decode: not begun, for the time is up" in done.output
    assert op.measured and not decode.argv


def test_an_interrupted_run_keeps_its_cells_and_goes_on(gpu, monkeypatch):
    def stop(m):
        if m == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C does

    op, decode = Made(monkeypatch, "norm_linear", stop), Made(monkeypatch, "decode")
    done = call("--what", "op,decode")
    assert done.exit_code == 130 and "the same command goes on" in done.output
    assert op.measured == [1, 2] and not decode.argv
    assert len(results.load(gpu / "norm_linear.json").records) == 2
    op.at = lambda m: None
    done = call("--what", "op,decode")
    assert done.exit_code == 0 and "2 records are there and are kept" in done.output
    assert op.measured == [1, 2, 3, 4] and decode.measured == [1, 2, 3, 4]
    assert call("--what", "op").exit_code == 0 and op.measured == [1, 2, 3, 4]
    done = call("--what", "op", "--fresh")
    assert "begun anew" in done.output and op.measured == [1, 2, 3, 4] * 2
    (old,) = gpu.glob("norm_linear.json.*.old")
    assert old.name in done.output


def test_a_bench_that_fails_does_not_end_the_others(gpu, monkeypatch):
    def fail(m):
        os.environ["FLASHNORM_LEFT"] = "behind"
        warnings.filterwarnings("error")
        raise RuntimeError("out of memory")

    Made(monkeypatch, "norm_linear", fail)
    generate = Made(monkeypatch, "generate")
    done = call("--what", "op,generate", "--model", "demo")
    assert done.exit_code == 1 and "op: RuntimeError: out of memory" in done.output
    assert generate.measured == [1, 2, 3, 4] and (gpu / "generate.json").exists()
    assert "FLASHNORM_LEFT" not in os.environ
    assert ("error", None, Warning, None, 0) not in warnings.filters


def test_pictures_that_fail_cost_no_results(gpu, monkeypatch):
    def broken(paths, out, say):
        raise OSError("disk full")

    monkeypatch.setattr(plots, "draw", broken)
    Made(monkeypatch, "norm_linear")
    (gpu.parent / "mine").mkdir(parents=True)
    (gpu.parent / "mine" / "notes.json").write_text("{}")
    done = call("--what", "op", "--out", str(gpu.parent / "mine"))
    assert done.exit_code == 0 and "disk full" in done.output and "flashnorm plot" in done.output
    assert "notes.json" in done.output and (gpu.parent / "mine" / "notes.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--what", "op,ops"], "--what ops: give one or several of op, decode"),
        (["--model", "demo", "--shapes", "64x64"], "not both"),
        (["--shapes", "64x64", "--what", "decode"], "--what decode runs a model"),
        (["--shapes", "64x"], "unknown shape '64x'"),
        (["--dtype", "fp8"], "--dtype fp8: give bf16 or fp16"),
        (["--tokens", "1,no"], "'no' is no number of tokens"),
        (["--model", "no/such/folder"], "no model 'no/such/folder': give one of llama-3.2-1b"),
        (["--budget", "0"], "--budget 0.0: give a number of seconds"),
        (["--budget", "nan"], "--budget nan"),
        (["--out", "{file}"], "give a folder"),
        (["--out", "{file}/deeper"], "cannot be made"),
    ],
)
def test_bad_words_end_it_before_anything_runs(gpu, monkeypatch, words, said):
    op = Made(monkeypatch, "norm_linear")
    file = gpu.parents[1] / "a file"
    file.write_text("kept")
    done = call(*(word.format(file=file) for word in words))
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert not op.argv and not gpu.exists() and file.read_text() == "kept"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_what_it_needs_and_what_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call()
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "torch.cuda.is_available() is False" in done.stderr
    assert "flashnorm plot" in done.stderr and not list(tmp_path.iterdir())


def test_a_gpu_without_triton_is_told_so(gpu, monkeypatch):
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: "no C compiler (apt install gcc)")
    done = call()
    assert done.exit_code == 2 and "no C compiler (apt install gcc)" in done.stderr


def test_the_arguments_of_every_bench_are_its_own():
    """Whatever the command passes on is parsed by the bench that gets it."""
    from flashnorm_triton.bench import ablation, decode, generate, paper, profile

    parsers = {
        "op": norm_linear.parse,
        "decode": lambda argv: decode.parse(argv, "decode"),
        "prefill": lambda argv: decode.parse(argv, "prefill"),
        "generate": generate.parse,
        "ablation": ablation.parse,
        "profile": profile.parse,
        "paper": paper.parse,
    }
    for quick in (False, True):
        asked = stages.parse(
            model=["demo", "llama-3.2-1b"], what=",".join(stages.KINDS), tokens="1,7",
            dtype="fp16" if quick else "bf16", quick=quick,
        )  # fmt: skip
        planned = stages.plan(asked)
        names = ["op", "decode", "prefill", "generate", "generate", "ablation", "profile", "paper"]
        assert [stage.name for stage in planned] == names
        for stage in planned:
            args = parsers[stage.name]([*stage.argv, "--out", "x", "--budget", "inf"])
            # the paper's cells are in the paper's dtype
            dtype = "fp16" if stage.name == "paper" else asked.dtype
            assert args.resume and args.dtype in (dtype, [dtype])
            assert args.quick is quick if "quick" in args else True
            if stage.name == "op":
                suffix = "_fp16" if quick else ""
                assert stage.file == f"norm_linear{suffix}.json"
                shapes, tokens = args.cells[asked.dtype]
                assert tokens == (1, 7)
                cases = {shape.case: (shape.k, shape.n) for shape in shapes}
                assert cases["llama-3.2-1b.2048x3072"] == (2048, 3072)
                assert any(name.startswith("demo.") for name in cases)
            elif stage.name in ("ablation", "profile"):
                assert args.models == ["demo", "llama-3.2-1b"]
            elif stage.name in ("decode", "prefill"):
                assert args.models == ["demo", "llama-3.2-1b"] and args.levels == ["auto"]
                assert [g[0].model for wave in decode.waves(args) for g in wave]
        assert planned[3].argv != planned[4].argv
    assert stages.parse(shapes="2048x3072").what == ("op",)
    (only,) = stages.plan(stages.parse(shapes="64x96,2048x3072"))
    assert norm_linear.parse(list(only.argv)).cells["bf16"][0][0].case == "64x96"


def test_a_model_in_which_nothing_can_be_fused_is_refused(tmp_path, gpu):
    from transformers import GPT2Config

    place = tmp_path / "model"
    GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16).save_pretrained(place)
    assert stages.plan(stages.parse(model=[str(place)], what="op"))  # LayerNorm, too, is fused
    (place / "config.json").write_text('{"model_type": "no-such-type"}')
    done = call("--model", str(place), "--what", "op")
    assert done.exit_code == 2 and "no model config found" in done.stderr
    assert not gpu.exists()


class Backend:
    def capture(self, fn, calls, rotations):
        fn(0)
        return calls

    def time_ms(self, handles):
        return [calls * 0.06 for calls in handles]


def test_the_operation_is_measured_for_real_but_for_the_clock(gpu, monkeypatch):
    """norm_linear itself under the command, resumed; the picture of it is drawn."""
    monkeypatch.undo()
    monkeypatch.chdir(gpu.parents[1])
    true_case = norm_linear.Case
    for name in ("require_gpu", "copy_tb_s", "matmul_tflops"):
        monkeypatch.setattr(measure, name, lambda: 4.0)
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: None)
    monkeypatch.setattr(runtime, "device_facts", lambda index: Device("cpu"))
    monkeypatch.setattr(results, "header", lambda **rates: {**HEAD, **rates})
    monkeypatch.setattr(measure, "CudaBackend", Backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "NVIDIA H200")
    facts = types.SimpleNamespace(L2_cache_size=1000, total_memory=1 << 33)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(norm_linear, "_JOBS", 1)
    cells: list[int] = []

    def case(shape, **more):
        cells.append(shape.n)
        return true_case(shape, device="cpu", **more)

    monkeypatch.setattr(norm_linear, "Case", case)
    words = ["--shapes", "320x64,320x96", "--tokens", "1,4", "--quick"]
    done = call(*words)
    assert done.exit_code == 0, done.output
    found = results.load(gpu / "norm_linear.json")
    assert [(r["n"], r["m"]) for r in found.records] == [(64, 1), (64, 4), (96, 1), (96, 4)]
    assert found.header["goals"] and all(r["contract_ok"] for r in found.records)
    assert list((gpu / "figures").glob("*.svg")), done.output
    assert cells == [64, 96]
    monkeypatch.setattr(plots, "draw", lambda paths, out, say: [])
    assert call(*words[:3], "1,4,8", "--quick").exit_code == 0
    assert cells == [64, 96, 64, 96]
    assert len(results.load(gpu / "norm_linear.json").records) == 6


def test_bars_show_stages_and_the_best(tmp_path, monkeypatch):
    """On a terminal: lines go to the log, a bar a stage tells how far it is."""
    with (tmp_path / "log").open("w") as log:
        shown = display.Bars(log, ["op", "decode"])
        try:
            with report.shown_on(shown):
                shown.stage(1, 2, "op")
                for _ in report.progress([1, 2], "op"):
                    report.say("a cell")
                    report.found([record(1, 2.0)])
                op, decode = shown._bars.tasks
                assert (op.completed, op.total) == (2, 2) and "2.00x a.qkv" in op.fields["best"]
                assert not decode.started
                shown.stage(2, 2, "decode")
                assert decode.started
        finally:
            shown.end()
        assert decode.finished
    assert (tmp_path / "log").read_text().count("a cell") == 2


def test_the_speedup_of_each_kind_of_record():
    assert summary.speedup({"speedup": 1.5}) == 1.5
    both = {"graph": 2.0, "compiled": 0.8}  # over the fastest stock one, 0.8
    assert summary.speedup({"speedups": both}) == 0.8
    assert summary.speedup({"reduction": 0.5}) == 2.0
    assert summary.speedup({"rung": "stock", "speedup": 1.0}) is None
    assert summary.speedup({"speedup": 1.5, "error": "wrong"}) is None
    assert summary.speedup({"speedups": {}}) is None
    assert summary.best([]) == "" and summary.best([record(1, 1.0), record(2, 3.0)]).startswith("3")
