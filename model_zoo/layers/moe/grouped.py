"""Experts of any number of tokens, in plain Triton: GEMMs of the tiles that align() makes.

grouped_gate_up, grouped_down
  grid      (the most tiles that there can be * tiles of W's rows,): programs of tiles that there
            are not end at once
  reads     x [T, H], by the pairs of a tile; weights in any format of expert_tile.py; grouped_down
            also weights [T, k] fp32, and the shared expert's output [T, H] and gate [T]
  math      W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M]; float32 sums from the first
            column to the last, and activations of them.  grouped_down writes the weighted output of
            each pair in x's type; the program that completes a token's k pairs, of a tile of
            columns, adds them in the order of its experts: deterministic, and with wgmma
            independent of the other tokens.  That moves 4 T k H bytes more than an atomic sum
            would, in part in L2, which is 5 % of the time of 8192 tokens of Qwen3-30B-A3B.
            Without SUMS, where a rank has not all experts, sum_pairs adds them
  writes    inner values [T k, I] in x's type; y [T, H]
  bound     memory up to hundreds of tokens: 3 H I bytes of weights of each expert that has one;
            then compute: 6 T k H I floating-point operations
  checked   tests/model_zoo/layers/moe/test_expert_kernels.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.moe.align import EXPERTS
from model_zoo.layers.moe.expert_tile import (
    activated,
    expert_product,
    gate_up_rows,
)
from model_zoo.layers.moe.few_tokens import add_shared

GROUP_M = 8  # adjacent tiles of x, which share W in the L2 cache


@triton.jit
def _coords(NUM_TILES, tiles_n, GROUP_M: tl.constexpr):
    """-> (the program's tile of pairs, its tile of W's rows, whether they exist)."""
    tiles_m = tl.load(NUM_TILES)
    program = tl.program_id(0)
    stripe = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.maximum(tl.minimum(tiles_m - stripe, GROUP_M), 1)
    within = program % (GROUP_M * tiles_n)
    return stripe + within % height, within // height, program < tiles_m * tiles_n


@triton.jit
def _pairs_of_tile(TILES, COUNTS, PAIRS, tile, tokens, BLOCK_M: tl.constexpr):
    """-> (expert, pairs [BLOCK_M], which of them exist); the others are pair 0."""
    word = tl.load(TILES + tile)
    expert = word % EXPERTS
    m = word // EXPERTS * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < tl.load(COUNTS + expert)
    pair = tl.load(PAIRS + expert.to(tl.int64) * tokens + m, mask=real, other=0)
    return expert, pair, real


@triton.jit(do_not_specialize=["tokens"])
def _grouped_gate_up(
    X, PAIRS, COUNTS, TILES, NUM_TILES, OUT, W, SCALES, ZEROS, ROW_SCALES, BIAS, tokens, inner, K,
    x_row, width, scale_expert, scale_row, scale_column, TOP_K: tl.constexpr, MODE: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, PER_ROW: tl.constexpr,
    SCALES_SUMS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    tile, tile_n, exists = _coords(NUM_TILES, tl.cdiv(inner, BLOCK_N), GROUP_M)
    if not exists:
        return
    expert, pair, real = _pairs_of_tile(TILES, COUNTS, PAIRS, tile, tokens, BLOCK_M)
    N = 2 * inner
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = gate_up_rows(n, inner)
    acc = expert_product(
        X, pair // TOP_K, real, x_row, W, SCALES, ZEROS, ROW_SCALES, BIAS, expert, rows, N, K,
        width, scale_expert, scale_row, scale_column, MODE, KIND, SCALE, UNIT, RUN, ROW_GROUP,
        COLUMN_GROUP, PER_ROW, SCALES_SUMS, PRECISION, BLOCK_K, EVEN_K,
    )  # fmt: skip
    gate, up = tl.split(acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0))
    y = tl.trans(activated(gate, up, ACTIVATION).to(OUT.dtype.element_ty))
    at = OUT + pair.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(at, y, mask=real[:, None] & (n < inner)[None, :])


@triton.jit(
    do_not_specialize=["tokens", "gate_stride"], do_not_specialize_on_alignment=["SHARED_GATE"]
)
def _grouped_down(
    X, WEIGHTS, PAIRS, COUNTS, TILES, NUM_TILES, PARTS, ARRIVALS, SHARED, SHARED_GATE, OUT, W,
    SCALES, ZEROS, ROW_SCALES, BIAS, tokens, N, K, gate_stride, width, scale_expert, scale_row,
    scale_column, TOP_K: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    UNIT: tl.constexpr, RUN: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCALES_SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr, SUMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    tile, tile_n, exists = _coords(NUM_TILES, tl.cdiv(N, BLOCK_N), GROUP_M)
    if not exists:
        return
    expert, pair, real = _pairs_of_tile(TILES, COUNTS, PAIRS, tile, tokens, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    acc = expert_product(
        X, pair, real, K, W, SCALES, ZEROS, ROW_SCALES, BIAS, expert, rows, N, K, width,
        scale_expert, scale_row, scale_column, MODE, KIND, SCALE, UNIT, RUN, ROW_GROUP,
        COLUMN_GROUP, PER_ROW, SCALES_SUMS, PRECISION, BLOCK_K, EVEN_K,
    )  # fmt: skip
    acc *= tl.load(WEIGHTS + pair)[None, :]
    y = tl.trans(acc.to(PARTS.dtype.element_ty))
    within = n < N
    at = PARTS + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, y, mask=real[:, None] & within[None, :])
    if SUMS:
        _add_pairs(
            PARTS, ARRIVALS, SHARED, SHARED_GATE, OUT, pair, real, n, tile_n, tokens, N,
            gate_stride, TOP_K,
        )  # fmt: skip


@triton.jit
def _add_pairs(
    PARTS, ARRIVALS, SHARED, SHARED_GATE, OUT, pair, real, n, tile_n, tokens, N, gate_stride,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """The sums of tokens whose last pair is among those of a tile, of outputs n."""
    within = n < N
    # Threads arrive for rows that others have stored: the barriers order both before and after.
    tl.debug_barrier()
    token = pair // TOP_K
    arrived = tl.atomic_add(ARRIVALS + tile_n * tokens + token, 1, mask=real)
    tl.debug_barrier()
    is_last = real & (arrived == TOP_K - 1)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        summed = is_last[:, None] & within[None, :]
        total = tl.zeros([pair.shape[0], n.shape[0]], tl.float32)
        for j in range(TOP_K):
            at = PARTS + (token.to(tl.int64) * TOP_K + j)[:, None] * N + n[None, :]
            part = tl.load(at, mask=summed, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        if SHARED is not None:
            total = tl.trans(
                add_shared(
                    tl.trans(total), SHARED, SHARED_GATE, token, n, tl.trans(summed), N, gate_stride
                )
            )
        at = OUT + token.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, total.to(OUT.dtype.element_ty), mask=summed)
