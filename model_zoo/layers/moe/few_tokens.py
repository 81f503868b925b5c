"""Experts of up to 8 tokens, in plain Triton: no tokens are sorted.

few_gate_up, few_down
  grid      (pairs of a token and an expert, tiles of W's rows).  A program has all tokens that
            chose its expert; if an earlier token did, it has none, so that each expert's weights
            are read once, however many tokens share it.  It has none, either, if the expert is not
            among the OWN ones of this rank (OWN 0: it has all)
  reads     x [T, H]; ids [T, k] int32; weights of the chosen experts, in any format of
            expert_tile.py; few_down also weights [T, k] fp32, and the shared expert's output [T, H]
            and gate [T], if there are any
  math      W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, 16] of all T tokens, by tensor cores; what
            belongs to tokens of other experts is discarded.  The products take less time than the
            weights' way from memory.  float32 sums, and activations of them.  few_down writes the
            weighted output of each pair to a workspace, T k H float32, 1 % of the weights' bytes;
            the last program to arrive at a tile adds those of a token in the order of its experts:
            deterministic, and independent of the other tokens
  writes    inner values [T k, I] in x's type; y [T, H]
  launch    few_gate_up waits before it launches dependents, so that few_down may read the ids,
            which an earlier kernel wrote, before its own wait: it prefetches its weights into L2
  bound     memory: 3 H I bytes of weights for each expert that was chosen
  checked   tests/model_zoo/layers/moe/test_expert_kernels.py
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.gemm.split_k import _is_last_to_arrive
from model_zoo.layers.moe.expert_tile import (
    activated,
    add_product,
    expert_product,
    gate_up_rows,
    load_columns,
    row_factor,
    sigmoid,
)


@triton.jit
def _tokens_of_pair(
    IDS, pair, tokens, TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """-> (the pair's expert; which tokens chose it; with which of their k; whether none earlier).

    By loads that bypass L1: see dependent_launch.py on reads before the wait.
    """
    expert = tl.load(IDS + pair, cache_modifier=".cg")
    token, slot = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    real = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    at = IDS + token[:, None] * TOP_K + slot[None, :]
    same = tl.load(at, mask=real, other=-1, cache_modifier=".cg") == expert
    chose = tl.max(same.to(tl.int32), 1) > 0
    first = tl.min(tl.where(chose, token, COLUMNS), 0)
    return expert, chose, tl.sum(tl.where(same, slot[None, :], 0), 1), first == pair // TOP_K


@triton.jit
def _prefetch_rows(W, n, bytes):
    """Prefetch whole rows of one expert's weight into L2; bytes: a multiple of 16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [W.to(tl.int64) + n.to(tl.int64) * bytes, tl.zeros_like(n) + bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _few_gate_up(
    X, IDS, OUT, W, SCALES, ZEROS, ROW_SCALES, BIAS, tokens, inner, K, x_row, width, scale_expert,
    scale_row, scale_column, TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
    OWN: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    UNIT: tl.constexpr, RUN: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCALES_SUMS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    expert, chose, slot, is_first = _tokens_of_pair(
        IDS, tl.program_id(0), tokens, TOP_K, SLOTS, COLUMNS
    )
    if OWN > 0:
        is_first &= expert < OWN
    if not is_first:
        return
    N = 2 * inner
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, COLUMNS)
    rows = gate_up_rows(n, inner)
    acc = expert_product(
        X, token, chose, x_row, W, SCALES, ZEROS, ROW_SCALES, BIAS, expert, rows, N, K, width,
        scale_expert, scale_row, scale_column, MODE, KIND, SCALE, UNIT, RUN, ROW_GROUP,
        COLUMN_GROUP, PER_ROW, SCALES_SUMS, PRECISION, BLOCK_K, EVEN_K,
    )  # fmt: skip
    gate, up = tl.split(acc.reshape(2, BLOCK_N, COLUMNS).permute(1, 2, 0))
    y = activated(gate, up, ACTIVATION).to(OUT.dtype.element_ty)
    at = OUT + (token * TOP_K + slot)[None, :] * inner + n[:, None]
    tl.store(at, y, mask=(n < inner)[:, None] & chose[None, :])


