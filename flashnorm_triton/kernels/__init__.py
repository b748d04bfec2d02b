"""Triton kernels, one family a file. A kernel knows no model and chooses no tile size."""
