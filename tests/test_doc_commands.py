"""Every command and snippet of README, docs/ and the other pages is run, or parsed at the least.

A command is (1) run here, on a tiny model; (2) parsed by its own parser, when ``RUN_ELSEWHERE``
says where it is run or what it needs; or (3) not the project's: ``OTHERS`` says why. Anything else
fails, so a new command in a page needs a decision, and a renamed option turns the page red.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from doc_snippets import PAGES, ROOT, Command, commands, python_blocks, spans
from tiny_models import tiny_model, token_ids
from typer.testing import CliRunner

import flashnorm_triton as fn
from flashnorm_triton.cli import app

# flashnorm's commands that are run here as they stand, where path/to/model is a tiny Llama.
RUN = (
    "flashnorm audit path/to/model",
    "flashnorm fold path/to/model path/to/folded --verify",
    "flashnorm info",
    "flashnorm info --model path/to/model",
    "flashnorm info --shapes 2048:3072 --dtype bf16,fp16 --epilogue silu+gated",
    "flashnorm --version",
)
# The others are parsed here, and run elsewhere or nowhere, for this reason:
RUN_ELSEWHERE = {
    "flashnorm audit": "tests/test_cli.py runs it on the shipped model and on model types",
    "flashnorm demo": "tests/test_demo.py runs it",
    "flashnorm fold": "tests/test_fold*.py run it; --push needs a hub",
    "flashnorm verify": "tests/test_fold*.py and tests/test_lag*.py run it; --device cuda: a GPU",
    "flashnorm plot": "tests/test_plots.py runs it",
    "flashnorm bench": "needs a GPU; tests/test_bench_command.py: all around it",
    "flashnorm tune": "needs a GPU; tests/test_tune_command.py runs it on one that is played",
}
OTHERS = {
    "./run": "tests/test_run_script.py",
    "./run help": "tests/test_run_script.py",
    "./run lint": "CI",
    "./run notebooks": "tests/test_notebooks.py",
    "./run notebooks 1 4 --out out": "tests/test_notebooks.py",
    "./run test": "this is it",
    "./run gpu-test": "a GPU; tests/test_run_script.py: its refusal without one",
    "./run gpu-soak": "a GPU; tests/test_run_script.py: its refusal without one",
    "./run flashnorm": "the program's name",
    "./run python": "the program's name",
    "flashnorm": "the program's name",
    "pip install .": "tests/test_packaging.py installs the package",
    "apt install gcc python3-dev": "the system's",
    "cp -r": "the system's",
    "git ls-files -s flashnorm_triton/kernels flashnorm_triton/ops.py": "tests/test_results.py",
    "git hash-object --stdin": "tests/test_results.py",
    "vllm serve path/to/folded": "an engine that needs a GPU and a build of its own",
    "python -m sglang.launch_server --model-path path/to/folded": "likewise",
}
PLACEHOLDERS = {
    "SRC": "path/to/model", "DST": "path/to/folded", "MODEL": "demo", "FOLDED": "demo",
    "N": "8", "TOKENS": "8", "TYPE": "llama", "FILE": "a.png", "DIR": "out",
    "NEW_FOLDER": "out",
}  # fmt: skip
ALL = [command for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder one is in: it has a tiny model in path/to/model."""
    shutil.copytree(saved, tmp_path / "path" / "to" / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def dry() -> typer.Typer:
    """flashnorm's commands with their own parsers, and nothing behind them."""
    stand_in = typer.Typer(add_completion=False)
    stand_in.callback()(app.registered_callback.callback)

    def nothing(command: Any) -> Any:
        @functools.wraps(command)
        def parsed(**arguments: Any) -> None:
            typer.echo(f"parsed {len(arguments)}")

        return parsed

    for info in app.registered_commands:
        stand_in.command(info.name or info.callback.__name__)(nothing(info.callback))
    return stand_in


def plain(command: Command) -> list[str]:
    """The words of a command as one may type them: what is left open filled in, brackets gone."""
    words = [re.sub(r"[\[\]]", "", word) for word in command.words]
    words = [PLACEHOLDERS.get(word, word) for word in words if word not in ("...", "…", "")]
    return words[1:] if words[:2] == ["./run", "flashnorm"] and words[2:] else words


def run_line(words: list[str]) -> bool:
    """Whether ``./run``'s first word is a command of the script."""
    script = (ROOT / "run").read_text(encoding="utf-8")
    return re.search(rf"^{re.escape(words[1])}[ )|]", script, re.M) is not None


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command(
    command: Command, place: Path, dry: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = plain(command)
    line = " ".join(words)
    if words[0] == "./run" and len(words) > 1:
        assert run_line(words), f"./run has no command {words[1]}"
        if words[1] == "demo":
            words = ["flashnorm", *words[1:]]
        elif words[1] == "test" and len(words) > 2:
            assert (ROOT / words[2]).exists()
            return
        elif words[1] == "python" and len(words) > 2:
            words = words[1:]
    if line in OTHERS:
        return
    if " ".join(words) in RUN:
        done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "160"})
        assert done.exit_code == 0, done.output
    elif words[0] == "flashnorm":
        parse(command, words[1:], dry)
    elif words[0].startswith("python"):
        if command.inline and "NAME" in line:
            return  # stands for any of them
        script(words[1:], monkeypatch)
    else:
        pytest.fail(f"{command}: add it to RUN, RUN_ELSEWHERE or OTHERS, with a reason")


