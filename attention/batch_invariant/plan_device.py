"""BatchInvariantPlanner: the plan made on the GPU; laid out as plan.py says.

plan_batch_invariant
  grid      ceil(capacity / ITEMS_EACH); a program writes ITEMS_EACH items and their tiles' merges
  reads     cu_seqlens_q [B + 1], cache_seqlens [B] int32
  writes    items, merges, counts of a BatchInvariantPlan
  math      prefix sums over the rows give each row's first item, merge and unit; an item's row is
            the number of rows that end at or before it
  limits    tiles * splits * units of a step < 2^31
  bound     latency: two memory round trips and five sums over the rows
  checked   tests/attention/batch_invariant/test_batch_invariant_plan.py: equal to
            tests/support/attention/host_batch_invariant_plan.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.batch_invariant.plan import UNIT_ROWS, BatchInvariantPlan, BatchInvariantSpec
from attention.planner.rows_device import check_lengths, pair_of, read_lengths, write_entry

ITEMS_EACH = 8


@triton.jit
def _of_row(values, is_row):
    """values [rows] of each item's row; is_row [items, rows]."""
    return tl.sum(tl.where(is_row, values[None, :], 0), 1)


@triton.jit
def _splits(q_len, kv_len, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """-> (first split that any query of a row sees, splits from there on, at least 1)"""
    first = tl.zeros_like(kv_len)
    if WINDOW > 0:
        first = tl.maximum(kv_len - q_len + 1 - WINDOW, 0) // SPLIT
    return first, tl.maximum((kv_len + (SPLIT - 1)) // SPLIT - first, 1)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "CACHE_SEQLENS"],
)
def plan_batch_invariant(
    CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, MERGES, COUNTS, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, UNITS: tl.constexpr, UNIT_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr, ITEMS_EACH: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, MAX_ROWS)
    _, q_lens, kv_lens = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, rows, rows < num_rows)
    tiles = (q_lens * GROUP + (BLOCK_M - 1)) // BLOCK_M
    _, splits = _splits(q_lens, kv_lens, SPLIT, WINDOW)
    share = tl.sum((tiles * splits).to(tl.int64), 0) * KV_HEADS // PROGRAMS
    heights = tl.minimum((q_lens * GROUP + (UNIT_ROWS - 1)) // UNIT_ROWS, BLOCK_M // UNIT_ROWS)
    cut_units = tl.where((tiles > 0) & (splits > tl.maximum(share, 1)), tiles * splits * heights, 0)
    unit_ends = tl.cumsum(cut_units, 0)
    cut = (cut_units > 0) & (unit_ends <= UNITS)
    items = tiles * tl.where(cut, splits, 1)
    item_ends = tl.cumsum(items, 0)
    merges = tl.where(cut, tiles, 0)
    merge_ends = tl.cumsum(merges, 0)
    total = tl.sum(items, 0)
    if tl.program_id(0) == 0:
        tl.store(COUNTS, total)
        tl.store(COUNTS + 1, tl.sum(merges, 0))

    index = tl.program_id(0) * ITEMS_EACH + tl.arange(0, ITEMS_EACH)
    real = index < total
    row = tl.sum((item_ends[None, :] <= index[:, None]).to(tl.int32), 1)
    is_row = rows[None, :] == row[:, None]
    q_start, q_len, kv_len = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, real)
    first, each = _splits(q_len, kv_len, SPLIT, WINDOW)
    is_cut = _of_row(cut.to(tl.int32), is_row) > 0
    each = tl.where(is_cut, each, 1)
    within = index - _of_row(item_ends - items, is_row)
    place, split = within // each, within % each
    tile = (q_len * GROUP + (BLOCK_M - 1)) // BLOCK_M - 1 - place
    last = tl.minimum((tile * BLOCK_M + (BLOCK_M - 1)) // GROUP, q_len - 1)
    end = tl.maximum(kv_len - q_len + last + 1, 0)
    begin = tl.zeros_like(end)
    if WINDOW > 0:
        first_query = kv_len - q_len + tile * BLOCK_M // GROUP
        begin = tl.maximum(first_query + 1 - WINDOW, 0) // SPLIT * SPLIT
    begin = tl.where(is_cut, (first + split) * SPLIT, begin)
    end = tl.where(is_cut, tl.minimum(begin + SPLIT, end), end)
    height = tl.minimum((q_len * GROUP + (UNIT_ROWS - 1)) // UNIT_ROWS, BLOCK_M // UNIT_ROWS)
    unit = tl.where(is_cut, _of_row(unit_ends - cut_units, is_row) + within * height, -1)
    write_entry(ITEMS, index, row, tile, begin, end, q_start, q_len, kv_len, unit, real)
    merge = _of_row(merge_ends - merges, is_row) + place
    entry = MERGES.to(tl.pointer_type(tl.int64)) + merge.to(tl.int64)
    tl.store(entry, pair_of(index, each), mask=real & is_cut & (split == 0))


class BatchInvariantPlanner:
    """Plans steps of at most max_tokens tokens in max_rows rows into one BatchInvariantPlan."""

    def __init__(
        self,
        spec: BatchInvariantSpec,
        *,
        max_tokens: int,
        max_rows: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        assert max_rows >= 1 and spec.block_m % UNIT_ROWS == 0
        self.max_rows = max_rows
        self._plan = BatchInvariantPlan.allocate(
            spec, max_tokens=max_tokens, max_rows=max_rows, head_dim=head_dim, device=device
        )

    def plan(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor) -> BatchInvariantPlan:
        """Plan the rows of cu_seqlens_q [B + 1] and cache_seqlens [B], int32 on the device.

        Padding rows have q_len 0.  Each call overwrites and returns the same tensors.
        """
        num_rows = check_lengths(cu_seqlens_q, cache_seqlens, self.max_rows, "batch-invariant")
        plan, spec = self._plan, self._plan.spec
        plan_batch_invariant[(triton.cdiv(len(plan.items), ITEMS_EACH),)](
            cu_seqlens_q, cache_seqlens, plan.items, plan.merges, plan.counts, num_rows,
            KV_HEADS=spec.kv_heads, GROUP=spec.group, PROGRAMS=spec.programs,
            BLOCK_M=spec.block_m, SPLIT=spec.split, WINDOW=spec.window, UNITS=spec.units,
            UNIT_ROWS=UNIT_ROWS, MAX_ROWS=triton.next_power_of_2(self.max_rows),
            ITEMS_EACH=ITEMS_EACH, num_warps=4 if self.max_rows <= 256 else 8,
        )  # fmt: skip
        return plan
