# gated_norm: the RMSNorm of each value head's o, times silu(z), of the tokens of prompts.
#   grid      (programs, Hv): a program has chunks of a value head
#   reads     out [T, Hv * Dv], o; z; weight [Dv] of the norm
#   writes    out, in place
#   math      float32
#   launch    waits before it launches dependents
#   bound     memory: 3 * T * Hv * Dv * bytes
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher
from model_zoo.layers.delta_net.convolution import silu


@triton.jit
def _gated_norm(
    OUT, Z, NORM, CHUNKS, COUNTS, eps, z_row, HV: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    num_chunks = tl.load(COUNTS + 1)
    dim = tl.program_id(1) * DV + tl.arange(0, DV)[None, :]
    weight = tl.load(NORM + tl.arange(0, DV)).to(tl.float32)[None, :]
    if DEPENDENT:
        wait_for_launcher()
    for index in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        first, last = tl.load(CHUNKS + index * 3 + 1), tl.load(CHUNKS + index * 3 + 2)
        token = (first + tl.arange(0, CHUNK))[:, None]
        mask = token < last
        token = token.to(tl.int64)
        at = OUT + token * (HV * DV) + dim
        o = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(Z + token * z_row + dim, mask=mask, other=0.0).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * weight * silu(z)
        tl.store(at, o.to(OUT.dtype.element_ty), mask=mask)
