# fused_router: a router's product and its choice of experts in one launch, for few tokens.
#   grid      (T, blocks of BLOCK_N outputs of the Linear), programs of one warp.  Each token has
#             programs and a counter of its own, so that the choices of several run side by side,
#             and its bits do not depend on T; all but the first read the weights from L2
#   reads     W [N, H] bf16, fp16 or fp32, whose rows are the E experts and perhaps the gate of a
#             shared expert; x [T, H]; the Linear's bias [N] or None; correction bias [E] fp32 or
#             None.  Up to BLOCK_K columns of W are in registers before the wait, since weights
#             depend on no preceding kernel; what is left is prefetched into L2
#   math      products and sums in fp32, rounded as the Linear rounds them.  Logits go to a
#             workspace; a token's last program to arrive chooses by choose_experts.py.  All sums
#             have one order, whichever program is the last: deterministic
#   writes    ids [T, k] int32, weights [T, k] fp32, gates [T] in W's type
#   launch    dependents are launched at once; before the wait it reads weights alone
#   bound     latency: one trip to memory, an atomic, k reductions over a warp
#   checked   tests/model_zoo/layers/moe/test_fused_router.py against a product and route()
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.dependent_launch import dependent_launch
from model_zoo.layers.gemm.split_k import _is_last_to_arrive
from model_zoo.layers.moe.router.choose_experts import choose_experts, constants, covers
from model_zoo.moe_config import MAX_EXPERTS, RouterConfig

if TYPE_CHECKING:  # processes that compile kernels import this module
    from model_zoo.layers.linear import Linear

MAX_TOKENS = 8
# Of W, over all tokens but the first: L2 gives about 5 TB/s, so that these take 0.8 us.  A product
# in a launch of its own takes about 2 us more than this kernel: more reads could cost as much.
MAX_READ_AGAIN = 4 << 20
MAX_HIDDEN = 8192
BLOCK_BYTES = 8192  # of W in the registers of a warp: 64 of a thread's 255
COUNTER_STEP = tl.constexpr(32)  # int32 from one token's counter to the next: a cache line
LINE = tl.constexpr(128)  # bytes of a cache line
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _prefetch(at):
    """Prefetch the cache line of each address into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _line_starts(P, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Indices of P from FIRST to before LAST, one in each cache line; some may be LAST - 1."""
    STEP: tl.constexpr = LINE // (P.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(LAST - FIRST, STEP))
    return tl.minimum(FIRST + tl.arange(0, LINES) * STEP, LAST - 1)


