"""Split-K y = x W^T for few rows, in plain Triton: several programs share a tile of W's rows.

split_k
  grid      (tiles of BLOCK_N rows of W, parts of K)
  reads     W [N, K], x [M, K] with rows 16-byte aligned, bias [N] or None.  Weights depend on no
            preceding kernel: with dependent launch they are prefetched into L2 before the wait
  math      W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M]: the rows of x are the N
            side; float32 sums.  Partial sums go to a workspace; the last program to arrive adds
            them in the order of the columns: deterministic
  writes    y [M, N], contiguous
  bound     memory: 2 * N * K bytes
  checked   tests/model_zoo/layers/gemm/test_gemm.py against float64, interpreted and on a GPU
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch_l2(W, n, first, last, N, K):
    """Prefetch columns first..last of rows n of W into L2."""
    n = tl.minimum(n, N - 1)
    run = (tl.minimum(last, K) - first) * 2
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [(W + n.to(tl.int64) * K + first).to(tl.int64), tl.zeros_like(n) + run],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _is_last_to_arrive(ARRIVED, parts):
    """Whether all other programs of the tile have stored partial sums; if so, reset the count."""
    tl.debug_barrier()  # of all threads, whose writes the atomic publishes
    last = tl.atomic_add(ARRIVED, 1) == parts - 1
    if last:
        tl.store(ARRIVED, 0)
    return last


@triton.jit(do_not_specialize=["M", "per_part"])
def _split_k(
    W, X, BIAS, PARTS, ARRIVED, OUT, M, N, K, x_row, per_part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    first, last = part * per_part * BLOCK_K, tl.minimum((part + 1) * per_part * BLOCK_K, K)
    if DEPENDENT:
        gdc_launch_dependents()
        _prefetch_l2(W, n, first, last, N, K)
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    w_rows = W + n.to(tl.int64)[:, None] * K
    x_rows = X + m.to(tl.int64)[None, :] * x_row
    for start in range(first, last, BLOCK_K):
        k = start + column
        w = tl.load(w_rows + k[None, :], mask=(n < N)[:, None] & (k < last)[None, :], other=0.0)
        x = tl.load(x_rows + k[:, None], mask=(k < last)[:, None] & (m < M)[None, :], other=0.0)
        acc = tl.dot(w, x, acc)
    real = (n < N)[:, None] & (m < M)[None, :]
    mine = True
    if parts > 1:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        slots = PARTS + tile.to(tl.int64) * parts * (BLOCK_N * BLOCK_M) + within
        tl.store(slots + part * (BLOCK_N * BLOCK_M), acc, mask=real)
        mine = _is_last_to_arrive(ARRIVED + tile, parts)
        if mine:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                at = slots + other * (BLOCK_N * BLOCK_M)
                acc += tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
    if mine:
        if BIAS is not None:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        out = OUT + m[None, :] * N + n[:, None]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=real)
