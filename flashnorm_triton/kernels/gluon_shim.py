"""Gluon is experimental: names that differ between the supported Triton releases, bridged here."""

from triton.experimental.gluon import language as gl

# ``thread_barrier`` in 3.6, ``barrier`` from 3.7 on; the same instruction.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
