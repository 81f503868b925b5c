"""Split-KV decode for Hopper (sm_90), in Gluon, warp-specialized: one warp loads, four compute.

decode_hopper: decode.py's kernel with the same plans and the same partial results.
  grid      plan.spec.programs: one or two CTAs per SM (planned_kernel.py)
  load warp (decode_hopper_load.py) fills a ring of stages for all work tiles of the program and
            runs ahead across work tiles, so that memory does not idle at their ends
  compute   (decode_hopper_tile.py) four warps share a block of keys, and the rows of a large tile;
            scores and output by mma (m16), online softmax in base 2, float32 accumulation; float8
            is converted to float16 in registers
  reads     q [T, heads, D]; k, v [pages, kv_heads, page, D], any strides; page_table [B, max_pages]
            int32; pages past a row's length or before its window are not read
  writes    as decode.py
  bound     memory: 2 * kv_len * D * bytes per KV head
  checked   tests/attention/decode/test_decode_hopper.py on a GPU, against a float64 oracle

Two pitfalls of Triton 3.6, here and in the load warp: a loop-carried variable that bounds an inner
loop is folded to its first value, hence the trip counts; and arguments of a worker warp must not be
tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.dependent_launch import dependent_launch
from attention.common.hopper import cta_barrier, tma_desc, write_partial
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import LOG2E, M_INIT
from attention.decode.combine import combine
from attention.decode.decode_hopper_config import (
    LARGE_TILE,
    HopperDecodeConfig,
    hopper_decode_config,
)
from attention.decode.decode_hopper_load import load_work_tiles, read_work_tile
from attention.decode.decode_hopper_tile import (
    add_values,
    columns,
    fetch_queries,
    no_values,
    scores,
    weights,
    write_whole,
    zero_outside,
)
from attention.kv_pool import FP8
from attention.planner.split_plan import SplitPlan

LARGE = gl.constexpr(LARGE_TILE)  # as a constant of the kernel


@gluon.jit
def _compute(
    Q, keys, values, full, empty, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    WORK, STARTS, q_token, q_head, out_token, out_head, lse_token, scale, softcap,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    OVERLAPPED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Four warps: attention over each work tile."""
    PAIRS: gl.constexpr = keys.dtype == gl.int16  # float8 in pairs
    BLOCK_D: gl.constexpr = keys.shape[2] * (2 if PAIRS else 1)
    # Each warp keeps the queries of its rows, 64 registers a thread at most: of a large tile the
    # warps share the rows, of others all have all rows, and each has its own keys.
    ACROSS_ROWS: gl.constexpr = 2 if BLOCK_Q > 32 or BLOCK_Q * BLOCK_D > LARGE else 1
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [ACROSS_ROWS, gl.num_warps() // ACROSS_ROWS], [16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, tile_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, tile_layout, 2)
    program = gl.program_id(0)
    r = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, tile_layout))
    begin, stop = gl.load(STARTS + program), gl.load(STARTS + program + 1)
    after = read_work_tile(WORK, begin)
    if DEPENDENT:
        if OVERLAPPED:
            gdc_wait()
            gdc_launch_dependents()
        elif (begin < stop) | (program == 0):  # others end at once, for the successor's CTAs
            gdc_wait()
    tile = 0
    for w in range(begin, stop):
        _, head, first, end, q_start, q_len, kv_len, partial = after
        after = read_work_tile(WORK, w + 1)
        factor = scale * LOG2E
        if K_SCALE is not None:
            factor = factor * gl.load(K_SCALE + head)
        q, factor = fetch_queries(
            Q, q_start, q_len, head, q_token, q_head, factor, left,
            GROUP, BLOCK_Q, D, BLOCK_D, PAIRS,
        )  # fmt: skip
        position, lowest = kv_len - q_len + r // GROUP, kv_len - q_len + 1 - WINDOW
        m = gl.full([BLOCK_Q], M_INIT, gl.float32, r.type.layout)
        sums = gl.zeros([BLOCK_Q, BLOCK_N], gl.float32, tile_layout)  # per column; reduced last
        acc = no_values(tile_layout, BLOCK_Q, BLOCK_D, PAIRS)
        for i in range(gl.cdiv(end - first, BLOCK_N)):
            start, stage = first + i * BLOCK_N, tile % STAGES
            mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
            s = scores(q, keys.index(stage).permute((1, 0)).load(right), BLOCK_Q, BLOCK_N, PAIRS)
            v = values.index(stage).load(right)
            cta_barrier()  # every warp has read the block
            mbarrier.arrive(empty.index(stage), count=1)
            tile += 1
            p, m, alpha = weights(
                s, m, start, end, position, factor, softcap, QUERIES > GROUP, WINDOW, SOFTCAP
            )
            v = zero_outside(v, start, end, lowest, WINDOW)
            sums = sums * alpha[:, None] + p
            acc = add_values(acc, alpha, gl.convert_layout(p.to(q[0].dtype), left), v, PAIRS)
        total = gl.sum(sums, 1)
        result = columns(acc, V_SCALE, head, PAIRS)
        real = r < q_len * GROUP
        if partial != 0:
            slot = w.to(gl.int64) * QUERIES + r
            write_partial(result, m, total, PARTIAL_OUT, PARTIAL_LSE, slot, real, D)
        else:
            write_whole(
                result, m, total, OUT, LSE, SINKS, (q_start + r // GROUP).to(gl.int64),
                head * GROUP + r % GROUP, real, out_token, out_head, lse_token, D,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["table_row", "num_pages"])
def _decode_hopper(
    Q, k_desc, v_desc, TABLE, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE, V_SCALE,
    WORK, STARTS, q_token, q_head, table_row, num_pages, out_token, out_head, lse_token, scale,
    softcap,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, OVERLAPPED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    ACROSS: gl.constexpr = k_desc.block_type.shape[3]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * ACROSS), 16, 2)
    keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, ACROSS], swizzled)
    values = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, ACROSS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                Q, keys, values, full, empty, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, K_SCALE,
                V_SCALE, WORK, STARTS, q_token, q_head, out_token, out_head, lse_token, scale,
                softcap, GROUP, QUERIES, BLOCK_Q, D, BLOCK_N, STAGES, WINDOW, SOFTCAP, OVERLAPPED,
                DEPENDENT,
            )),
            (load_work_tiles, (
                k_desc, v_desc, keys, values, full, empty, WORK, STARTS, TABLE, table_row,
                num_pages, PAGE, BLOCK_N, STAGES, WINDOW, OVERLAPPED, DEPENDENT,
            )),
        ],
        [1], [40],
    )  # fmt: skip


