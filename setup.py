"""What pyproject.toml cannot say: the measured results in the package, README without its links.

``flashnorm plot`` draws the results, also where there is no clone (results.py finds them). Relative
links and pictures lead nowhere on a package's page.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
RESULTS = ROOT / "bench" / "results"


def long_description() -> str:
    """README for where there is no clone beside it: relative links as the paths they lead to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.M)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)", r"\1 (`\2`)", text)


class BuildWithResults(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the clone's own are used
            return
        target = Path(self.build_lib) / "flashnorm_triton" / "shipped_results"
        for path in sorted(RESULTS.glob("*/*.json")):
            copy = target / path.relative_to(RESULTS)
            self.mkpath(str(copy.parent))
            self.copy_file(str(path), str(copy))


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithResults},
        long_description=long_description(),
        long_description_content_type="text/markdown",
    )
