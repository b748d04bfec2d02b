"""A prompt of 4,096 tokens through whole models, stock and patched: GPU time of one forward.

Question: what do the same fusions give where the matmuls rule? Eager and compiled; without a cache,
the last token's logits.

    python bench/prefill.py [--models llama-3.2-1b] [--out FILE]

The options, the checks and the file's form are those of bench/decode.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import decode

if __name__ == "__main__":
    sys.exit(decode.main(sys.argv[1:], task="prefill"))
