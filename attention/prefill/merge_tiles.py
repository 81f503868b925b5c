"""merge_tiles: merges the partial results of query tiles that were split along KV.

grid      (split tiles at most, KV heads, block_m / ROWS), so that a graph can replay any step: ROWS
          packed query rows a program.  Programs without a split tile exit at once, but the first
reads     plan.partial_out, partial_lse, items, merges
writes    out [T, heads, D], lse [T, heads]
math      float32, base 2; splits are added in order: deterministic for a plan
bound     latency: two reads that depend on each other, then TOGETHER splits at a time
checked   tests/attention/prefill/test_prefill_kernel.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, finish
from attention.planner.prefill_tiles import TilePlan

ROWS, TOGETHER = 8, 4  # packed query rows of a program, and splits whose loads are in flight


@triton.jit
def _merge(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, ITEMS, MERGES, COUNTS,
    out_token, out_head, lse_token,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    merge, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The plan is complete: its kernel does not launch its successor early.
    real_merge = merge < tl.load(COUNTS + 1)
    if not real_merge and (merge > 0 or head > 0 or part > 0):
        return
    first = tl.load(MERGES + merge * 2, mask=real_merge, other=0)
    splits = tl.load(MERGES + merge * 2 + 1, mask=real_merge, other=0)
    item = ITEMS + first * 8
    tile, q_start, q_len = tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
    if DEPENDENT:
        wait_for_launcher()
    if not real_merge:
        return
    row = part * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    r = tile * BLOCK_M + row
    real = r < q_len * GROUP
    inside = real[:, None] & (d < D)[None, :]
    m = tl.full([ROWS], M_INIT, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, splits, TOGETHER):
        for i in tl.static_range(TOGETHER):
            split = (first + start + i) * tl.num_programs(1) + head
            slot = split.to(tl.int64) * BLOCK_M + row
            valid = real & (start + i < splits)
            lse = tl.load(PARTIAL_LSE + slot, mask=valid, other=float("-inf"))
            at = PARTIAL_OUT + slot[:, None] * D + d[None, :]
            out = tl.load(at, mask=inside & valid[:, None], other=0.0)
            # The output of an empty split may be NaN.
            out = tl.where((lse > float("-inf"))[:, None], out, 0.0)
            m_new = tl.maximum(m, lse)
            weight, alpha = tl.exp2(lse - m_new), tl.exp2(m - m_new)
            total = total * alpha + weight
            acc = acc * alpha[:, None] + out * weight[:, None]
            m = m_new
    heads = head * GROUP + r % GROUP
    token = (q_start + r // GROUP).to(tl.int64)
    factor, lse = finish(m, total, SINKS, heads, real)
    out_at = OUT + (token * out_token + heads * out_head)[:, None] + d[None, :]
    tl.store(out_at, (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside)
    if LSE is not None:
        tl.store(LSE + token * lse_token + heads, lse, mask=real)


def merge_tiles(tiles: TilePlan, inputs: KernelInputs) -> None:
    """Write out and lse of the tiles in tiles.merges, from tiles.partial_out and partial_lse."""
    spec, head_dim = tiles.spec, inputs.out.shape[-1]
    assert spec.block_m % ROWS == 0
    split_tiles = spec.split_items // 2  # each has two items or more
    if split_tiles == 0:
        return
    _merge[(split_tiles, spec.kv_heads, spec.block_m // ROWS)](
        tiles.partial_out, tiles.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        tiles.items, tiles.merges, tiles.counts, *inputs.out_strides(),
        GROUP=spec.group, BLOCK_M=spec.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), ROWS=ROWS, TOGETHER=TOGETHER, num_warps=4,
        **dependent_launch(inputs.out.device),
    )  # fmt: skip
