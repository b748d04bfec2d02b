"""The commands and Python snippets of README, docs/ and the other pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "flashnorm_triton/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
PROGRAMS = ("./run", "flashnorm", "python", "python3", "pip", "apt", "git", "vllm", "cp")


@dataclass(frozen=True)
class Command:
    """One command of a page, split into words; ``inline`` ones may be fragments of one."""

    page: str
    words: tuple[str, ...]
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def fenced(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[Command]:
    """The commands of a page: in blocks of sh or of no language, indented ones, and inline."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    found: list[Command] = []
    blocks = [(body, language == "sh") for language, body in fenced(page) if language in ("sh", "")]
    indented = re.findall(r"(?:^    .*\n)+", FENCE.sub("", text), re.M)
    blocks += [(body, False) for body in indented]
    for block, all_of_it in blocks:
        for line in _lines(block):
            if all_of_it or _is_command(line):
                found += [Command(name, words) for words in _split(line)]
    for span in filter(_is_command, spans(page)):
        found += [Command(name, words, inline=True) for words in _split(span)]
    return list(dict.fromkeys(found))


def _lines(block: str) -> list[str]:
    """The lines of a block, what goes on in the next line (indented, or after a \\) joined."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r",\\\n\s*", ",", block))
    first = re.match(r" *", joined)[0]
    joined = "\n".join(line.removeprefix(first) for line in joined.splitlines())
    return re.sub(r"\n\s+(?=\[)", " ", joined).splitlines()


def _is_command(line: str) -> bool:
    """Whether text that may be anything begins as a command does."""
    return line.strip().removeprefix("$ ").split(" ", 1)[0] in PROGRAMS


def _split(line: str) -> list[tuple[str, ...]]:
    """The commands of a line, joined by && or a pipe, without comments."""
    words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    if not words:
        return []
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|"):
            parts.append([])
        else:
            parts[-1].append(word)
    if words[0] == "flashnorm":  # flashnorm fold | verify: two commands of one program
        parts = [part if part[0] in PROGRAMS else [words[0], *part] for part in parts]
    return [tuple(part) for part in parts]


def python_blocks(page: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return [body for language, body in fenced(page) if language == "python"]


def spans(page: Path) -> list[str]:
    """The inline code of a page, each on one line."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    if page.name == "troubleshooting.md":
        prose = re.sub(r"^\| `.*?` \|", "|", prose, flags=re.M)  # messages, no commands
    return SPAN.findall(re.sub(r"(?<!\n)\n(?!\n)", " ", prose))
