"""Triton on Hopper: a tile that feeds tl.dot and arithmetic is overwritten while wgmma reads it.

Without a GPU: the compiled loop has fewer slots for x than for w although one wgmma stays in
flight, so the copy of the next tile lands in the slot that it still reads. With an sm_90 GPU: how
many values of y change from launch to launch. See upstream_race.md.
"""

import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

M, N, K, BM, BN, BK = 256, 6144, 4096, 64, 64, 128


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    acc, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM,), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rows[:, None] * K + (k + ks)[None, :])
        w = tl.load(w_ptr + cols[:, None] * K + (k + ks)[None, :])
        x32 = x.to(tl.float32)
        squares += tl.sum(x32 * x32, axis=1)  # x's second use
        acc = tl.dot(x, w.T, acc)
    y = acc * tl.rsqrt(squares / K)[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(tl.bfloat16))


def depths(stages):
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16") | {"N": "i32", "K": "i32"}
    blocks = {"BM": BM, "BN": BN, "BK": BK}
    constants = {(5 + i,): value for i, value in enumerate(blocks.values())}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    source = ASTSource(kernel, pointers | dict.fromkeys(blocks, "constexpr"), constants, attributes)
    options = {"num_warps": 4, "num_stages": stages}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    found = re.findall(r"%(\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x", text)
    return dict(found), re.findall(r"pendings = (\d)", text)[:1]


print(f"Triton {triton.__version__}, {BM}x{BN}x{BK}, sm_90")
for stages in (2, 3, 4):
    slots, pending = depths(stages)
    print(f"{stages} stages: slots {slots}, wgmma left in flight {pending}")
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    x, w = (torch.randn(n, K, device="cuda").bfloat16() for n in (M, N))
    for stages in (1, 3):  # 1: nothing is copied ahead, and every launch gives the same
        ys = [torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(100)]
        for y in ys:
            kernel[M // BM, N // BN](x, w, y, N, K, BM, BN, BK, num_warps=4, num_stages=stages)
        bits = [y.view(torch.int16) for y in ys]
        moved = sum(int((b != bits[0]).sum()) for b in bits)
        print(f"{stages} stages: {moved} values moved in 100 launches of {M * N}")