def most_queries(head_dim: int) -> int:
    """Packed rows of the largest tile that the registers hold."""
    across = max(64, 1 << (head_dim - 1).bit_length())
    return 2 * LARGE_TILE // across


def decode_hopper(
    inputs: KernelInputs,
    plan: SplitPlan,
    *,
    overlap: Callable[[], None] | None = None,
    config: HopperDecodeConfig | None = None,
) -> None:
    """Attention of the plan's rows as `decode`; bfloat16, float16 and float8 pages.

    The plan must not be queued; its block is a multiple of the page, or of 64.  Kernels since
    the planner's may write K and V at the positions of the plan's tokens only (q_len of each row):
    the rest is read without a wait.
    overlap  launches a kernel between this one and its combine
    """
    q, k, spec = inputs.q, inputs.k, plan.spec
    heads, head_dim = q.shape[1:]
    pages, kv_heads, page, _ = k.shape
    group = heads // kv_heads
    queries = group * spec.max_q_len
    assert spec.kv_heads == kv_heads, "the plan is for other heads"
    assert plan.partial_out.shape[1:] == (queries, head_dim), "the plan is for other shapes"
    config = config or hopper_decode_config(head_dim, queries, k.dtype.itemsize)
    box = min(page, config.block_n)
    assert not plan.queued and spec.block % box == 0, "the plan is for another kernel"
    _decode_hopper[(spec.programs,)](
        q, _kv_desc(k, box), _kv_desc(inputs.v, box), inputs.page_table, plan.partial_out,
        plan.partial_lse, inputs.out, inputs.lse, inputs.sinks, inputs.k_scale, inputs.v_scale,
        plan.work, plan.starts, q.stride(0), q.stride(1), inputs.page_table.stride(0), pages,
        *inputs.out_strides(), inputs.scale, inputs.softcap,
        GROUP=group, QUERIES=queries, BLOCK_Q=max(16, triton.next_power_of_2(queries)),
        D=head_dim, PAGE=page, BLOCK_N=config.block_n, STAGES=config.stages, WINDOW=spec.window,
        SOFTCAP=inputs.softcap > 0, OVERLAPPED=overlap is not None, num_warps=4,
        maxnreg=config.registers, **dependent_launch(q.device),
    )  # fmt: skip
    if overlap is not None:
        overlap()
    combine(plan, inputs, overlapped=True)


def _kv_desc(tensor: Tensor, tokens: int) -> TensorDescriptor:
    """A TMA descriptor of K or V, a box of tokens of a head; float8 in pairs as int16."""
    across = max(64, triton.next_power_of_2(tensor.shape[-1]))
    if tensor.dtype == FP8:
        tensor, across = tensor.view(torch.int16), across // 2
    return tma_desc(tensor, [1, 1, tokens, across])
