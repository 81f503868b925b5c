"""y = x W^T + b of int8 numbers, in plain Triton.

int8_gemm
  grid      (tiles of W's rows * tiles of x's rows, parts of K)
  reads     W [N, K] int8 and float scales [N], which depend on no preceding kernel; x [rows, K]
            int8 with float32 scales [rows], and zero points int32 [rows] with the sums of W's rows
            int32 [N] or neither; bias [N] or None.  Columns of W and x are in one order, any
  math      W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M] with int32 sums, which are exact:
            y = (sum - zero_m * sums_n) * scale_m * scale_n + b_n in float32, rounded once.  So the
            bits of y depend neither on tiles nor on split-K, whose partial sums go to a workspace;
            the last program to arrive adds them
  writes    y [M, N], contiguous
  bound     memory for few rows: N * K bytes; else the tensor cores
  checked   tests/model_zoo/layers/quantized_gemm/test_int8_gemm.py against int64
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.gemm.split_k import _is_last_to_arrive


@triton.jit
def _tile(
    SOURCE, row, rows, start, K, TMA: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows row.. and columns start.. of a matrix [rows, K]; rows beyond it are arbitrary."""
    if TMA:
        tile = SOURCE.load([row, start])
    else:
        at = tl.minimum(row + tl.arange(0, HEIGHT), rows - 1).to(tl.int64) * K
        tile = tl.load(SOURCE + at[:, None] + (start + tl.arange(0, WIDTH))[None, :])
    return tile


@triton.jit(do_not_specialize=["M", "per_part"])
def _int8_gemm(
    X, X_SCALES, X_ZEROS, W, W_SCALES, W_SUMS, BIAS, PARTS, ARRIVED, OUT, M, N, K, per_part,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    stripe = tile // (GROUP_M * tiles_n) * GROUP_M
    width = tl.minimum(tiles_m - stripe, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    first_m = (stripe + within % width) * BLOCK_M
    first_n = within // width * BLOCK_N
    first, last = part * per_part * BLOCK_K, tl.minimum((part + 1) * per_part * BLOCK_K, K)
    if DEPENDENT:
        wait_for_launcher()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in range(first, last, BLOCK_K):
        w = _tile(W, first_n, N, start, K, TMA, BLOCK_N, BLOCK_K)
        x = _tile(X, first_m, M, start, K, TMA, BLOCK_M, BLOCK_K)
        acc = tl.dot(w, x.T, acc, out_dtype=tl.int32)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    real = (n < N)[:, None] & (m < M)[None, :]
    mine = True
    if SPLIT:
        parts = tl.num_programs(1)
        slot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        slots = PARTS + tile.to(tl.int64) * parts * (BLOCK_N * BLOCK_M) + slot
        tl.store(slots + part * (BLOCK_N * BLOCK_M), acc, mask=real)
        mine = _is_last_to_arrive(ARRIVED + tile, parts)
        if mine:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                at = slots + other * (BLOCK_N * BLOCK_M)
                acc += tl.load(at, mask=real, other=0, cache_modifier=".cg")
    if mine:
        if X_ZEROS is not None:
            zeros = tl.load(X_ZEROS + m, mask=m < M, other=0)
            acc -= zeros[None, :] * tl.load(W_SUMS + n, mask=n < N, other=0)[:, None]
        y = acc.to(tl.float32) * tl.load(X_SCALES + m, mask=m < M, other=0.0)[None, :]
        y *= tl.load(W_SCALES + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if BIAS is not None:
            y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        out = OUT + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, y.to(OUT.dtype.element_ty), mask=real)
