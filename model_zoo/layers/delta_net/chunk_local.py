# chunk_local: all of a prompt's chunks that does not depend on the state before them.
#   grid      (programs, Hv): a program has chunks of a value head
#   reads     queries, keys and gates, as prompt_inputs wrote them; of a row's last chunk also the
#             row's last tokens of qkv
#   writes    of each token, with D_ij = exp(G_i - G_j) for i >= j, A = tril(beta K K^T * D, -1):
#             solve = (I + A)^-1 diag(beta) and p = tril(Q K^T * D) [T, Hv, CHUNK], of the type of
#             qkv.  The last inputs of the convolution to the slots: prompt_inputs, which reads the
#             old ones, has ended
#   math      tensor cores, float32 sums.  (I + A)^-1: with X the inverse of its blocks of n on the
#             diagonal, and Y the part of X A that is within blocks of 2 n and not of n, X - Y X is
#             that of blocks of 2 n.  The factors have 11 bits, as those of TF32, and are at most 1:
#             X_ij = -beta_i k_i^T (a product of I - beta k k^T and decays) k_j.  A series in all of
#             A would take fewer products, but its terms grow to 1e18 where keys are alike, and
#             cancel
#   launch    waits before it launches dependents; programs without a chunk wait, too, since a
#             kernel after this one may read what those before it wrote
#   bound     latency: ten products that depend on each other.  Memory: 12 KB a token of 48 heads
#             that it writes, and 8 KB that it reads
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.convolution import copy_inputs_of_head


@triton.jit
def unit_lower_inverse(a, zero, FACTOR: tl.constexpr, PRECISION: tl.constexpr):
    """(I - a)^-1 of a [64, 64] float32, strictly lower triangular.

    FACTOR: the type of products' factors
    zero:   a number that the compiler does not know: masks which depend on it are not computed
            before all loops, where they would take many registers
    """
    ALL: tl.constexpr = a.shape[0]
    tl.static_assert(ALL == 64)
    i, j = tl.arange(0, ALL)[:, None], tl.arange(0, ALL)[None, :] + zero
    factor = a.to(FACTOR)
    inverse = tl.where((i ^ j) == 1, a, 0.0) + (i == j).to(tl.float32)
    for level in tl.static_range(1, 6):  # from blocks of 2 to one of 64
        x = inverse.to(FACTOR)
        y = tl.dot(x, factor, input_precision=PRECISION)
        # What is in the same larger block, and in the smaller one before.
        is_other = (j >= i >> (level + 1) << (level + 1)) & (j < i >> level << level)
        y = tl.where(is_other, y, 0.0).to(FACTOR)
        inverse = tl.dot(y, x, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _copy_last_inputs(
    QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, row, head, qkv_row, conv_slot,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A row's last inputs of the convolution to its slot, and those before a snapshot to its."""
    begin, end = tl.load(CU_SEQLENS + row), tl.load(CU_SEQLENS + row + 1)
    start = tl.load(LENGTHS + row) - (end - begin)
    slot = tl.load(SLOTS + row).to(tl.int64)
    conv = CONV + slot * conv_slot
    if SNAPSHOTS is not None:
        kept = tl.load(SNAPSHOTS + row).to(tl.int64)
        border = begin - start + tl.load(SNAPSHOTS_AT + row)
        if (kept >= 0) & (border > begin) & (border <= end):
            copy_inputs_of_head(
                QKV, conv, CONV + kept * conv_slot, border, begin, start, slot >= 0, head, qkv_row,
                HK, HV, DK, DV, K,
            )  # fmt: skip
        tl.debug_barrier()  # of threads that read old inputs, which the next lines replace
    if slot >= 0:
        copy_inputs_of_head(
            QKV, conv, conv, end, begin, start, True, head, qkv_row, HK, HV, DK, DV, K
        )


@triton.jit
def _chunk_local(
    QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, CHUNKS, COUNTS, Q, K_IN, GATES,
    SOLVE, P, qkv_row, conv_slot, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0), disable_licm=True):
        entry = CHUNKS + index * 3
        row, first, last = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        token = first + tl.arange(0, CHUNK)
        real = token < last
        at = token.to(tl.int64)
        of_key_head = (at * HK + head // (HV // HK))[:, None] * DK + tl.arange(0, DK)[None, :]
        k = tl.load(K_IN + of_key_head, mask=real[:, None], other=0.0)
        q = tl.load(Q + of_key_head, mask=real[:, None], other=0.0)
        gate = GATES + (index * HV + head) * (4 * CHUNK) + tl.arange(0, CHUNK)
        since_begin, beta = tl.load(gate + 2 * CHUNK), tl.load(gate + 3 * CHUNK)
        i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        decay = tl.exp2(tl.where(i >= j, since_begin[:, None] - since_begin[None, :], 0.0))
        cell = (at * HV + head)[:, None] * CHUNK + j
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        tl.store(P + cell, tl.where(i >= j, p, 0.0).to(P.dtype.element_ty), mask=real[:, None])
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * -beta[:, None]
        zero = (tl.load(GATES + (index * HV + head) * (4 * CHUNK) + 3 * CHUNK) < 0.0).to(
            tl.int32
        )  # no step size is negative
        inverse = unit_lower_inverse(tl.where(i > j, system, 0.0), zero, FACTOR, PRECISION)
        tl.store(
            SOLVE + cell, (inverse * beta[None, :]).to(SOLVE.dtype.element_ty), mask=real[:, None]
        )
        if last == tl.load(CU_SEQLENS + row + 1):
            _copy_last_inputs(
                QKV, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, row, head, qkv_row,
                conv_slot, HK, HV, DK, DV, K,
            )  # fmt: skip
