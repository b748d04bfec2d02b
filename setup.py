"""What pyproject.toml cannot say: the package carries the measured results of bench/results.

``flashnorm plot`` draws them, also where there is no clone (results.py finds them).
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RESULTS = Path(__file__).parent / "bench" / "results"


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


setup(cmdclass={"build_py": BuildWithResults})
