"""docs/troubleshooting.md: its messages are the code's, and every error of a user's is there."""

from __future__ import annotations

import re
from pathlib import Path

from error_sites import Site, plain, script, sites

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

# Messages that no user of the package meets as an error, by module or by what is raised.
NOT_ON_THE_PAGE = {
    # Signals inside the package: what they say becomes a reason in a report or in flashnorm.json.
    "Unproven": "docs/blocks.md", "NotFollowed": "docs/fold.md", "Declined": "docs/patching.md",
    "ShapeMismatch": "a reason in the report", "InterruptedError": "another shard's error is told",
    "LookupError": "an audit's decision without an installer: a fault of the package",
    "AssertionError": "a fault of the package",
    # Plans made by hand, and the tools that look at kernels: docs/adding_a_kernel.md.
    "plans.py": "a plan made by hand", "limits.py": "a plan made by hand",
    "launch/": "a plan made by hand", "workspace.py": "a plan made by hand",
    "compile_unit.py": "a kernel's compile unit", "tuning/aot.py": "ahead-of-time compiles",
    "tuning/lint.py": "the lint", "tuning/ttgir.py": "the lint", "tuning/rings.py": "the lint",
    "tuning/measure.py": "timing code: its arguments", "tuning/space.py": "checked by tune",
    # One bench by itself: argparse prints these with its usage.
    "bench/": "python -m flashnorm_triton.bench.NAME --help",
}  # fmt: skip
# of those modules, what a user does meet
ON_IT_ALL_THE_SAME = (
    "NoGpuError", "bench/command.py", "bench/stages.py", "bench/shapes.py", "bench/decoders.py",
)  # fmt: skip
# Errors that another error of the same module quotes: tables.py, "not a table (…: …)".
QUOTED = ("no run …", "expected texts, not …", "… is …")


def messages() -> list[str]:
    """The messages in the first column of the page's tables."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, re.M)
    return [plain(found) for row in rows for found in re.findall(r"`([^`]+)`", row)]


def is_quoted_by(told: str, site: Site) -> bool:
    """Whether the page's message is the site's, or the beginning of it."""
    return site.message == told or (len(told) > 25 and site.message.startswith(told))


ALL = [*sites(), *script()]


def test_the_messages_are_in_the_code() -> None:
    known = messages()
    gone = [told for told in known if not any(is_quoted_by(told, site) for site in ALL)]
    assert gone == [] and len(known) > 200


def left_out(site: Site) -> bool:
    if site.kind in ON_IT_ALL_THE_SAME or site.module in ON_IT_ALL_THE_SAME:
        return False
    named = any(site.module.startswith(name) for name in NOT_ON_THE_PAGE)
    in_tables = site.module == "tables.py" and site.kind == "ValueError" and site.message in QUOTED
    return named or site.kind in NOT_ON_THE_PAGE or in_tables


def test_every_error_is_on_the_page() -> None:
    """A new error: a row of docs/troubleshooting.md, or a reason above."""
    known = messages()
    missing = [
        f"{site.module}:{site.line} {site.kind}: {site.message}"
        for site in ALL
        if not left_out(site) and not any(is_quoted_by(told, site) for told in known)
    ]
    assert not missing, "\n" + "\n".join(missing)


def test_the_list_of_what_is_left_out_is_in_use() -> None:
    for name in NOT_ON_THE_PAGE:
        assert any(site.kind == name or site.module.startswith(name) for site in ALL), name


def test_sites_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f(x, name):\n"
        "    raise ValueError(f'{name!r} is ' 'wrong: give ' + f'{x}' + ' instead')\n"
        "    warnings.warn(f'{x} is old')\n    fallback.warn_once(x, f'now {x}')\n"
        "    typer.echo('an error', err=True)\n    typer.echo('no error')\n"
        "    raise KeyError(name)\n    raise\n"
    )
    assert [(site.kind, site.message) for site in sites(tmp_path)] == [
        ("ValueError", "… is wrong: give … instead"),
        ("warning", "… is old"),
        ("warning", "now …"),
        ("exit", "an error"),
    ]
