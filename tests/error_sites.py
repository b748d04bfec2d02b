"""Where the package raises and warns: each message with … in the place of what is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashnorm_triton"
_WARNS = ("warnings.warn", "warn_once", "fallback.warn_once", "_warn")
_ENDS = ("_stop", "stop")
# Modules whose functions return a reason or a remedy, which an error or a warning then quotes.
_REASONS = ("runtime.py", "fallback.py")


@dataclass(frozen=True)
class Site:
    """One place: the module, the line, what is raised ("warning", or a class), the message."""

    module: str
    line: int
    kind: str
    message: str


def message(node: ast.expr, constants: Mapping[str, str] | None = None) -> str:
    """The text of an expression, … for what is not said in the code.

    ``constants``: the module's texts by name, for ``NAME.format(...)``.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left, constants) + message(node.right, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = ast.unparse(node.func.value)
        if node.func.attr == "format" and constants and name in constants:
            return re.sub(r"\{[^}]*\}", "…", constants[name])
    return "…"


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module gives names to."""
    return {
        node.targets[0].id: message(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def plain(text: str) -> str:
    """A message on one line, its gaps alike."""
    return re.sub(r"…(?:\.?…)+", "…", " ".join(text.split()))


def _said(node: ast.AST) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return ast.unparse(node.exc.func), node.exc.args[0]
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = ast.unparse(node.func)
    if name in _WARNS:
        return "warning", node.args[0 if name == "warnings.warn" else 1]
    on_stderr = any(keyword.arg == "err" for keyword in node.keywords)
    if name == "typer.echo" and on_stderr:
        return "exit", node.args[0]
    return None


def _says(text: str, kind: str) -> bool:
    """Whether there are words, more than the program's name before another's message."""
    if kind == "reason" and " " not in text:
        return False
    return bool(re.search(r"\w{3}", re.sub(r"^flashnorm[\w ]*: …$", "", text)))


def sites(package: Path = PACKAGE) -> Iterator[Site]:
    """All places of the package whose message the code says, at least in part."""
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree)
        for node in ast.walk(tree):
            found = _said(node)
            if found is None and module in _REASONS and isinstance(node, ast.Return) and node.value:
                found = ("reason", node.value)
            if found is not None:
                text = plain(message(found[1], constants))
                if _says(text, found[0]):
                    yield Site(module, node.lineno, found[0], text)


def script() -> Iterator[Site]:
    """What ``run`` says before it fails or waits."""
    text = (ROOT / "run").read_text(encoding="utf-8")
    for found in re.finditer(r'^ *.*?\b(?:fail|say) "([^"]*)"', text, re.M):
        line = text[: found.start()].count("\n") + 1
        said = re.sub(r"\$\{?\w+\}?(?:\.\w+)?", "…", found[1])
        if re.search(r"\w{3}", said):
            yield Site("run", line, "exit", plain(said))
