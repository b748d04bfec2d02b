"""The wheel: complete, importable from elsewhere, with one version and pinned dependencies."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import flashnorm_triton

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "heldout.txt", "MODEL_CARD.md")


SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
           "CITATION.cff", "constraints.txt")  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    for name in ("build", "setuptools", "pip"):
        try:  # not find_spec: looking for pip so takes setuptools' distutils from this process
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"building a wheel needs {name} in this environment")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    # A copy: setuptools leaves its build folders beside the sources.
    trees = [*(ROOT / "flashnorm_triton").rglob("*"), *RESULTS.rglob("*")]
    for path in [*(ROOT / name for name in SOURCES), *trees]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def called(command: Sequence[str | Path], cwd: Path) -> str:
    """What a command says in a folder outside the clone, with nothing of the clone on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"FLASHNORM_CACHE_DIR": str(cwd / "cache"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    kept.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=cwd, env=kept, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``flashnorm`` of a new virtual environment: the wheel, and this environment's libraries."""
    place = tmp_path_factory.mktemp("elsewhere")
    environment = place / "environment"
    venv.create(environment, system_site_packages=False, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    # The libraries are those of this environment, less its own installation of the package.
    libraries = [entry for entry in site_folders() if entry.is_dir()]
    (packages / "libraries.pth").write_text("".join(f"{entry}\n" for entry in libraries))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    called([*pip, "--no-index", "--disable-pip-version-check", "--ignore-installed", wheel], place)
    return environment / "bin" / "flashnorm"


def site_folders() -> list[Path]:
    return [Path(entry) for entry in site.getsitepackages()]


def test_the_installed_command_works_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    told = called([installed, "info"], tmp_path)
    assert f"flashnorm_triton {flashnorm_triton.__version__} on Python" in told


def test_the_installed_package_draws_its_results_and_patches_its_model(
    installed: Path, tmp_path: Path
) -> None:
    """Every bench imported, plot, then the main job on the shipped model; one process, for
    libraries load slowly; and without Triton, as where it cannot be installed."""
    program = """
        import importlib, pkgutil, sys
        sys.modules["triton"] = None
        import flashnorm_triton
        import flashnorm_triton.bench as benches
        for found in pkgutil.iter_modules(benches.__path__):
            importlib.import_module(f"flashnorm_triton.bench.{found.name}")
        from flashnorm_triton import cli, results
        print(flashnorm_triton.__file__, results.shipped_folder(), len(results.shipped_results()))
        cli.app(["plot", "--out", "pictures"], standalone_mode=False)
        print("patched")
        import torch
        from flashnorm_triton import demo_model
        model, tokens = demo_model.load(), demo_model.tokenizer()("def f(x):", return_tensors="pt")
        with torch.no_grad():
            stock = model(**tokens).logits
            handle = flashnorm_triton.patch(model)
            ours = model(**tokens).logits
        print(len(handle.report.fused), float((ours - stock).norm() / stock.norm()))
    """
    python = installed.parent / "python"
    told = called([python, "-c", textwrap.dedent(program)], tmp_path)
    before, _, after = told.partition("patched\n")
    (file, folder, count), *drawn = (line.split() for line in before.splitlines())
    assert Path(file).is_relative_to(installed.parents[1])
    assert Path(folder) == Path(file).parent / "shipped_results"
    assert int(count) == len(list((RESULTS / "nvidia_h200").glob("*.json")))
    assert (tmp_path / "pictures" / "norm_linear.svg").is_file()
    assert all((tmp_path / path).is_file() for (path,) in drawn)
    sites, error = after.split()
    assert int(sites) > 0 and 0 <= float(error) < 0.02


def test_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {*SOURCES, "bench/results/nvidia_h200/norm_linear.json"} <= names
    assert not [name for name in names if name.endswith((".pyc", ".old"))]


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == flashnorm_triton.__version__
    assert cited["license"] == "Apache-2.0" and cited["cff-version"] == "1.2.0"
    (paper,) = cited["references"]
    assert paper["url"] == "https://arxiv.org/abs/2407.09577"
    assert [author["family-names"] for author in paper["authors"]][0] == "Graef"
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changes or f"## [{flashnorm_triton.__version__}]" in changes


def test_wheel_holds_every_module_and_the_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "flashnorm_triton").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for name in MODEL_FILES:
        assert f"flashnorm_triton/demo_model/{name}" in names
    for path in RESULTS.glob("*/*.json"):
        name = path.relative_to(RESULTS).as_posix()
        assert f"flashnorm_triton/shipped_results/{name}" in names
    for path in (ROOT / "flashnorm_triton").rglob("*.json"):
        assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "docs/"))]
    assert wheel.stat().st_size < 6_000_000


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert f"\nVersion: {flashnorm_triton.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.10\n" in text
    _, _, readme = text.partition("\n\n")
    assert readme.startswith("# flashnorm_triton") and "Content-Type: text/markdown" in text
    assert not re.search(r"\]\((?!https?:)", readme)  # relative links lead nowhere on its page
    (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    assert "flashnorm = flashnorm_triton.cli:app" in archive.read(entry).decode()
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def requirements() -> list[str]:
    """Names of the package's and its tests' direct dependencies, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = r"^(?:dependencies|test|notebooks|dev) = \[(.*?)\]$"
    lists = re.findall(listed, text, flags=re.M | re.S)
    names = re.findall(r'"([A-Za-z0-9_-]+)', "".join(lists))
    return [name for name in names if name != "flashnorm-triton"]


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_constraints_pin_every_requirement_once(version: str) -> None:
    markers = pytest.importorskip("packaging.markers")
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        pin, _, marker = line.partition(";")
        if marker and not markers.Marker(marker).evaluate({"python_version": version}):
            continue
        name, exact, number = pin.partition("==")
        assert exact and number.strip(), f"not an exact pin: {line!r}"
        assert name.lower() not in pins, f"{name} is pinned twice for Python {version}"
        pins[name.lower()] = number.strip()
    assert len(requirements()) >= 11
    for name in requirements():
        assert name.lower() in pins, f"{name} has no pin for Python {version}"


def test_heldout_text_comes_with_its_licence() -> None:
    text = (ROOT / "flashnorm_triton" / "demo_model" / "heldout.LICENSE.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
