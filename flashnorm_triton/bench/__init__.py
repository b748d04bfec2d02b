"""What ``flashnorm bench`` measures: one module a question, each also run alone.

``python -m flashnorm_triton.bench.decode --help`` has all options of one. They import without a
GPU; what they measure needs one.
"""
