"""docs/commands.md and docs/api.md: the options of every command, the signature of every name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

import flashnorm_triton
from bench.doc_pages.sources import table
from flashnorm_triton.cli import app

_SECTIONS = ("Args", "Returns", "Raises")


def commands() -> str:
    """Every command with its options and their defaults, as its function declares them."""
    parts = []
    for name, callback in sorted(registered().items()):
        parts.append(f"### `flashnorm {name}`\n\n{_paragraphs(inspect.getdoc(callback) or '')}\n")
        parts.append(table(("argument", "default", ""), map(_argument, declared(callback))) + "\n")
    return "\n".join(parts)


def registered() -> dict[str, Callable[..., None]]:
    """The functions behind the commands, by name."""
    return {
        info.name or info.callback.__name__.replace("_", "-"): info.callback
        for info in app.registered_commands
    }


@dataclass(frozen=True)
class Argument:
    """An option or argument of a command: how it is spelled, its type, its default and help."""

    spellings: tuple[str, ...]
    kind: type
    default: Any
    help: str
    metavar: str


def declared(callback: Callable[..., None]) -> list[Argument]:
    """What a command's function declares, in order."""
    hints = get_type_hints(callback, include_extras=True)
    found = []
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, info = get_args(hints[name])
        kind = next((each for each in get_args(kind) if each is not NoneType), kind)
        default = None if parameter.default is parameter.empty else parameter.default
        word = info.metavar or {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
        # Inside Annotated the first spelling stands where a default would.
        given = tuple(each for each in (info.default, *(info.param_decls or ())) if each)
        if isinstance(info, ArgumentInfo):
            spellings = (info.metavar or name.upper(),)
        elif given and given != (Ellipsis,):
            spellings = given
        else:
            option = name.replace("_", "-")
            # typer gives a flag that may be on without being asked a second spelling, off.
            spellings = (f"--{option}", f"--no-{option}") if kind is bool else (f"--{option}",)
        found.append(Argument(spellings, kind, default, info.help or "", word))
    return found


def _argument(argument: Argument) -> tuple[str, str, str]:
    takes = argument.spellings[0].startswith("--") and argument.kind is not bool
    word = f" {argument.metavar}" if takes else ""
    names = ", ".join(f"`{spelling}{word}`" for spelling in argument.spellings)
    if argument.kind is bool:
        return names, "on" if argument.default else "", _cell(argument.help)
    default = "" if argument.default is None else f"`{argument.default}`"
    return names, default, _cell(argument.help)


def api() -> str:
    """Every public name: its signature, and what its docstring says."""
    parts = []
    for name in sorted(set(flashnorm_triton.__all__) - {"__version__"}, key=str.lower):
        value = getattr(flashnorm_triton, name)
        doc = inspect.getdoc(value) or ""
        parts += [f"## `fn.{name}`\n", f"```\n{_signature(name, value)}\n```\n", _described(doc)]
        for method in _methods(value):
            text = inspect.getdoc(getattr(value, method)) or ""
            parts += [f"### `{name}.{method}`\n", _described(text)]
    return "\n".join(parts)


def _signature(name: str, value: object) -> str:
    """The signature, on one line where that is short enough."""
    if inspect.isclass(value):
        return f"class {name}"
    signature = inspect.signature(value)
    shown, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        shown.append(_unquoted(str(parameter)))
    after = f" -> {signature.return_annotation}"
    one = f"{name}({', '.join(shown)}){after}"
    if len(one) <= 96:
        return one
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){after}"])


def _unquoted(text: str) -> str:
    return re.sub(r": '([^']*)'", r": \1", text)


def _methods(value: object) -> list[str]:
    if not inspect.isclass(value):
        return []
    return [name for name, at in vars(value).items() if not name.startswith("_") and _told(at)]


def _told(value: object) -> bool:
    is_code = isinstance(value, (classmethod, property)) or inspect.isfunction(value)
    return is_code and bool(inspect.getdoc(value))


def _described(doc: str) -> str:
    """A docstring as Markdown: its sections as headings in bold, its arguments as a list."""
    parts = re.split(r"^(Args|Returns|Raises):\n", doc, flags=re.M)
    text = [_paragraphs(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        indented, rest = _parted(body)
        if title == "Returns":
            text.append(f"**{title}** {_paragraphs(indented)}")
        else:
            text.append(f"**{title}**\n\n{_list(indented)}")
        if rest:
            text.append(_paragraphs(rest))
    return "\n\n".join(text) + "\n"


def _parted(body: str) -> tuple[str, str]:
    """The indented lines that a section begins with, and what follows them."""
    lines = body.splitlines()
    end = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
    return inspect.cleandoc("\n".join(lines[:end])), "\n".join(lines[end:])


def _list(text: str) -> str:
    items = re.split(r"^(?=\S+(?: \(.*?\))?: )", text, flags=re.M)
    made = []
    for item in filter(str.strip, items):
        name, _, said = item.partition(": ")
        made.append(f"- `{name}`: {_line(said)}")
    return "\n".join(made)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_line(part) for part in re.split(r"\n\s*\n", text.strip()))


def _line(text: str) -> str:
    """One paragraph on one line, its Sphinx spellings as Markdown's."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.split()))
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
