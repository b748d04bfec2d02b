"""Execute the notebooks of this folder and keep what they print: ``./run notebooks``.

    ./run notebooks                  # all of them, written back with their outputs
    ./run notebooks 1 4 --out DIR    # the first and the fourth, written into DIR

One kernel process serves them all, emptied between two notebooks, so that the libraries are
imported once. What is written has no times, counters or random ids in it beyond what the cells
print: a second run on the same machine writes the same bytes. Needs the extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
CELL_SECONDS = 300
GPU = "gpu"
"""The one piece of metadata that is kept: the GPU that a notebook was executed on, or nothing."""


def notebooks() -> list[Path]:
    """The notebooks, in their order."""
    return sorted(FOLDER.glob("[0-9]_*.ipynb"))


def _environment() -> dict[str, str]:
    """What the kernel gets: this checkout's package, whatever is installed, and no colours."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "NO_COLOR": "1",
        # Interpreted kernels take minutes: without a GPU the notebooks run in plain torch.
        "TRITON_INTERPRET": "0",
    }


class _ThisPython(KernelSpecManager):
    """Whatever kernels a machine has installed: the one of this interpreter."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Kernel:
    """A running kernel that executes one notebook after the other."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client
        self._used = False

    def execute(self, path: Path) -> NotebookNode:
        """The notebook with the outputs of this run, in the form that is kept (``tidy``).

        Raises nbclient's CellExecutionError, which names the cell, when one fails.
        """
        node = nbformat.read(path, as_version=4)
        if self._used:
            self._client.execute_interactive("%reset -f", store_history=False, silent=True)
        self._used = True
        runner = NotebookClient(node, km=self._manager, timeout=CELL_SECONDS, record_timing=False)
        # What runs beneath ``runner.execute``, which would start and stop a kernel of its own.
        runner.kc = self._client
        runner.reset_execution_trackers()
        for index, cell in enumerate(node.cells):
            runner.execute_cell(cell, index)
        node.metadata = NotebookNode({GPU: self._gpu()})
        return tidy(node)

    def _gpu(self) -> str:
        asked = "torch.cuda.get_device_name() if torch.cuda.is_available() else ''"
        reply = self._client.execute(
            "", silent=True, user_expressions={GPU: asked}, reply=True, timeout=CELL_SECONDS
        )
        told = reply["content"]["user_expressions"][GPU]
        # A notebook without torch has asked nothing of a GPU.
        return ast.literal_eval(told["data"]["text/plain"]) if told["status"] == "ok" else ""


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A kernel of this interpreter, in the notebooks' folder, gone at the end of the block."""
    with TemporaryDirectory() as folder:
        manager = KernelManager(
            kernel_spec_manager=_ThisPython(),
            transport="ipc",  # sockets in a folder of our own: no port that others may listen on
            connection_file=str(Path(folder) / "kernel.json"),
        )
        manager.start_kernel(env=_environment(), cwd=str(FOLDER))
        client = manager.client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=CELL_SECONDS)
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def tidy(node: NotebookNode) -> NotebookNode:
    """The notebook without what changes from run to run: ids and counters by position, streams
    that were cut in pieces joined, no metadata but tags and the GPU."""
    count = 0
    for index, cell in enumerate(node.cells):
        tags = cell.metadata.get("tags")
        cell.id = f"cell-{index:02d}"
        cell.metadata = NotebookNode({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    node.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        **{GPU: node.metadata.get(GPU, "")},
    )
    return node


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        last = kept[-1] if kept else None
        streams = last is not None and last.output_type == output.output_type == "stream"
        if streams and last.name == output.name:
            last.text += output.text
        else:
            kept.append(output)
    return kept


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: all ran. 1: a cell failed; that notebook is left as it was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", help="such as 1 4; left out: all")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write to")
    args = parser.parse_args(argv)
    wanted = [path for path in notebooks() if not args.numbers or path.name[0] in args.numbers]
    missing = set(args.numbers) - {path.name[0] for path in wanted}
    if missing:
        parser.error(f"no notebook {', '.join(sorted(missing))}: there are 1 to {len(notebooks())}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with kernel() as running:
        for path in wanted:
            began = time.perf_counter()
            try:
                node = running.execute(path)
            except CellExecutionError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
                failed += 1
                continue
            target = args.out / path.name
            partial = target.with_suffix(".partial")
            nbformat.write(node, partial)
            partial.replace(target)
            seconds, size = time.perf_counter() - began, target.stat().st_size / 1000
            print(f"{path.name}: {seconds:.1f} s, {size:.0f} KB", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
