"""``run``: set-up, its stamp, what it says when something is missing; with a stand-in Python."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Stands in for a system Python: answers the questions `run` asks, makes a venv whose python is
# this script again, and writes down every pip call.
FAKE = r"""#!/bin/sh
log="$FAKE_LOG"
case "$*" in
"-c import sys; sys.exit(not (3, 10)"*) exit "${FAKE_OLD:-0}" ;;
"-c import venv, ensurepip") exit "${FAKE_NO_VENV:-0}" ;;
"-c import sys; print("*) echo 3.11 ;;
--version) echo "Python 3.8.1" ;;
"-m venv "*)
    echo "venv" >>"$log"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\necho "flashnorm $*"\n' >"$3/bin/flashnorm"
    chmod +x "$3/bin/flashnorm"
    ;;
"-m pip install"*)
    echo "pip $*" >>"$log"
    [ -z "${FAKE_SLOW:-}" ] || sleep "$FAKE_SLOW"
    exit "${FAKE_PIP:-0}"
    ;;
"-m pytest"*) echo "pytest in $(pwd): $*" ;;
"-c import xdist") exit "${FAKE_NO_XDIST:-0}" ;;
"-c "*) exit 0 ;;
*) echo "python $*" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"  # the space is part of the test
    folder.mkdir()
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(FAKE)
    (programs / "python3").chmod(0o755)
    for tool in ("sh", "cat", "cksum", "dirname", "mkdir", "rm", "cp", "chmod", "sleep"):
        (programs / tool).symlink_to(shutil.which(tool))
    return folder


def environment(checkout: Path, **extra: str) -> dict[str, str]:
    own = {"PATH": str(checkout.parent / "bin"), "FAKE_LOG": str(checkout.parent / "log")}
    return {**own, **extra}


def call(checkout: Path, *args: str, cwd: Path | None = None, **extra: str):
    return subprocess.run(
        [str(checkout / "run"), *args],
        cwd=cwd or checkout.parent,
        env=environment(checkout, **extra),
        capture_output=True,
        text=True,
        timeout=60,
    )


def log(checkout: Path) -> list[str]:
    path = checkout.parent / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_first_call_sets_up_with_the_pins_and_the_second_does_not(checkout: Path) -> None:
    first = call(checkout, "demo", "--out", "a picture.png")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "flashnorm demo --out a picture.png\n"
    lines = log(checkout)
    assert lines[0] == "venv" and len(lines) == 3
    assert all(f"--constraint {checkout}/constraints.txt" in line for line in lines[1:])
    assert lines[2].endswith(f"--editable {checkout}[dev]")
    (checkout.parent / "bin" / "python3").unlink()  # once set up, it is not even looked for
    began = time.perf_counter()
    second = call(checkout, "demo")
    assert second.returncode == 0 and time.perf_counter() - began < 2
    assert log(checkout) == lines and second.stderr == ""


def test_changed_pins_and_a_moved_checkout_are_set_up_again(checkout: Path) -> None:
    call(checkout, "demo")
    before = len(log(checkout))
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    call(checkout, "demo")
    assert len(log(checkout)) == before + 3
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert call(moved, "demo").returncode == 0
    assert len(log(moved)) == before + 6


def test_failed_install_is_reported_and_redone(checkout: Path) -> None:
    failed = call(checkout, "demo", FAKE_PIP="1")
    assert failed.returncode == 1 and "installing failed" in failed.stderr
    assert not (checkout / ".venv.lock").exists()
    again = call(checkout, "demo")
    assert again.returncode == 0 and "interrupted" in again.stderr


