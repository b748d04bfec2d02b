"""flashnorm verify MODEL --generate: output, files, picture, exit codes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import late_reads
import numpy as np
import pytest
from late_reads import as_a_user_runs_it  # noqa: F401  (a fixture of every test here)
from tiny_models import tiny_model
from torch import nn
from typer.testing import CliRunner

import flashnorm_triton as fn
from flashnorm_triton.cli import app
from flashnorm_triton.lag import picture


def call(*args: str):
    return CliRunner().invoke(app, ["verify", *args], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("mistral").save_pretrained(path)
    return path


def test_a_clean_model_and_its_files(tmp_path: Path) -> None:
    done = call("demo", "--generate", "24", "--sites", "--out", str(tmp_path / "new" / "folder"))
    assert done.exit_code == 0, done.output
    assert "no lag, nothing beyond rounding" in done.output
    assert "64 tokens of the text" in done.output and "27 places" in done.output
    out = tmp_path / "new" / "folder"
    told = json.loads((out / "lag.json").read_text())
    assert told["clean"] and told["tokens"] == 24 == len(told["steps"]["at_t"])
    assert (out / "lag.png").read_bytes()[:4] == b"\x89PNG" and (out / "lag.svg").is_file()


def test_a_fault_ends_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashnorm_triton.lag import trio

    real = trio.patch

    def faulty(model: nn.Module):
        handle = real(model)
        eps = model.config.rms_norm_eps
        late_reads.stale_scale(model.model.layers[1].input_layernorm, {9}, eps)
        return handle

    monkeypatch.setattr(trio, "patch", faulty)
    done = call(str(folder), "--generate", "20", "--sites", "--dtype", "bfloat16", "--out",
                str(tmp_path))  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "64 random tokens a row (the model has no tokenizer)" in done.output
    text = " ".join(done.output.split())
    assert "LAG, first at step 9, row 0, output of model.layers.1.input_layernorm" in text
    assert json.loads((tmp_path / "lag.json").read_text())["lag"]["layer"] == 1
    done = call(str(folder), "--generate", "20", "--dtype", "bfloat16")
    if done.exit_code:  # seen in the logits as well: then it says how to see more
        assert "--layers" in done.output


def test_prompts_of_different_lengths_are_rows() -> None:
    done = call(
        "demo", "--generate", "6", "--prompt", "def f(x):\n    return", "--prompt", "import"
    )
    assert done.exit_code == 2 and "prompt 2 has 1 tokens" in done.output
    done = call(
        "demo", "--generate", "6", "--prompt", "def f(x):\n    return", "--prompt", "import os"
    )
    assert done.exit_code == 0 and "6 tokens in 2 rows" in done.output, done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of the two"),
        (("other", "--generate", "9"), "one of the two"),
        (("--generate", "9", "--dtype", "int8"), "--dtype int8"),
        (("--generate", "9", "--rows", "0"), "--rows 0"),
        (("--generate", "9", "--mode", "fast"), "mode='fast'"),
        (("--generate", "1"), "tokens=1"),
        (("--generate", "9999"), "the model has 256"),
        (("--generate", "9", "--prompt", "words"), "no tokenizer"),
        (("--generate", "9", "--text", "absent.txt"), "absent.txt"),
    ],
)
def test_what_cannot_be_done(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = call(str(folder), *words)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output


def test_a_model_that_is_not_there() -> None:
    done = call("./nowhere", "--generate", "9")
    assert done.exit_code == 2 and "nowhere" in done.output


def test_the_picture_shows_one_step_of_thousands(tmp_path: Path, monkeypatch) -> None:
    """A single step keeps a column of its own, however many there are; the worst of each counts."""
    values = np.full(5000, 0.1)
    values[3333] = 7.0
    starts, drawn = picture._extremes(values, np.max)
    assert len(drawn) <= 1200 and drawn.max() == 7.0 and abs(starts[drawn.argmax()] - 3333) < 5
    report = fn.find_lag(tiny_model("llama", eos_token_id=None), tokens=30, repeats=False)
    png, svg = picture.draw(report, tmp_path / "figure.any")
    first = svg.read_bytes()
    assert png.name == "figure.png" and svg.name == "figure.svg"
    assert picture.draw(report, tmp_path / "figure.any")[1].read_bytes() == first
