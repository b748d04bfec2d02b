"""The command line: what it prints, its exit codes, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig
from typer.testing import CliRunner

from flashnorm_triton import __version__
from flashnorm_triton.cli import app
from flashnorm_triton.demo import run

ROOT = Path(__file__).resolve().parents[1]


def call(*args: str):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "160"})


def test_help_names_every_command_and_stays_light() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom flashnorm_triton.cli import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("demo", "audit", "tune", "info"))


def test_version() -> None:
    assert call("--version").output == f"flashnorm_triton {__version__}\n"


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashnorm_triton.cli", "no-such-command"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 2 and "no-such-command" in done.stderr


@pytest.mark.parametrize("passed", [True, False])
def test_demo_exit_code_is_the_checks(passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def stand_in(device, out, console):
        seen.update(device=device, out=out)
        return passed

    monkeypatch.setattr(run, "run", stand_in)
    assert call("demo", "--out", "x.png", "--device", "cpu").exit_code == (0 if passed else 1)
    assert seen == {"device": "cpu", "out": Path("x.png")}


def test_demo_that_cannot_run_exits_with_2() -> None:
    done = call("demo", "--out", "picture.jpg")
    assert done.exit_code == 2 and "picture.jpg" in done.output
    assert "Traceback" not in done.output


def test_audit_of_the_shipped_model() -> None:
    done = call("audit", "demo")
    assert done.exit_code == 0, done.output
    assert "q_proj, k_proj, v_proj" in done.output and "gate_proj, up_proj" in done.output
    report = json.loads(call("audit", "demo", "--json").output)
    assert report["norms"] == 13 and report["fused"] >= 12
    first = report["sites"][0]
    assert first["norm"] == "model.layers.0.input_layernorm" and first["decision"] == "fuse"


def test_audit_reads_a_folder_without_weights(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).save_pretrained(tmp_path)  # 9 billion parameters, none of them stored
    done = call("audit", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["norms"] == 17


def test_audit_of_a_model_type_needs_no_files() -> None:
    report = json.loads(call("audit", "--model-type", "gpt2", "--layers", "3", "--json").output)
    assert (report["model_class"], report["norms"], report["fused"]) == ("GPT2LMHeadModel", 7, 6)
    done = call("audit", "--model-type", "gpt2", "--head")
    assert done.exit_code == 0 and "5 norms, 5 fused" in " ".join(done.output.split())


def _decided(*arguments: str) -> dict[str, str]:
    done = call("audit", *arguments, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    decisions = {site["norm"]: site["decision"] for site in report["sites"]}
    for decision, count in report["decisions"].items():
        assert list(decisions.values()).count(decision) == count
    return decisions


@pytest.mark.parametrize("how", ["exact", "fast"])
def test_audit_says_what_cancelling_and_the_head_would_do(how: str) -> None:
    norm, layer = "model.norm", "model.layers.0.input_layernorm"
    qwen3 = ("--model-type", "qwen3", "--layers", "1")
    plain, head = _decided(*qwen3), _decided(*qwen3, "--head")
    dropped = _decided(*qwen3, "--cancel", how)
    both = _decided(*qwen3, "--head", "--cancel", how)
    assert (plain[norm], head[norm], dropped[norm], both[norm]) == (
        "norm_only", "fuse", "norm_only", "fuse",
    )  # fmt: skip
    assert (plain[layer], head[layer], dropped[layer], both[layer]) == (
        "fuse", "fuse", "partial", "partial",
    )  # fmt: skip
    done = call("audit", *qwen3, "--cancel", how)
    assert done.exit_code == 0 and "1 dropped in part" in " ".join(done.output.split())


def test_audit_of_fewer_layers_of_a_model(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=96, num_attention_heads=4, rms_norm_eps=3e-5).save_pretrained(tmp_path)
    report = json.loads(call("audit", str(tmp_path), "--layers", "1", "--json").output)
    assert report["norms"] == 3 and report["sites"][0]["eps"] == 3e-5


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "give a MODEL or a --model-type"),
        (("demo", "--model-type", "llama"), "one of the two"),
        (("--model-type", "lamma"), "no model type 'lamma'"),
        (("demo", "--cancel", "slow"), "--cancel slow: give exact or fast, or leave it out"),
    ],
)
def test_audit_of_nothing_that_is_known(arguments: tuple[str, ...], words: str) -> None:
    done = call("audit", *arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.split())


def test_audit_errors_name_the_value_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "bert").mkdir()
    BertConfig(model_type="no-such-type").save_pretrained(tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    config["model_type"] = "no-such-type"
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    for argument, words in (
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "absent"), "no folder"),
        (str(tmp_path / "file.txt"), "is a file"),
        (str(tmp_path / "broken"), "no model config found"),
        (str(tmp_path / "bert"), "no model config found"),
        ("some-owner/some-model", "hub id that this machine can reach"),
    ):
        done = call("audit", argument)
        assert done.exit_code == 2, (argument, done.output)
        text = " ".join(done.output.split())
        assert words in text and argument in text, text
        assert "Traceback" not in text


def test_a_model_with_code_of_its_own_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal, and run the folder's code at a yes."""
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('the code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 1)
    result = call("audit", str(tmp_path))
    assert result.exit_code == 2
    assert "custom code" in result.output and "given to flashnorm_triton.audit" in result.output


def test_info_says_what_runs_here() -> None:
    done = call("info")
    assert done.exit_code == 0, done.output
    for words in (__version__, "torch", "Triton kernels:"):
        assert words in done.output
    assert ("norm_linear runs in plain torch" in done.output) != ("Plans on" in done.output)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch and runtime as they answer on an H200, and no table of the user's."""
    import torch

    from flashnorm_triton import runtime, tables
    from flashnorm_triton.plans import Device

    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: None)
    monkeypatch.setattr(runtime, "device_facts", lambda index: Device("cuda", 90, 132, True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    tables.forget()


def test_info_shows_the_cells_one_asks_for(an_h200: None, tmp_path: Path) -> None:
    output = call("info", "--shapes", "576:960,40:48", "--dtype", "bf16,fp16").output
    assert "shipped: nvidia_h200.json" in output and "your table: none" in output
    assert "40 → 48 float16" in output and "no table has this cell" in output
    assert "centred" in call("info", "--shapes", "64:64", "--epilogue", "centred").output
    from flashnorm_triton.demo_model import FOLDER

    config = json.loads((FOLDER / "config.json").read_text())
    assert f"{config['hidden_size']} → " in call("info", "--model", str(FOLDER)).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shapes", "64"), "'64' is no shape"),
        (("--shapes", "1:1", "--model", "m"), "not both"),
        (("--dtype", "int4"), "'int4'"),
        (("--epilogue", "tanh"), "'tanh' is no epilogue"),
        (("--model", "./nowhere"), "no file or folder"),
    ],
)
def test_info_names_what_it_cannot_read(words: tuple[str, ...], message: str) -> None:
    done = call("info", *words)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.gpu
def test_info_on_a_gpu_names_it_and_its_plans() -> None:
    import torch

    output = call("info").output
    assert torch.cuda.get_device_name() in output and "Triton kernels: used" in output
    assert "gemv" in output and "unfused" in output


def test_info_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason a GPU's kernels are not used reaches the reader."""
    from flashnorm_triton import runtime

    reason = "Triton needs a C compiler (apt install gcc, or set CC)"
    monkeypatch.setattr(runtime, "triton_unavailable", lambda: reason)
    assert f"Triton kernels: not used, {reason}" in call("info").output
