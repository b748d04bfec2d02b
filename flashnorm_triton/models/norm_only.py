"""The norm alone as one launch, where the linears after it are not ours to touch.

Quantized, LoRA-wrapped and sharded linears compute for themselves; the norm before them still costs
a handful of kernels in stock code. Here it is one (``ops.rms_norm``), and nothing after it changes.
A LayerNorm is one launch in torch already and stays.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashnorm_triton.algebra import effective_gain
from flashnorm_triton.checks import DTYPES
from flashnorm_triton.models.installers import Installer, Options
from flashnorm_triton.models.placement import HOOK_ATTRIBUTES, only_moves_inputs
from flashnorm_triton.models.report import SiteReport
from flashnorm_triton.ops import rms_norm
from flashnorm_triton.transforms import transformed

_PLAIN = (Tensor, nn.Parameter)


class NormOnlySite(Installer):
    """One RMS norm run by a kernel; its consumers stay as they are.

    No weight moves: the replacement keeps its parameters in the stock norm's own dictionary, so
    both always hold the same ones, and reverting is putting the stock norm back.

    Raises ValueError for a norm that this cannot stand in for; nothing has been changed then.
    """

    def __init__(self, model: nn.Module, report: SiteReport, options: Options) -> None:
        super().__init__(model, report, options)
        self.norm = model.get_submodule(report.norm)
        self.folded = options.fold
        if report.kind != "rms" or report.eps is None or not report.eps > 0:
            raise ValueError(
                f"{report.norm}: a {report.kind} norm with eps {report.eps} cannot be run by "
                "rms_norm; keep it"
            )
        if "forward" in vars(self.norm) and not only_moves_inputs(self.norm):
            raise ValueError(
                f"{report.norm}: its forward was set on the instance, and would be lost; take away "
                "what set it, patch, and put it back"
            )

    def take(self) -> None:
        """Nothing to convert: the parameters stay where they are."""

    def replacements(self) -> dict[str, nn.Module]:
        """The fast norm, at the stock norm's path."""
        return {self.report.norm: NormOnly(self)}

    def give_back(self) -> None:
        """Nothing to undo: the stock norm holds the very parameters that the fast one used."""


class NormOnly(nn.Module):
    """In a norm's place: (..., K) -> (..., K), as the stock norm, in one launch.

    Parameters, attributes (``eps`` or ``variance_epsilon``) and hooks are the stock norm's own.
    Inputs whose dtype is not the gain's, and sharded or otherwise wrapped tensors, go through the
    stock norm: what it makes of them (promotion, redistribution) is its own affair.
    """

    def __init__(self, site: NormOnlySite) -> None:
        super().__init__()
        own = vars(site.norm)
        vars(self).update({k: v for k, v in own.items() if k not in HOOK_ATTRIBUTES})
        self.site = site
        self.convention = site.report.convention
        self.epsilon = float(site.report.eps)
        self._kept_gain: _KeptGain | None = None
        weight = self._parameters.get("weight")
        if weight is not None and self.convention == "1+w":
            with torch.no_grad():
                self._one_plus(weight)  # not first inside a graph capture

    def forward(self, hidden_states: Tensor) -> Tensor:
        gain = None if self.convention == "none" else self._parameters["weight"]
        if _foreign(hidden_states, gain):
            return self.stock(hidden_states)
        if gain is not None and self.convention == "1+w":
            gain = self._one_plus(gain)
        return rms_norm(hidden_states, self.epsilon, gain)

    @property
    def stock(self) -> nn.Module:
        """The stock norm, which waits outside the model."""
        return self.site.norm

    def _one_plus(self, weight: Tensor) -> Tensor:
        """1 + w in fp32; with fold=True it is kept from call to call while w is not written to."""
        kept = self._kept_gain
        if not self.site.folded or torch.compiler.is_compiling() or type(weight) not in _PLAIN:
            return effective_gain(weight, "1+w")
        if transformed():
            return effective_gain(weight, "1+w")  # a tensor of torch.func's, without memory
        if weight.requires_grad and torch.is_grad_enabled():
            return effective_gain(weight, "1+w")
        if kept is not None and kept.is_of(weight):
            return kept.gain
        gain = effective_gain(weight.detach(), "1+w")
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and not weight.is_inference():
            # What a capture computes exists only after a replay: not for other calls to read.
            self._kept_gain = _KeptGain(weight, gain)
        return gain

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept_gain": None}

    def extra_repr(self) -> str:
        """Class of the norm and what it applies, for ``print(model)``."""
        return f"{type(self.stock).__name__}, eps={self.epsilon:g}, gain {self.convention}"


class _KeptGain:
    """A gain derived from a weight, and what tells whether the weight is still the same."""

    def __init__(self, weight: Tensor, gain: Tensor) -> None:
        self.gain = gain
        # The object too: memory that was freed comes back with other tensors in it.
        self._weight = weakref.ref(weight)
        self._state = self._of(weight)

    def is_of(self, weight: Tensor) -> bool:
        if weight is not self._weight() or weight.is_inference():
            return False
        return self._state == self._of(weight)

    @staticmethod
    def _of(weight: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
        return weight.data_ptr(), weight._version, weight.dtype, weight.device


def _foreign(x: Tensor, gain: Tensor | None) -> bool:
    """Whether the operands are not plain tensors of one dtype that the operation takes."""
    if x.dtype not in DTYPES or (gain is not None and gain.dtype is not x.dtype):
        return True
    return any(
        type(t) not in _PLAIN and is_traceable_wrapper_subclass(t)
        for t in (x, gain)
        if t is not None
    )