@triton.jit
def _outputs(
    W, X, LINEAR_BIAS, BIAS, output, real, E: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """-> [BLOCK_N] outputs of the Linear for one row X, rounded to W's type.

    It waits for preceding kernels when the weights of the first BLOCK_K columns are on their way.
    """
    k = tl.arange(0, BLOCK_K)
    rows = W + tl.where(real, output, 0).to(tl.int64)[:, None] * HIDDEN
    dtype = W.dtype.element_ty
    w = tl.load(rows + k[None, :], mask=real[:, None] & (k < HIDDEN)[None, :], other=0.0)
    added = tl.zeros(output.shape, tl.float32)
    if LINEAR_BIAS is not None:
        added = tl.load(LINEAR_BIAS + output, mask=real, other=0.0).to(tl.float32)
    if DEPENDENT:
        if HIDDEN > BLOCK_K:
            _prefetch(rows + _line_starts(W, BLOCK_K, HIDDEN)[None, :])
        if BIAS is not None:
            _prefetch(BIAS + _line_starts(BIAS, 0, E))
        gdc_wait()
    x = tl.load(X + k[None, :], mask=(k < HIDDEN)[None, :], other=0.0).to(dtype)
    products = w.to(tl.float32) * x.to(tl.float32)
    for start in tl.static_range(BLOCK_K, HIDDEN, BLOCK_K):
        at = (start + k)[None, :]
        w = tl.load(rows + at, mask=real[:, None] & (at < HIDDEN), other=0.0)
        x = tl.load(X + at, mask=at < HIDDEN, other=0.0).to(dtype)
        products += w.to(tl.float32) * x.to(tl.float32)
    return (tl.sum(products, 1) + added).to(dtype)


@triton.jit(do_not_specialize=["first"])  # all ranks run one kernel
def _fused_router(
    X, W, LINEAR_BIAS, BIAS, LOGITS, ARRIVED, IDS, WEIGHTS, GATE, scale, x_row, first,
    HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, OWN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    N: tl.constexpr = E if GATE is None else E + 1
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = _outputs(
        W, X + token * x_row, LINEAR_BIAS, BIAS, output, output < N, E, HIDDEN, BLOCK_K, DEPENDENT
    )
    logits = LOGITS + token * E
    tl.store(logits + output, y.to(tl.float32), mask=output < E)
    if GATE is not None:
        tl.store(GATE + token + tl.zeros_like(output), y, mask=output == E)
    if _is_last_to_arrive(ARRIVED + token * COUNTER_STEP, tl.num_programs(1)):
        expert = tl.arange(0, BLOCK_E)
        # Other SMs have written them: by loads that bypass L1.
        all_logits = tl.load(logits + expert, mask=expert < E, other=0.0, cache_modifier=".cg")
        choose_experts(
            all_logits, BIAS, IDS + token * TOP_K, WEIGHTS + token * TOP_K, scale, first, E, TOP_K,
            SLOTS, SCORING, RENORMALIZE, GROUPS, KEPT, OWN,
        )  # fmt: skip


def fuses(tokens: int, config: RouterConfig, linear: Linear) -> bool:
    """Whether fused_router takes so many tokens of this router.

    No timing decides, so that ranks that compute the same have the same bits.  A batch-invariant
    Linear keeps the product that it has for any number of rows.
    """
    read_again = (tokens - 1) * linear.weight.nbytes
    few = 1 <= tokens <= MAX_TOKENS and read_again <= MAX_READ_AGAIN
    aligned = linear.inputs * linear.weight.element_size() % 16 == 0
    plain = linear.weight.ndim == 2  # not packed, for quantization or for a CPU
    fits = plain and aligned and linear.inputs <= MAX_HIDDEN and linear.dtype in DTYPES
    return few and fits and covers(config) and not linear.is_batch_invariant


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """-> (logits float32 of MAX_TOKENS, their counters int32).

    A router finds the counters at zero and resets them: routers run one after the other, on one
    stream or by dependent launches, as a model's layers do.
    """
    with torch.inference_mode(False):  # kept, so that others may write to it outside of it, too
        logits = torch.empty(MAX_TOKENS * MAX_EXPERTS, dtype=torch.float32, device=device)
        counters = MAX_TOKENS * COUNTER_STEP.value
        return logits, torch.zeros(counters, dtype=torch.int32, device=device)


def blocks(hidden: int, itemsize: int) -> tuple[int, int]:
    """-> (BLOCK_N, BLOCK_K): outputs and columns of W that a program has at once."""
    columns = min(triton.next_power_of_2(hidden), BLOCK_BYTES // itemsize)
    return min(BLOCK_BYTES // itemsize // columns, 2), columns


def fused_router(
    x: Tensor,
    linear: Linear,
    config: RouterConfig,
    bias: Tensor | None,
    own: range | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [T, hidden], correction bias [E] or None -> (ids [T, k] int32, weights [T, k] float32,
    shared expert's gate [T] or None), as the Linear and route() in its outputs.

    The gate is there if the Linear has one output more than experts.
    """
    tokens, experts = len(x), config.num_experts
    own = range(experts) if own is None else own
    assert fuses(tokens, config, linear) and x.stride(1) == 1
    ids = torch.empty(tokens, config.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, config.top_k, dtype=torch.float32, device=x.device)
    gate: Tensor | None = None
    if linear.outputs > experts:
        gate = torch.empty(tokens, dtype=linear.dtype, device=x.device)
    block_n, block_k = blocks(linear.inputs, linear.weight.element_size())
    _fused_router[(tokens, triton.cdiv(linear.outputs, block_n))](
        x, linear.weight, linear.bias, bias, *workspace(x.device), ids, weights, gate,
        config.scale, x.stride(0), own.start, HIDDEN=linear.inputs, BLOCK_N=block_n,
        BLOCK_K=block_k, **constants(config, own), num_warps=1, **dependent_launch(x.device),
    )  # fmt: skip
    return ids, weights, gate
