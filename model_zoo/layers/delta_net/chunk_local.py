# chunk_local: all of a prompt's chunks that does not depend on the state before them.
#   grid      (programs, Hv): a program has chunks of a value head
#   reads     what prompt_inputs wrote; b, a at the chunk's tokens; a_log, dt_bias
#   writes    of each token, with G the sum of g since the chunk's beginning,
#             D_ij = exp(G_i - G_j) for i >= j, and A = tril(beta K K^T * D, -1):
#             u = (I + A)^-1 beta V [T, Hv, Dv]; w = (I + A)^-1 beta exp(G) K [T, Hv, Dk];
#             p = tril(Q K^T * D) [T, Hv, CHUNK]; all in the type of qkv, and w negated; exp(G) and
#             exp(G' - G) [T, Hv] float32, where G' is the chunk's last G
#   math      tensor cores, float32 sums.  (I + A)^-1: blocks of 16 on the diagonal by forward
#             substitution in float32, then with B of these inverses and N = -B A', where A' is A
#             without these blocks: N^4 = 0, so (I + A)^-1 = (I + N + N^2 + N^3) B.  A series in
#             all of A would need no substitution, but its terms grow to 1e18 where keys are alike,
#             and cancel
#   launch    waits before it launches dependents; programs without a chunk wait, too, since a
#             kernel after this one may read what those before it wrote
#   bound     memory, 30 KB a token of 48 heads that it writes and 20 KB that it reads; then the
#             latency of the substitution's 15 steps
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.convolution import LOG2_E, log_decay, step_size


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
    n = tl.dot(b, -others, input_precision=PRECISION)
    inverse = tl.dot(n, b, b, input_precision=PRECISION)
    inverse = tl.dot(n, inverse, b, input_precision=PRECISION)
    return tl.dot(n, inverse, b, input_precision=PRECISION)


@triton.jit
def _chunk_local(
    B, A, A_LOG, DT_BIAS, CHUNKS, COUNTS, Q, K_IN, V, U, W, P, DECAY, LEFT, b_row, a_row,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    dtype = Q.dtype.element_ty
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0), disable_licm=True):
        first, last = tl.load(CHUNKS + index * 3 + 1), tl.load(CHUNKS + index * 3 + 2)
        token = first + tl.arange(0, CHUNK)
        real = token < last
        at = token.to(tl.int64)
        of_head = (at * HV + head)[:, None]
        of_key_head = (at * HK + head // (HV // HK))[:, None] * DK
        dim = tl.arange(0, DK)[None, :]
        k = tl.load(K_IN + of_key_head + dim, mask=real[:, None], other=0.0)
        q = tl.load(Q + of_key_head + dim, mask=real[:, None], other=0.0)
        beta = step_size(tl.load(B + at * b_row + head, mask=real, other=0.0))
        beta = tl.where(real, beta, 0.0)
        g = log_decay(
            tl.load(A + at * a_row + head, mask=real, other=0.0), tl.load(A_LOG + head),
            tl.load(DT_BIAS + head),
        )  # fmt: skip
        g = tl.where(real, g * LOG2_E, 0.0)  # exp2 is an instruction, exp is five
        total = tl.cumsum(g, 0)
        since_begin = tl.exp2(total)
        tl.store(DECAY + at * HV + head, since_begin, mask=real)
        tl.store(LEFT + at * HV + head, tl.exp2(tl.sum(g, 0) - total), mask=real)
        i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        decay = tl.exp2(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        p = tl.where(i >= j, p, 0.0).to(dtype)
        tl.store(P + of_head * CHUNK + j, p, mask=real[:, None])
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
        inverse = unit_lower_inverse(tl.where(i > j, system, 0.0), PRECISION).to(dtype)
        scale = -beta * since_begin
        for column in range(0, DK, PART):  # few columns at once need few registers
            key = column + tl.arange(0, PART)[None, :]
            part = tl.load(K_IN + of_key_head + key, mask=real[:, None], other=0.0)
            part = (part.to(tl.float32) * scale[:, None]).to(dtype)
            w = tl.dot(inverse, part, input_precision=PRECISION).to(dtype)
            tl.store(W + of_head * DK + key, w, mask=real[:, None])
        for column in range(0, DV, PART):
            value = of_head * DV + column + tl.arange(0, PART)[None, :]
            v = tl.load(V + value, mask=real[:, None], other=0.0)
            u = tl.dot(inverse, v, input_precision=PRECISION).to(dtype)
            tl.store(U + value, u, mask=real[:, None])
