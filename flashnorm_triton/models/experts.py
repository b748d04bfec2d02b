"""The experts form: a norm that a router and experts read (a mixture-of-experts block).

What is fewest launches, counted for one block whose norm is an RMS norm, after which a router and E
experts with 3-D weights, and perhaps a shared expert, read the rows:

- Normalise first, s and gain in one launch: 1. The router, whichever experts implementation the
  model uses (eager, batched_mm, grouped_mm, ...) and a shared expert then run as they are.
- Defer s past the experts' product: 1 for s, and 1 for the product's scaling, which must come
  before the activation, over k·2I values a token instead of K. In float16 it is out of the question
  besides: the unnormalised product would be stored. The router needs a norm of its own: 3.
- Let each reader normalise for itself: 1 in the router's launch, 1 before the experts: 2.

Timed on an H200 with transformers' experts implementations (docs/measured.md, "A mixture of
experts"): no form beats one norm launch on average, and deferring s has up to 1.28 times stock's
error, where one norm launch has 0.91: the product is rounded before it is scaled.

So s is applied per token to the rows, once, in every dtype, before they are gathered for their
experts. Folding the gain into 3-D weights would save nothing on top of that, as the launch that
applies s applies the gain as well, and would keep a second copy of most of a model's bytes on the
host; so no weight of the block moves, and ``fold`` and ``revertible`` make no difference here.

The router sees the row rounded once, where stock norms of type ``w * x.to(dtype)`` round twice: in
float32 its logits, and the experts that it chooses, are the stock model's to the bit wherever the
row statistics are summed in the same order (on a CPU they are); in half precision they are closer
to exact arithmetic, and differ from stock by no more than stock's own rounding.
"""

from __future__ import annotations

from flashnorm_triton.models.norm_only import NormOnlySite


class ExpertsSite(NormOnlySite):
    """The norm before a mixture of experts as one launch; see the module's docstring."""