@triton.jit
def add_shared(total, SHARED, SHARED_GATE, token, n, real, N, gate_stride):
    """total [BLOCK_N, tokens] + sigmoid(gate) * shared."""
    if SHARED is not None:
        at = SHARED + token.to(tl.int64)[None, :] * N + n[:, None]
        added = tl.load(at, mask=real, other=0.0).to(tl.float32)
        if SHARED_GATE is not None:
            gate = tl.load(SHARED_GATE + token * gate_stride).to(tl.float32)
            added *= sigmoid(gate)[None, :]
        total += added
    return total


@triton.jit(
    do_not_specialize=["tokens", "gate_stride"], do_not_specialize_on_alignment=["SHARED_GATE"]
)
def _few_down(
    X, IDS, WEIGHTS, PARTS, ARRIVED, SHARED, SHARED_GATE, OUT, W, SCALES, ZEROS, ROW_SCALES, BIAS,
    tokens, N, K, gate_stride, width, scale_expert, scale_row, scale_column, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr, MODE: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, PER_ROW: tl.constexpr,
    SCALES_SUMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    expert, chose, slot, is_first = _tokens_of_pair(
        IDS, tl.program_id(0), tokens, TOP_K, SLOTS, COLUMNS
    )
    if OWN > 0:
        is_first &= expert < OWN
    # As expert_product(), in two parts: the addresses before the wait, where W is prefetched.
    at_expert = expert.to(tl.int64)
    W += at_expert * N * width
    if SCALES is not None:
        SCALES += at_expert * scale_expert
    if ZEROS is not None:
        ZEROS += at_expert * scale_expert
    if ROW_SCALES is not None:
        ROW_SCALES += at_expert * N
    tile = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    if DEPENDENT:
        gdc_launch_dependents()
        if is_first and PREFETCH:
            _prefetch_rows(W, rows, width * (W.dtype.element_ty.primitive_bitwidth // 8))
        gdc_wait()
    token = tl.arange(0, COLUMNS)
    real = (n < N)[:, None] & (token < tokens)[None, :]
    if is_first:
        pair = tl.where(chose, token * TOP_K + slot, tl.program_id(0))
        acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        for start in range(0, K, BLOCK_K):
            x = load_columns(X, pair, chose, start, K, K, BLOCK_K, EVEN_K)
            acc = add_product(
                acc, x, W, SCALES, ZEROS, rows, start, N, K, width, scale_row, scale_column, MODE,
                KIND, SCALE, UNIT, RUN, ROW_GROUP, COLUMN_GROUP, PER_ROW, SCALES_SUMS, PRECISION,
                BLOCK_K, EVEN_K,
            )  # fmt: skip
        acc *= row_factor(SCALES, ROW_SCALES, rows, MODE, UNIT, PER_ROW)[:, None]
        if BIAS is not None:
            acc += tl.load(BIAS + at_expert * N + rows).to(tl.float32)[:, None]
        acc *= tl.load(WEIGHTS + pair)[None, :]
        tl.store(PARTS + pair[None, :] * N + n[:, None], acc, mask=real & chose[None, :])
    if _is_last_to_arrive(ARRIVED + tile, tl.num_programs(0)):
        total = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
        for j in range(TOP_K):
            at = PARTS + (token * TOP_K + j)[None, :] * N + n[:, None]
            mine = real
            if OWN > 0:
                of_pair = IDS + token * TOP_K + j
                ids = tl.load(of_pair, mask=token < tokens, other=OWN, cache_modifier=".cg")
                mine &= (ids < OWN)[None, :]
            total += tl.load(at, mask=mine, other=0.0, cache_modifier=".cg")
        row = tl.minimum(token, tokens - 1)
        total = add_shared(total, SHARED, SHARED_GATE, row, n, real, N, gate_stride)
        at = OUT + token[None, :] * N + n[:, None]
        tl.store(at, total.to(OUT.dtype.element_ty), mask=real)
