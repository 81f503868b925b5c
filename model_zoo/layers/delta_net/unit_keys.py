# unit_keys: queries and keys of prompts: convolution, silu and L2 norm.
#   grid      (programs, 2 * Hk): a program has chunks of a head of queries, or of keys
#   reads     qkv at the chunk's tokens; of a row's slot the last inputs of the convolution, at the
#             first tokens of a row that continues; the convolution's weight
#   writes    queries / sqrt(Dk), keys [T, Hk, Dk] of the type of qkv
#   math      float32
#   launch    waits before it launches dependents, as all kernels of prompts do
#   bound     memory: 8 * T * Hk * Dk bytes
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.chunk_plan import chunk_of
from model_zoo.layers.delta_net.convolution import convolved
from model_zoo.layers.delta_net.reference import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)


@triton.jit
def _unit_keys(
    QKV, CONV_WEIGHT, CONV, CU_SEQLENS, LENGTHS, SLOTS, CHUNKS, COUNTS, Q, K_OUT, qkv_row,
    tap_channel, tap, conv_slot, HK: tl.constexpr, DK: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    num_chunks = tl.load(COUNTS + 1)
    if DEPENDENT:
        wait_for_launcher()
    for index in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        first, last, begin, has_old, conv = chunk_of(
            CHUNKS, CU_SEQLENS, LENGTHS, SLOTS, CONV, index, conv_slot, K
        )
        token = (first + tl.arange(0, CHUNK))[:, None]
        real = token < last
        dim = tl.arange(0, DK)
        x = convolved(
            QKV, conv, CONV_WEIGHT, tl.minimum(token, last - 1), begin, head * DK + dim, has_old,
            qkv_row, tap_channel, tap, K,
        )  # fmt: skip
        x *= tl.rsqrt(tl.sum(x * x, 1) + UNIT_EPS)[:, None]
        at = token.to(tl.int64) * (HK * DK) + dim[None, :]
        if head < HK:
            query = (x * (DK**-0.5)).to(Q.dtype.element_ty)
            tl.store(Q + head * DK + at, query, mask=real)
        else:
            tl.store(K_OUT + (head - HK) * DK + at, x.to(Q.dtype.element_ty), mask=real)