def parse(command: Command, words: list[str], dry: typer.Typer) -> None:
    """Put the words to flashnorm's parser. Inline ones may name a command and an option alone."""
    name = words[0]
    if name == "COMMAND":
        return
    known = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}
    assert name in known, f"flashnorm has no command {name}"
    if command.inline and all(word.startswith("-") for word in words[1:]):
        spelled = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).output
        assert all(word in spelled for word in words[1:]), command
        return
    assert f"flashnorm {name}" in RUN_ELSEWHERE, f"{command}: run it here, or say where it is run"
    done = CliRunner().invoke(dry, words)
    assert done.exit_code == 0, f"{command}: {done.output}"


class Parsed(Exception):
    """The script's own parser took the words."""


def script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the words to the parser of a script (its file, or -m and its module)."""
    if words[0] == "-m":
        module, words = importlib.import_module(words[1]), words[2:]
    else:
        path = ROOT / words[0]
        assert path.exists(), words
        if path.parent.name != "bench":
            return  # docs/upstream_race.py is run below
        monkeypatch.syspath_prepend(str(ROOT))
        module, words = importlib.import_module(f"bench.{path.stem}"), words[1:]
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        parse_args(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *words])
    takes = inspect.signature(module.main).parameters
    with pytest.raises(Parsed):
        module.main(words) if takes else module.main()


def test_the_lists_name_nothing_that_is_gone() -> None:
    lines = {" ".join(plain(command)) for command in ALL}
    assert [line for line in (*RUN, *OTHERS) if line not in lines] == []
    for reason in RUN_ELSEWHERE.values():
        for file in re.findall(r"tests/[\w*]+\.py", reason):
            assert list(ROOT.glob(file)), file


def test_the_race_compiles_as_its_page_says() -> None:
    """docs/upstream_race.py, in a process of its own: in this one Triton interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "upstream_race.py")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "upstream_race.md").read_text(encoding="utf-8")
    told = re.findall(r"^\d stages: slots .*$", page, re.M)
    depths = [re.findall(r"'(\d)'", line) for line in told]
    assert depths == [re.findall(r"'(\d)'", line) for line in done.stdout.splitlines()[1:4]]
    assert len(depths) == 3


# What the pages' Python finds ready: a model, inputs, an engine. Where a call needs a GPU or hours,
# these arguments take the place of the page's.
SMALLER = {"find_lag": {"tokens": 12, "mode": "eager"}}


