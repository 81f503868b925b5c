# chunk_local: all of a prompt's chunks that does not depend on the state before them.
#   grid      (programs, Hk): a program has chunks of a key head, and the Hv / Hk value heads of it
#             one after the other, so that keys and queries are convolved and multiplied once
#   reads     qkv, b, a at the chunk's tokens; of a row's slot the last inputs of the convolution,
#             at the first tokens of a row that continues; the layer's weights
#   writes    of each token, queries and keys [T, Hk, Dk], L2-normalised, queries / sqrt(Dk); with G
#             the sum of g since the chunk's beginning, D_ij = exp(G_i - G_j) for i >= j, and
#             A = tril(beta K K^T * D, -1):
#             u = (I + A)^-1 beta V [T, Hv, Dv]; w = (I + A)^-1 beta exp(G) K [T, Hv, Dk];
#             p = tril(Q K^T * D) [T, Hv, CHUNK]; all in the type of qkv; G [T, Hv] float32
#   math      tensor cores, float32 sums.  (I + A)^-1: blocks of 16 on the diagonal by forward
#             substitution in float32, then B of these blocks and N = B A', where A' is A without
#             them: N^4 = 0, so (I + A)^-1 = (I - N)(I + N^2) B.  A product of powers of all of A
#             would need fewer steps, but its terms grow to 1e18 where keys are alike, and cancel
#   launch    waits before it launches dependents; programs without a chunk wait, too, since a
#             kernel after this one may read what those before it wrote
#   bound     memory: qkv once, and its outputs, 58 KB a token of 16 and 48 heads; then latency of
#             the substitution's 15 steps a value head
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.convolution import convolved, log_decay, step_size
from model_zoo.layers.delta_net.reference import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + UNIT_EPS)[:, None]


@triton.jit
def _inverse_of_blocks(blocks):
    """(I + L)^-1 of blocks L [n, SIZE, SIZE], strictly lower triangular, row after row."""
    SIZE: tl.constexpr = blocks.shape[1]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    inverse = tl.zeros_like(blocks) + (row == column).to(tl.float32)
    by_column = tl.permute(blocks, (0, 2, 1))
    for i in range(1, SIZE):
        factors = tl.sum(tl.where(column == i, by_column, 0.0), 2)  # row i of L, zero from i on
        known = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(row == i, inverse - known[:, None, :], inverse)
    return inverse


@triton.jit
def unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a [4 * SIZE, 4 * SIZE] float32, strictly lower triangular."""
    ALL: tl.constexpr = a.shape[0]
    SIZE: tl.constexpr = ALL // 4
    block_row, block_column = (
        tl.arange(0, 4)[:, None, None, None],
        tl.arange(0, 4)[None, None, :, None],
    )
    on_diagonal = block_row == block_column
    four = tl.reshape(a, (4, SIZE, 4, SIZE))
    blocks = _inverse_of_blocks(tl.sum(tl.where(on_diagonal, four, 0.0), 2))
    b = tl.where(on_diagonal, tl.expand_dims(blocks, 2), 0.0)
    b = tl.reshape(b, (ALL, ALL))
    others = tl.reshape(tl.where(on_diagonal, 0.0, four), (ALL, ALL))
    n = tl.dot(b, others, input_precision=PRECISION)
    squared = tl.dot(n, n, input_precision=PRECISION)
    half = b + tl.dot(squared, b, input_precision=PRECISION)
    return half - tl.dot(n, half, input_precision=PRECISION)


@triton.jit
def _value_head(
    QKV, CONV, CONV_WEIGHT, B, A, A_LOG, DT_BIAS, U, W, P, G, k, keys, queries, token, at, real,
    begin, continued, head, qkv_row, b_row, a_row, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """k [CHUNK, DK]; keys, queries: K K^T and Q K^T; at: the tokens in int64."""
    beta = step_size(tl.load(B + at * b_row + head, mask=real, other=0.0))
    beta = tl.where(real, beta, 0.0)
    g = log_decay(
        tl.load(A + at * a_row + head, mask=real, other=0.0), tl.load(A_LOG + head),
        tl.load(DT_BIAS + head),
    )  # fmt: skip
    total = tl.cumsum(tl.where(real, g, 0.0), 0)
    tl.store(G + at * HV + head, total, mask=real)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
    p = tl.where(i >= j, queries * decay, 0.0).to(k.dtype)
    tl.store(P + (at * HV + head)[:, None] * CHUNK + j, p, mask=real[:, None])
    system = tl.where(i > j, keys * decay * beta[:, None], 0.0)
    inverse = unit_lower_inverse(system, WIDE).to(k.dtype)
    key, value = tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
    scaled = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    w = tl.dot(inverse, scaled, input_precision=PRECISION).to(k.dtype)
    tl.store(W + (at * HV + head)[:, None] * DK + key, w, mask=real[:, None])
    channel = 2 * HK * DK + head * DV + value
    v = convolved(QKV, CONV, CONV_WEIGHT, token, begin, channel, continued, qkv_row, K)
    scaled = (v * beta[:, None]).to(k.dtype)
    u = tl.dot(inverse, scaled, input_precision=PRECISION).to(k.dtype)
    tl.store(U + (at * HV + head)[:, None] * DV + value, u, mask=real[:, None])


@triton.jit
def _chunk_local(
    QKV, B, A, CONV_WEIGHT, A_LOG, DT_BIAS, CONV, CU_SEQLENS, LENGTHS, SLOTS, CHUNKS, COUNTS,
    Q_OUT, K_OUT, U, W, P, G, qkv_row, b_row, a_row, conv_slot, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    dtype = QKV.dtype.element_ty
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        entry = CHUNKS + index * 3
        row, first, last = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        begin = tl.load(CU_SEQLENS + row)
        start = tl.load(LENGTHS + row) - (tl.load(CU_SEQLENS + row + 1) - begin)
        slot = tl.load(SLOTS + row).to(tl.int64)
        continued = (start > 0) & (slot >= 0)
        conv = CONV + slot * conv_slot
        token = first + tl.arange(0, CHUNK)
        real = token < last
        at = token.to(tl.int64)
        token = tl.minimum(token, last - 1)[:, None]
        key = head * DK + tl.arange(0, DK)[None, :]
        out = at[:, None] * (HK * DK) + key
        k = convolved(
            QKV, conv, CONV_WEIGHT, token, begin, HK * DK + key, continued, qkv_row, K
        )  # fmt: skip
        k = tl.where(real[:, None], _unit(k), 0.0).to(dtype)
        tl.store(K_OUT + out, k, mask=real[:, None])
        q = convolved(QKV, conv, CONV_WEIGHT, token, begin, key, continued, qkv_row, K)
        q = (_unit(q) * (DK**-0.5)).to(dtype)
        tl.store(Q_OUT + out, q, mask=real[:, None])
        keys = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        queries = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        for place in range(HV // HK):
            _value_head(
                QKV, conv, CONV_WEIGHT, B, A, A_LOG, DT_BIAS, U, W, P, G, k, keys, queries, token,
                at, real, begin, continued, head * (HV // HK) + place, qkv_row, b_row, a_row, HK,
                HV, DK, DV, K, CHUNK, PRECISION, WIDE,
            )  # fmt: skip
