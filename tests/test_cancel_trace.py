"""What may stand between a linear and the norm behind it, on blocks made for the question."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import flashnorm_triton as fn
from flashnorm_triton.models.cancel import CancelReport, layout_of
from flashnorm_triton.models.cancel_trace import LinearUse

Between = Callable[[Tensor], Tensor]


class _Block(nn.Module):
    """norm -> linear -> ``between`` -> norm over heads of 8, beside ``also``, what else is read."""

    def __init__(self, between: Between, also: Between | None = None, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(24, eps=1e-3), nn.Linear(24, 32, bias=bias)
        self.later = nn.RMSNorm(8, eps=1e-2)
        self.between, self.also = between, also
        for module in (self.norm, self.later):
            nn.init.uniform_(module.weight, 0.3, 1.7)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(self.norm(x))
        result = self.later(self.between(z)).reshape(x.shape[0], -1).cos()
        return result if self.also is None else torch.cat([result, self.also(z)], -1)


def _heads(z: Tensor) -> Tensor:
    return z.unflatten(-1, (-1, 8))


MOVED: dict[str, Between] = {
    "unflatten": _heads,
    "view and transpose": lambda z: z.view(len(z), 4, 8).transpose(0, 1),
    "reshape, permute, contiguous": lambda z: (
        z.reshape(-1, 8, 4, 8).permute(2, 0, 1, 3).contiguous()
    ),
    "split": lambda z: z.split(8, -1)[2],
    "slices": lambda z: z[:, 8:24].unflatten(1, (2, 8)),
    "chunk and to": lambda z: z.chunk(2, -1)[1].to(torch.float32).unflatten(-1, (2, 8)),
}
CHANGED: dict[str, tuple[Between, str]] = {
    "a clamp": (lambda z: _heads(z.clamp(-1, 1)), "read by clamp"),
    "a scalar": (lambda z: _heads(z * 2.0), "read by mul"),
    "other columns": (lambda z: _heads(z.flip(-1)), "read by flip"),
    "every second column": (lambda z: z[:, :16:2], "side by side"),
    "columns of two rows": (lambda z: z.transpose(0, 1).reshape(-1, 8), "side by side"),
    "another type": (lambda z: _heads(z.bfloat16()).float(), "read by bfloat16"),
    "an index tensor": (lambda z: _heads(z[:, torch.arange(32)]), "read by getitem"),
}


def _site(model: nn.Module, x: Tensor) -> fn.SiteReport:
    report = fn.audit(model, example_inputs=(x,), cancel="exact")
    return next(site for site in report.sites if site.norm == "norm")


@pytest.mark.parametrize("how", MOVED)
def test_what_only_moves_columns_is_seen_through(how: str) -> None:
    model, x = _Block(MOVED[how]).eval(), torch.randn(80, 24) * torch.logspace(-3, 1, 80)[:, None]
    site, expected = _site(model, x), model(x)
    assert isinstance(site, CancelReport) and [n.norm for n in site.later] == ["later"]
    with torch.no_grad(), fn.patched(model, cancel="exact", example_inputs=(x,)):
        assert type(model.later).__name__ == "DoneNorm"
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", CHANGED)
def test_what_changes_them_is_an_obstacle(what: str) -> None:
    between, reason = CHANGED[what]
    x = torch.randn(80, 24)
    site = _site(_Block(between).eval(), x)
    assert site.decision == "fuse" and "not cancelled" in site.reason and reason in site.reason


def test_another_reader_of_all_or_of_some_columns() -> None:
    x = torch.randn(80, 24)
    for also, reason in ((torch.tanh, "tanh"), (lambda z: z[:, 3:5] + 1, "add")):
        site = _site(_Block(_heads, also).eval(), x)
        assert site.decision == "fuse" and f"also read by {reason}" in site.reason
    model = _Block(lambda z: _heads(z[:, :16]), lambda z: z[:, 16:].tanh()).eval()
    site, expected = _site(model, x), model(x)
    assert site.decision == "partial" and [p.width for p in site.layouts[0].pieces] == [8, 8, 16]
    with torch.no_grad(), fn.patched(model, cancel="exact", example_inputs=(x,)):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_bias_is_an_obstacle() -> None:
    site = _site(_Block(_heads, bias=True).eval(), torch.randn(80, 24))
    assert site.decision == "fuse" and "linear has a bias" in site.reason


def test_an_epsilon_of_nothing_or_another_kind_of_norm() -> None:
    x = torch.randn(80, 24)
    for later in (nn.LayerNorm(8), nn.RMSNorm(8, eps=0.0)):
        model = _Block(_heads).eval()
        model.later = later
        site = _site(model, x)
        assert site.decision == "fuse" and "not recognised as an RMS norm" in site.reason


def test_pieces_repeat_by_the_shortest_period() -> None:
    use = LinearUse(24, {"n": {(2, 4), (10, 4), (18, 4)}})
    assert [(layout_of(use, ["n"]).heads, [p.width for p in layout_of(use, ["n"]).pieces])] == [
        (1, [2, 4, 4, 4, 4, 4, 2])
    ]
    layout = layout_of(LinearUse(24, {"n": {(0, 4), (8, 4), (16, 4)}}), ["n"])
    assert (layout.heads, [p.width for p in layout.pieces]) == (3, [4, 4])
    assert layout_of(use, []).pieces[0].width == 24