class Names(dict):
    """The names that snippets may use, made when asked for; the page's own assignments stay."""

    def __missing__(self, name: str) -> Any:
        make = MADE.get(name)
        if make is None:
            raise KeyError(name)
        self[name] = make()
        return self[name]


class Engine:
    """Stands for a serving engine that loads models."""

    def load_model(self) -> Any:
        return tiny_model("llama")


def given(width: int) -> torch.Tensor:
    return torch.randn(3, width)


MADE = {
    "fn": lambda: shrunk(),
    "model": lambda: tiny_model("llama"),
    "inputs": lambda: {"input_ids": token_ids(1, 5), "max_new_tokens": 2},
    "prompt": lambda: token_ids(1, 6),
    "engine": Engine,
    "x": lambda: given(32),
    "weight": lambda: torch.randn(24, 32),
    "gate_up": lambda: torch.randn(48, 32),
    "sums": lambda: torch.randn(24),
    "r": lambda: given(24),
    "eps": lambda: 1e-6,
    "bias": lambda: torch.randn(24),
    "gain": lambda: torch.randn(32),
}  # fmt: skip


def shrunk() -> Any:
    """The package, with the long calls of SMALLER made short once their arguments fit."""

    class Package:
        def __getattr__(self, name: str) -> Any:
            value = getattr(fn, name)
            if name not in SMALLER:
                return value

            def call(*args: Any, **kwargs: Any) -> Any:
                inspect.signature(value).bind(*args, **kwargs)
                return value(*args, **{**kwargs, **SMALLER[name]})

            return call

    return Package()


WITH_PYTHON = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, place: Path) -> None:
    """All blocks of a page, one after the other; each block with the names of those before it."""
    names = Names()
    for block in python_blocks(page):
        text = block.replace("import flashnorm_triton as fn\n", "")
        exec(compile(text, str(page), "exec"), names)  # what the pages tell people to run


def calls(page: Path) -> list[ast.Call]:
    """The calls of ``fn.`` names in a page's inline code, what is left open taken out."""
    found = []
    for span in spans(page):
        if span.startswith(("fn.", "flashnorm_triton.", "with fn.")):
            source = span.replace("=...", "=None").removeprefix("with ").removesuffix(": ...")
            source = source.replace(", ...", "").replace("(..., ", "(")
            tree = ast.parse(source.replace("...", ""), mode="eval")
            found += [
                node for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Attribute))
            ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_the_text_are_there(page: Path) -> None:
    """``fn.name`` is a name of the package, and a call's keywords are its parameters."""
    for node in calls(page):
        call = isinstance(node, ast.Call)
        text = ast.unparse(node.func if call else node).replace("flashnorm_triton.", "fn.")
        value: Any = fn
        for name in text.split(".")[1:]:
            if isinstance(value, type(fn)) and not hasattr(value, name):
                value = importlib.import_module(f"{value.__name__}.{name}")
            else:
                value = getattr(value, name)
        if call:
            known = inspect.signature(value).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
            keywords = [keyword.arg for keyword in node.keywords]
            assert takes_any or set(keywords) <= set(known), (text, keywords)


PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells of what was


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_files_and_variables_in_the_text_are_there(page: Path) -> None:
    sources = "".join(path.read_text("utf-8") for path in ROOT.glob("flashnorm_triton/**/*.py"))
    sources += (ROOT / "run").read_text("utf-8")
    for span in spans(page):
        if re.fullmatch(r"(tests|bench|docs|notebooks|flashnorm_triton)/[\w./*]+\w", span):
            assert "NAME" in span or list(ROOT.glob(span)), span
        for variable in re.findall(r"\bFLASHNORM_[A-Z]+\b", span):
            tests = "".join(p.read_text("utf-8") for p in ROOT.glob("tests/*fuzz*.py"))
            assert variable in sources + tests, variable
