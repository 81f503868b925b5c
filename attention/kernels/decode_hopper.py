"""Decode attention for Hopper (sm_90), in Gluon: one warp loads, four compute.

decode_hopper: as decode.py's kernel, with the same plan and the same partial results.
  grid      plan.spec.programs, one an SM
  load warp (hopper_load_pieces.py) walks all pieces of the program without a pause and runs ahead
            across pieces, so that memory never waits for the end of one
  compute   four warps share a tile of keys; scores and output by mma (m16), online softmax in
            base 2, float32 accumulation
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D], any strides; page_table [B, max_pages]
            int32; pages past a row's length or before its window are not touched
  writes    as decode.py
  bound     memory: 2 * kv_len * D * bytes per KV head
  checked   tests/attention/test_decode_kernel.py on a GPU, against a float64 oracle

Two traps of Triton 3.6, here and in the load warp: a variable that a loop carries is folded to its
first value when it bounds a loop inside, hence the trip counts; and what a worker warp gets must be
no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.kernels.combine import combine
from attention.kernels.hopper_load_pieces import load_pieces, read_piece
from attention.kernels.hopper_tile import LN2, LOG2E, NOTHING, write_partial
from attention.kernels.launch import dependent_launch
from attention.planner.plan import SplitPlan

# Triton 3.7 renamed it.
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _weights(
    s, m, start, end, position, factor, softcap,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores of a tile -> its weights, the new maximum, what to shrink sums by."""
    if SOFTCAP:
        doubled = s * (2.0 * factor / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + gl.exp2(doubled)))
    else:
        s = s * factor
    key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = (key < end)[None, :]
    if MASKED:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    return gl.exp2(s - top[:, None]), top, gl.exp2(m - top)


@gluon.jit
def _without_poison(v, start, end, lowest, WINDOW: gl.constexpr):
    """Zeros for values that no query sees: there may be NaN, and 0 * NaN is NaN."""
    outside = start + v.shape[0] > end
    if WINDOW > 0:
        outside = outside | (start < lowest)
    if outside:
        key = start + gl.arange(0, v.shape[0], gl.SliceLayout(1, v.type.layout))
        there = key < end
        if WINDOW > 0:
            there = there & (key >= lowest)
        v = gl.where(there[:, None], v, 0.0)
    return v


@gluon.jit
def _write_whole(
    acc, m, total, OUT, LSE, SINKS, token, heads, real, out_token, out_head, lse_token,
    D: gl.constexpr,
):  # fmt: skip
    """out and lse of a row that is not cut."""
    if SINKS is not None:
        sink = gl.load(SINKS + heads, mask=real, other=0.0) * LOG2E
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        total = total * shrink + gl.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    some = gl.where(total == 0.0, 1.0, total)
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    gl.store(
        OUT + (token * out_token + heads * out_head)[:, None] + d[None, :],
        (acc / some[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & (d < D)[None, :],
    )  # fmt: skip
    if LSE is not None:
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(some)) * LN2)
        gl.store(LSE + token * lse_token + heads, lse, mask=real)