def test_interrupted_set_up_is_redone(checkout: Path) -> None:
    process = subprocess.Popen(
        [str(checkout / "run"), "demo"],
        env=environment(checkout, FAKE_SLOW="30"),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while not any(line.startswith("pip") for line in log(checkout)):
        assert time.monotonic() < deadline, "set-up never reached pip"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # leaves lock and half a .venv behind
    process.wait()
    assert (checkout / ".venv.lock").exists()
    again = call(checkout, "demo")
    assert again.returncode == 0 and "interrupted" in again.stderr
    assert not (checkout / ".venv.lock").exists()


def test_a_venv_of_the_users_own_is_kept(checkout: Path) -> None:
    own = checkout / ".venv" / "their_file"
    own.parent.mkdir()
    own.write_text("x")
    assert call(checkout, "demo", FAKE_PIP="1").returncode == 1
    assert call(checkout, "demo").returncode == 0
    assert own.read_text() == "x"


def test_two_first_calls_at_once_set_up_once(checkout: Path) -> None:
    both = [
        subprocess.Popen(
            [str(checkout / "run"), "demo"],
            env=environment(checkout, FAKE_SLOW="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(log(checkout)) == 3
    assert any("waiting for another set-up" in err for _, err in said)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"FAKE_OLD": "1"}, ["Python 3.10 to 3.14", "found Python 3.8.1", "apt install python3"]),
        ({"FAKE_NO_VENV": "1"}, ["no venv module", "python3-venv", "python3.11-venv"]),
    ],
)
def test_missing_prerequisites_are_named(checkout: Path, trouble: dict, words: list[str]) -> None:
    done = call(checkout, "test", **trouble)
    assert done.returncode == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (checkout / ".venv").exists()


def test_no_python_at_all(checkout: Path) -> None:
    (checkout.parent / "bin" / "python3").unlink()
    done = call(checkout, "demo")
    assert done.returncode == 1 and "found no python3" in done.stderr


def test_tests_run_at_the_root_and_python_where_the_caller_is(checkout: Path) -> None:
    done = call(checkout, "test", "-k", "two words", cwd=checkout.parent)
    assert done.stdout == f"pytest in {checkout}: -m pytest -k two words\n"
    assert call(checkout, "python", "-m", "this").stdout == "python -m this\n"


def test_the_whole_suite_takes_all_cores_where_it_can(checkout: Path) -> None:
    done = call(checkout, "test")
    assert done.stdout == f"pytest in {checkout}: -m pytest -n auto --dist loadfile\n"
    alone = call(checkout, "test", FAKE_NO_XDIST="1")
    assert alone.stdout == f"pytest in {checkout}: -m pytest\n"


def test_given_interpreter_is_used_as_it_is(checkout: Path) -> None:
    done = call(
        checkout,
        "python",
        "-c",
        "import os, sys; print(sys.executable, os.environ['PYTHONPATH'])",
        FLASHNORM_PYTHON=sys.executable,
        PYTHONPATH="/elsewhere",
    )
    assert done.stdout == f"{sys.executable} {checkout}:/elsewhere\n"
    assert not (checkout / ".venv").exists() and log(checkout) == []
    (checkout / "bin").mkdir()
    (checkout / "bin" / "py").symlink_to(sys.executable)
    relative = {"FLASHNORM_PYTHON": "a checkout/bin/py"}
    done = call(checkout, "test", "--version", **relative)
    assert done.returncode == 0 and "pytest" in done.stdout + done.stderr, done.stderr
    missing = call(checkout, "demo", FLASHNORM_PYTHON="/no/such/python3")
    assert missing.returncode == 1 and "FLASHNORM_PYTHON=/no/such/python3" in missing.stderr


def test_help_and_unknown_command_need_no_set_up(checkout: Path) -> None:
    assert "usage: ./run" in call(checkout, "help").stdout
    assert "usage: ./run" in call(checkout).stdout
    unknown = call(checkout, "bench-all")
    assert unknown.returncode == 1 and "unknown command: bench-all" in unknown.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [("gpu-test", "gpu-test needs a GPU"), ("gpu-soak", "soak: timing needs a GPU")],
)
def test_what_needs_a_gpu_fails_clearly_without_one(command: str, said: str) -> None:
    done = subprocess.run(
        [str(ROOT / "run"), command],
        env={**os.environ, "FLASHNORM_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and said in done.stderr
    assert "passed" not in done.stdout
