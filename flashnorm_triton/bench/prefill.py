"""A prompt of 4,096 tokens through whole models, stock and patched: GPU time of one forward.

Question: what do the same fusions give where the matmuls rule? Eager and compiled; without a cache,
the last token's logits.

    python -m flashnorm_triton.bench.prefill [--models llama-3.2-1b] [--out FILE]

The options, the checks and the file's form are those of decode.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flashnorm_triton.bench import decode


def main(argv: Sequence[str]) -> int:
    return decode.main(argv, task="prefill")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