@gluon.jit
def _compute(
    Q, keys, values, full, empty, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, WORK, STARTS,
    q_token, q_head, out_token, out_head, lse_token, scale, softcap,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: the softmax over each piece."""
    BLOCK_D: gl.constexpr = keys.shape[2]
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, tile_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, tile_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    program = gl.program_id(0)
    r = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, tile_layout))
    q_r = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, wide))
    q_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    begin, stop = gl.load(STARTS + program), gl.load(STARTS + program + 1)
    after = read_piece(WORK, begin)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    tile = 0
    for w in range(begin, stop):
        _, head, first, end, q_start, q_len, kv_len, partial = after
        after = read_piece(WORK, w + 1)
        q_at = (q_start + q_r // GROUP).to(gl.int64) * q_token
        q_at += (head * GROUP + q_r % GROUP) * q_head
        inside = (q_r < q_len * GROUP)[:, None] & (q_d < D)[None, :]
        q = gl.load(Q + q_at[:, None] + q_d[None, :], mask=inside, other=0.0)
        q = gl.convert_layout(q, left)
        position = kv_len - q_len + r // GROUP
        lowest = kv_len - q_len + 1 - WINDOW
        m = gl.full([BLOCK_Q], NOTHING, gl.float32, r.type.layout)
        sums = gl.zeros([BLOCK_Q, BLOCK_N], gl.float32, tile_layout)  # of each column: added last
        acc = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, tile_layout)
        for i in range(gl.cdiv(end - first, BLOCK_N)):
            start = first + i * BLOCK_N
            stage = tile % STAGES
            mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
            k = keys.index(stage).permute((1, 0)).load(right)
            s = mma_v2(q, k, gl.zeros([BLOCK_Q, BLOCK_N], gl.float32, tile_layout))
            v = values.index(stage).load(right)
            meet()  # every warp has read the tile
            mbarrier.arrive(empty.index(stage), count=1)
            tile += 1
            p, m, alpha = _weights(
                s, m, start, end, position, scale * LOG2E, softcap, QUERIES > GROUP, WINDOW, SOFTCAP
            )
            v = _without_poison(v, start, end, lowest, WINDOW)
            sums = sums * alpha[:, None] + p
            acc = mma_v2(gl.convert_layout(p.to(q.dtype), left), v, acc * alpha[:, None])
        total = gl.sum(sums, 1)
        real = r < q_len * GROUP
        if partial != 0:
            slot = w.to(gl.int64) * QUERIES + r
            write_partial(acc, m, total, PARTIAL_OUT, PARTIAL_LSE, slot, real, D)
        else:
            _write_whole(
                acc, m, total, OUT, LSE, SINKS, (q_start + r // GROUP).to(gl.int64),
                head * GROUP + r % GROUP, real, out_token, out_head, lse_token, D,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["table_row", "num_pages"])
def _decode_hopper(
    Q, k_boxes, v_boxes, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, WORK, STARTS,
    q_token, q_head, table_row, num_pages, out_token, out_head, lse_token, scale, softcap,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_boxes.block_type.shape[3]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    values = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, BLOCK_N, BLOCK_D], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                Q, keys, values, full, empty, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, WORK,
                STARTS, q_token, q_head, out_token, out_head, lse_token, scale, softcap,
                GROUP, QUERIES, BLOCK_Q, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, DEPENDENT,
            )),
            (load_pieces, (
                k_boxes, v_boxes, keys, values, full, empty, WORK, STARTS, TABLE, table_row,
                num_pages, PAGE, BLOCK_N, STAGES, WINDOW, DEPENDENT,
            )),
        ],
        [1], [40],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig:
    """How the kernel is compiled, one program an SM."""

    block_n: int
    stages: int
    registers: int  # a thread


def hopper_decode_config(head_dim: int, queries: int) -> HopperDecodeConfig:
    """The configuration for tiles of `queries` packed rows, by measurement on an H100."""
    registers = 128 if head_dim <= 128 and queries <= 16 else 240
    return HopperDecodeConfig(64, stages=2, registers=registers)


def decode_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    plan: SplitPlan,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    beside: Callable[[], None] | None = None,
    config: HopperDecodeConfig | None = None,
) -> None:
    """As `decode`, for bfloat16 and float16 pages and plans whose pieces are assigned.

    The plan's block is a multiple of the page, or of 64.  Of K and V, the kernel launched last may
    have written the positions of this step's tokens and no others: the rest is read without
    waiting for it.
    """
    spec = plan.spec
    heads, head_dim = q.shape[1:]
    pages, kv_heads, page, _ = k.shape
    group = heads // kv_heads
    queries = group * spec.max_q_len
    assert plan.partial_out.shape[1:] == (queries, head_dim), "the plan is for other shapes"
    config = config or hopper_decode_config(head_dim, queries)
    box = min(page, config.block_n)
    assert not plan.queued and spec.block % box == 0, "the plan is for another kernel"
    assert k_scale is None and v_scale is None and k.dtype == v.dtype == q.dtype
    assert q.stride(-1) == out.stride(-1) == 1
    _decode_hopper[(spec.programs,)](
        q, _boxes(k, box), _boxes(v, box), page_table, plan.partial_out,
        plan.partial_lse, out, lse, sinks, plan.work, plan.starts, q.stride(0), q.stride(1),
        page_table.stride(0), pages, out.stride(0), out.stride(1),
        0 if lse is None else lse.stride(0), scale, softcap,
        GROUP=group, QUERIES=queries, BLOCK_Q=max(16, triton.next_power_of_2(queries)),
        D=head_dim, PAGE=page, BLOCK_N=config.block_n, STAGES=config.stages, WINDOW=spec.window,
        SOFTCAP=softcap > 0, num_warps=4, maxnreg=config.registers, **dependent_launch(q.device),
    )  # fmt: skip
    if beside is not None:
        beside()
    combine(plan, page_table.shape[0], out, lse, sinks, overlapped=True)


def _boxes(tensor: Tensor, tokens: int) -> TensorDescriptor:
    """What a TMA copies of K or V at a time: tokens of a head; columns that it has not as zeros."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    block_d = max(64, triton.next_power_of_2(tensor.shape[-1]))
    return TensorDescriptor.from_tensor(tensor, [1, 1, tokens, block_d], layout)
