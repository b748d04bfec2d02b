"""The wheel: complete, importable from elsewhere, with one version and pinned dependencies."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashnorm_triton

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "heldout.txt", "MODEL_CARD.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel needs setuptools and pip in this environment")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # A copy: setuptools leaves its build folders beside the sources.
    listed = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for path in [*listed, *(ROOT / "flashnorm_triton").rglob("*")]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_the_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "flashnorm_triton").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for name in MODEL_FILES:
        assert f"flashnorm_triton/demo_model/{name}" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]
    assert wheel.stat().st_size < 6_000_000


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert f"\nVersion: {flashnorm_triton.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.10\n" in text
    (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    assert "flashnorm = flashnorm_triton.cli:app" in archive.read(entry).decode()
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def test_model_loads_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import flashnorm_triton.demo_model as d\n"
        "print(d.FOLDER)\nprint(d.load().num_parameters(), len(d.tokenizer()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(tmp_path / "site" / "flashnorm_triton" / "demo_model"),
        "1853056",
        "2048",
    ]


def requirements() -> list[str]:
    """Names of the package's and its tests' direct dependencies, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|test|dev) = \[(.*?)\]$", text, flags=re.M | re.S)
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
