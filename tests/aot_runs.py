"""Ahead-of-time compiles for the tests, once a session, in a process without the interpreter."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnorm_triton.tuning import aot

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None

TESTS = Path(__file__).parent
FIXTURES = ("racing_kernel:compile_units", "lint_kernels:compile_units")
SHIPPED = ("flashnorm_triton.launch:compile_units",)


@dataclass(frozen=True)
class Run:
    """What the command left: exit status, output, the report, and a folder of texts."""

    status: int
    output: str
    report: dict[str, Any]
    texts: Path

    def records(self, target: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
        """All records, or those of one target that did compile, by name and target."""
        rows = self.report["records"]
        if target is not None:
            rows = [r for r in rows if r["target"] == target and not r["error"]]
        return {(r["name"], r["target"]): r for r in rows}

    def text(self, name: str, target: str = "sm90", kind: str = "ttgir") -> str:
        return (self.texts / f"{aot.stem(name, target)}.{kind}").read_text()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with the package and the tests importable and nothing interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, "-m", "flashnorm_triton.tuning.aot", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )


@functools.cache
def compiled(units: tuple[str, ...]) -> Run:
    """Compile everything that `units` name for every target they claim."""
    folder = Path(tempfile.mkdtemp(prefix="flashnorm-aot-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    report = folder / "report.json"
    # Of several test processes one compiles; the others find it all in Triton's cache on the disk.
    with (Path(tempfile.gettempdir()) / "flashnorm-aot.lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = command("--json", str(report), "--texts", str(folder / "texts"), "--units", *units)
    assert report.exists(), f"no report:\n{done.stdout}\n{done.stderr}"
    return Run(
        done.returncode,
        done.stdout + done.stderr,
        json.loads(report.read_text()),
        folder / "texts",
    )
