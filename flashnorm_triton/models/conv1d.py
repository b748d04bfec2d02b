"""Stand-ins for transformers' Conv1D, a linear whose weight is kept transposed, as (K, N)."""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from flashnorm_triton.models.adapters import AskedBy
from flashnorm_triton.models.fused import Columns
from flashnorm_triton.models.normed import Normalising


class PackedConv1D(Columns, Conv1D):
    """The columns of one ``Conv1D``; its ``weight`` is a transposed view of the packed rows."""

    weight = AskedBy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class NormedConv1D(Normalising, Conv1D):
    """A ``Conv1D`` that normalises its input, the gain in its own weights."""

    weight = AskedBy()
