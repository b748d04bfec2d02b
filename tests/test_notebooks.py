"""The notebooks: they run on this machine, what they keep is what their code prints, and neither
outputs nor text say anything that only one machine, one hour or nobody could know."""

from __future__ import annotations

import base64
import importlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashnorm_triton.cli import app

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = "the extra 'notebooks' is not installed"
nbformat = pytest.importorskip("nbformat", reason=WITHOUT)
pytest.importorskip("nbclient", reason=WITHOUT)
pytest.importorskip("ipykernel", reason=WITHOUT)
sys.path.insert(0, str(ROOT / "notebooks"))
run_notebooks = importlib.import_module("run_notebooks")

PATHS = run_notebooks.notebooks()
MOST_BYTES = 300_000
# Cells that show the repository's result files; that do where there is no GPU, and measure on one;
# and whose words a CPU's rounding may change.
RESULTS, MEASURES, VARIES = "gpu-results", "gpu-measures", "varies"
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def kept(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def code(node: Any) -> list[Any]:
    return [cell for cell in node.cells if cell.cell_type == "code"]


def markdown(node: Any) -> str:
    return "\n\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")


def printed(cell: Any) -> str:
    """All text among a cell's outputs."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts.append(output.get("text", ""))
        parts += [text for kind, text in data.items() if kind.startswith("text/")]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def executed() -> Iterator[Callable[[Path], Any]]:
    """The notebook as it runs here, each once, all in one process."""
    done: dict[Path, Any] = {}
    with run_notebooks.kernel() as kernel:

        def run(path: Path) -> Any:
            if path not in done:
                done[path] = None  # a failure is told once
                done[path] = kernel.execute(path)
            return done[path] or pytest.fail(f"{path.name} failed before")

        yield run


def test_there_are_four() -> None:
    names = ["1_algebra", "2_patch", "3_tune_and_plot", "4_spoke_backwards"]
    assert [path.stem for path in PATHS] == names


@every_notebook
def test_it_runs_without_a_complaint(path: Path, executed: Callable[[Path], Any]) -> None:
    for cell in code(executed(path)):
        for output in cell.outputs:
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output.text


def words(text: str) -> str:
    """Text without its numbers, and without the spaces that depend on their widths."""
    return " ".join(re.sub(r"-?\d[\w.+%]*(-\d+)?", "#", text).split())


@every_notebook
def test_what_is_kept_is_what_the_code_prints(path: Path, executed: Callable[[Path], Any]) -> None:
    before, after = kept(path), executed(path)
    same_device = before.metadata[run_notebooks.GPU] == after.metadata[run_notebooks.GPU] == ""
    for cell, now in zip(code(before), code(after), strict=True):
        kinds = [[sorted(o.get("data", o.output_type)) for o in one.outputs] for one in (cell, now)]
        assert kinds[0] == kinds[1], cell.source
        if RESULTS in tags(cell):
            assert printed(cell) == printed(now), "./run notebooks: results have changed"
        elif same_device and VARIES not in tags(cell):
            assert words(printed(cell)) == words(printed(now)), cell.source


@every_notebook
def test_form(path: Path) -> None:
    node = kept(path)
    nbformat.validate(node)
    text = path.read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert text == nbformat.writes(run_notebooks.tidy(node)) + "\n", "./run notebooks writes it"
    assert node.cells[0].source.startswith("# ") and node.cells[-1].cell_type == "markdown"
    assert sum(bool(cell.outputs) for cell in code(node)) > len(code(node)) * 2 / 3


@every_notebook
def test_pictures(path: Path) -> None:
    from PIL import Image

    pictures = 0
    for cell in code(kept(path)):
        for output in cell.outputs:
            if "image/png" not in output.get("data", {}):
                continue
            pictures += 1
            picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
            assert 800 <= picture.width <= 1400 and picture.convert("RGB").getcolors(20) is None
            assert len(output.metadata["image/png"]["alt"]) > 20
    assert pictures


MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|var|mnt|Users)/|[A-Z]:\\\\|\bfile://|site-packages|"
    r"ipykernel_\d|Warning:|Traceback|0x[0-9a-f]{6,}|\bW\d{4} \d\d:|\x1b\["
)
DURATION = re.compile(r"(?<![\w.])\d+(?:\.\d+)?\s?(?:s|ms|µs|us|sec|seconds|min|minutes)\b|\dit/s")


@every_notebook
def test_nothing_of_a_machine_or_of_an_hour(path: Path) -> None:
    node = kept(path)
    for cell in node.cells:
        text = cell.source
        if cell.cell_type == "code":
            text += printed(cell)
            assert not re.search(r"%time|perf_counter|\btime\.", cell.source), cell.source
        assert not (found := MACHINE.search(text)), (found, text)
        assert str(Path.home()) not in text
        if not {RESULTS, MEASURES} & set(tags(cell)):
            shown = printed(cell) if cell.cell_type == "code" else cell.source
            assert not (found := DURATION.search(shown)), (found, shown)


def test_what_the_patterns_find() -> None:
    for bad in ("in /tmp/x", "see '/home/me/a'", "FutureWarning: old", "at 0x7f12ab34cd"):
        assert MACHINE.search(bad), bad
    for bad in ("took 3.2 s", "12ms", "(4 seconds)", "30.1it/s"):
        assert DURATION.search(bad), bad
    for good in ("bench/results", "path/to/model", "s(t-1)/s(t) 1.4, s", "8 launches"):
        assert not MACHINE.search(good) and not DURATION.search(good), good


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?(?!\w)")
# Names of things that have a number in them, formulas, code, addresses, and an item's own number
NO_FIGURES = re.compile(
    r"```.*?```|`[^`]*[A-Za-z_][^`]*`|\$\$.*?\$\$|\$[^$]+\$|\]\([^)]*\)|arXiv [\d.]+|"
    r"§[\d.]+|(?:proposition|corollary|issue|version|Qwen|Gemma|Llama-)\s?v?[\d.]+(?:-1B)?|"
    r"\bt − 1\b|\w+_\d\b|^\d+\. ",
    re.S | re.M,
)


@every_notebook
def test_numbers_in_the_text_are_printed_by_a_cell(path: Path) -> None:
    node = kept(path)
    shown = {found for cell in code(node) for found in NUMBER.findall(printed(cell))}
    told = NUMBER.findall(NO_FIGURES.sub(" ", markdown(node)))
    assert set(told) <= shown, set(told) - shown


@every_notebook
def test_links_and_commands(path: Path) -> None:
    text = markdown(kept(path))
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (path.parent / target).is_file(), target
    fenced = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.S))
    for line in [*re.findall(r"`(\./run [^`\n]+)`", text), *fenced.splitlines()]:
        program, name, *arguments = shlex.split(line)
        assert (program, name) == ("./run", "flashnorm"), line
        # --help stops it, once all options are known.
        done = CliRunner().invoke(app, [*arguments, "--help"])
        assert done.exit_code == 0 and "Usage" in done.output, (line, done.output)


def test_one_that_fails_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"1_right": "kept = 42\nprint(kept)", "2_wrong": "print(1)\nraise KeyError('lost')"}
    sources["3_after"] = "print('kept' in globals(), end='')\nprint(' still')"
    for name, source in sources.items():
        node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="some")])
        nbformat.write(node, tmp_path / f"{name}.ipynb")
    before = (tmp_path / "2_wrong.ipynb").read_bytes()
    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path)
    assert run_notebooks.main(["--out", str(tmp_path)]) == 1
    assert (tmp_path / "2_wrong.ipynb").read_bytes() == before
    texts = [printed(code(kept(tmp_path / f"{name}.ipynb"))[0]) for name in ("1_right", "3_after")]
    assert texts == ["42\n", "False still\n"]
    said = capsys.readouterr()
    assert "1_right.ipynb" in said.out and "KeyError" in said.err and "2_wrong" not in said.out
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"{name}.ipynb" for name in sources]
    with pytest.raises(SystemExit):
        run_notebooks.main(["9"])
    assert "no notebook 9" in capsys.readouterr().err
