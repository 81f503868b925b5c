"""merge_tiles: merges the partial results of query tiles that were split along KV.

grid      fixed (plan.spec.programs), so that a graph can replay any step; program p runs work
          p, p + programs and so on, each ROWS packed query rows of a tile and KV head.  All exit at
          once if no tile is split
reads     plan.partial_out, partial_lse, items, merges
writes    out [T, heads, D], lse [T, heads]
math      float32, base 2; splits are added in order: deterministic for a plan
bound     memory: the partial results, at most split_items * kv_heads * block_m * D * 4 bytes
checked   tests/attention/prefill/test_prefill_kernel.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.kernel_inputs import KernelInputs
from attention.common.softmax import M_INIT, finish
from attention.planner.prefill_tiles import TilePlan

ROWS = 8


@triton.jit
def _merge(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, ITEMS, MERGES, COUNTS,
    out_token, out_head, lse_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    parts: tl.constexpr = BLOCK_M // ROWS
    work = tl.load(COUNTS + 1) * (KV_HEADS * parts)
    d = tl.arange(0, BLOCK_D)
    for w in range(tl.program_id(0), work, tl.num_programs(0)):
        merge, head, part = w // (KV_HEADS * parts), w // parts % KV_HEADS, w % parts
        first, splits = tl.load(MERGES + merge * 2), tl.load(MERGES + merge * 2 + 1)
        item = ITEMS + first * 8
        tile, q_start, q_len = tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
        row = part * ROWS + tl.arange(0, ROWS)
        r = tile * BLOCK_M + row
        real = r < q_len * GROUP
        inside = real[:, None] & (d < D)[None, :]
        slot = (first * KV_HEADS + head).to(tl.int64) * BLOCK_M + row
        m = tl.full([ROWS], M_INIT, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for _ in range(splits):
            lse = tl.load(PARTIAL_LSE + slot, mask=real, other=float("-inf"))
            used = lse > float("-inf")  # the output of an empty split may be NaN: it is not loaded
            at = PARTIAL_OUT + slot[:, None] * D + d[None, :]
            out = tl.load(at, mask=inside & used[:, None], other=0.0)
            m_new = tl.maximum(m, lse)
            weight, alpha = tl.exp2(lse - m_new), tl.exp2(m - m_new)
            total = total * alpha + weight
            acc = acc * alpha[:, None] + out * weight[:, None]
            m = m_new
            slot += KV_HEADS * BLOCK_M
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
    _merge[(spec.programs,)](
        tiles.partial_out, tiles.partial_lse, inputs.out, inputs.lse, inputs.sinks,
        tiles.items, tiles.merges, tiles.counts, *inputs.out_strides(),
        KV_HEADS=spec.kv_heads, GROUP=spec.group, BLOCK_M=spec.block_m, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), ROWS=ROWS, num_warps=4,
        **dependent_launch(inputs.out.device),
    )  # fmt: skip
