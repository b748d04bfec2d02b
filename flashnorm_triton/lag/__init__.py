"""The lag detector: does a patched model answer with what belongs to the step before?"""

from __future__ import annotations

from flashnorm_triton.lag.finder import find_lag
from flashnorm_triton.lag.report import LagReport

__all__ = ["LagReport", "find_lag"]
