"""DeviceTiler: the tile plan made on the GPU; the integers equal those of prefill_tiles.py.

plan_tiles
  grid      ceil(capacity / TILES_EACH); a program writes TILES_EACH tiles at their sorted places.
            In a step of so few tiles that they may be split, program 0 writes them all
  reads     cu_seqlens_q [B + 1], cache_seqlens [B] int32
  writes    items, merges, counts of a TilePlan; queue = 0
  math      No sort: within a row, the blocks up to a tile's end grow with the tile, so that one
            division counts the row's tiles longer than a given length; the sum over the rows is
            the sorted position of a tile of that length.
            Split tiles use histograms: where rows end among the tiles gives each tile's row, where
            tiles end among the items gives each item's tile.
  limits    kv_len * group < 2^31
  bound     latency: two memory round trips, a prefix sum, two sums over the rows
  checked   tests/attention/planner/test_prefill_tiles.py: equal to plan_tiles in numpy
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.rows_device import check_lengths, pair_of, read_lengths, write_entry

TILES_EACH = 8


@triton.jit
def _longer(blocks, tiles, q_len, kv_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, LONGEST: tl.constexpr):  # fmt: skip
    """The number of a row's tiles whose sort key exceeds `blocks`."""
    query = blocks * BLOCK_N - (kv_len - q_len)  # the first whose tile ends past those blocks
    tile = tl.minimum(tl.maximum(query, 0) * GROUP // BLOCK_M, tiles)
    return tl.where((query < q_len) & (blocks < LONGEST), tiles - tile, 0)


@triton.jit
def _kv_range(tile, q_len, kv_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """A row's tile -> (first block, end in KV positions), as in tiles_of."""
    last = tl.minimum((tile * BLOCK_M + (BLOCK_M - 1)) // GROUP, q_len - 1)
    end = tl.maximum(kv_len - q_len + last + 1, 0)
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first_query = tile * BLOCK_M // GROUP
        first = tl.maximum(kv_len - q_len + first_query + (1 - WINDOW), 0) // BLOCK_N
    return first, end


@triton.jit
def _place_tiles(
    CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, rows, tiles, ends, q_lens, kv_lens, total,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    LONGEST: tl.constexpr, TILES_EACH: tl.constexpr,
):  # fmt: skip
    """Write this program's tiles at their positions in the order longest first."""
    index = tl.program_id(0) * TILES_EACH + tl.arange(0, TILES_EACH)
    earlier = ends[None, :] <= index[:, None]  # [TILES_EACH, MAX_ROWS]
    row = tl.sum(earlier.to(tl.int32), 1)
    tile = index - tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
    q_start, q_len, kv_len = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, index < total)
    first, end = _kv_range(tile, q_len, kv_len, GROUP, BLOCK_M, BLOCK_N, WINDOW)
    key = tl.minimum((end + (BLOCK_N - 1)) // BLOCK_N, LONGEST)
    # Stable order: earlier rows count tiles as long as this one, later rows only longer ones.  In
    # its own row, earlier tiles are never longer.
    limit = key[:, None] - (rows[None, :] < row[:, None]).to(tl.int32)
    longer = _longer(limit, tiles[None, :], q_lens[None, :], kv_lens[None, :],
                     GROUP, BLOCK_M, BLOCK_N, LONGEST)  # fmt: skip
    own = (q_len * GROUP + (BLOCK_M - 1)) // BLOCK_M
    as_long = _longer(key - 1, own, q_len, kv_len, GROUP, BLOCK_M, BLOCK_N, LONGEST)
    place = tl.sum(longer, 1) + tile - (own - as_long)
    write_entry(
        ITEMS, place, row, tile, first * BLOCK_N, end, q_start, q_len, kv_len,
        tl.zeros_like(row), index < total,
    )  # fmt: skip


@triton.jit
def _cut_tiles(
    CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, MERGES, COUNTS, tiles, ends, total,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SPLIT_ITEMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write all tiles, split along KV into at most SPLIT_ITEMS items, which run at once."""
    index = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    row = tl.cumsum(tl.histogram(ends, BLOCK), 0)  # index of each tile's row
    row = tl.minimum(row, tiles.shape[0] - 1)
    real = index < total
    q_start, q_len, kv_len = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, real)
    tile = index - tl.gather(ends - tiles, row, 0)
    first, end = _kv_range(tile, q_len, kv_len, GROUP, BLOCK_M, BLOCK_N, WINDOW)
    blocks = tl.where(real, (end + (BLOCK_N - 1)) // BLOCK_N - first, 0)
    longest = tl.max(blocks, 0)
    # Splits have at least MIN_BLOCKS blocks, so that more splits of the longest change nothing.
    most = tl.maximum((longest + (MIN_BLOCKS - 1)) // MIN_BLOCKS, 1)
    low, high = longest * 0 + 1, tl.minimum(most, SPLIT_ITEMS)
    while low < high:
        middle = (low + high + 1) // 2
        size = tl.maximum((longest + middle - 1) // middle, MIN_BLOCKS)
        count = tl.sum(tl.where(real, tl.maximum((blocks + size - 1) // size, 1), 0), 0)
        low = tl.where(count <= SPLIT_ITEMS, middle, low)
        high = tl.where(count <= SPLIT_ITEMS, high, middle - 1)
    size = tl.maximum((longest + low - 1) // low, MIN_BLOCKS)
    splits = tl.where(real, tl.maximum((blocks + size - 1) // size, 1), 0)

    item_ends = tl.cumsum(splits, 0)
    cut = splits > 1
    merge = tl.cumsum(cut.to(tl.int32), 0) - 1
    tl.store(
        MERGES.to(tl.pointer_type(tl.int64)) + merge, pair_of(item_ends - splits, splits), mask=cut
    )
    items = tl.sum(splits, 0)
    tl.store(COUNTS, items)
    tl.store(COUNTS + 1, tl.sum(cut.to(tl.int32), 0))

    owner = tl.cumsum(tl.histogram(item_ends, BLOCK), 0)  # index of each item's tile
    owner = tl.minimum(owner, BLOCK - 1)
    row, tile = tl.gather(row, owner, 0), tl.gather(tile, owner, 0)
    split = index - tl.gather(item_ends - splits, owner, 0)
    splits = tl.gather(splits, owner, 0)
    real = index < items
    q_start, q_len, kv_len = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, row, real)
    first, end = _kv_range(tile, q_len, kv_len, GROUP, BLOCK_M, BLOCK_N, WINDOW)
    blocks = (end + (BLOCK_N - 1)) // BLOCK_N - first
    splits = tl.maximum(splits, 1)
    size = (blocks + splits - 1) // splits
    split_first = (first + tl.minimum(split * size, blocks)) * BLOCK_N
    split_end = tl.minimum((first + tl.minimum((split + 1) * size, blocks)) * BLOCK_N, end)
    write_entry(
        ITEMS, index, row, tile, split_first, split_end, q_start, q_len, kv_len,
        (splits > 1).to(tl.int32), real,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "CACHE_SEQLENS"],
)
def plan_tiles(
    CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, MERGES, COUNTS, QUEUE, num_rows,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    LONGEST: tl.constexpr, MIN_Q_LEN: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    SPLIT_ITEMS: tl.constexpr, BLOCK: tl.constexpr, MAX_ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
):  # fmt: skip
    rows = tl.max_contiguous(tl.arange(0, MAX_ROWS), 1)
    _, q_lens, kv_lens = read_lengths(CU_SEQLENS_Q, CACHE_SEQLENS, rows, rows < num_rows)
    tiles = tl.where(q_lens >= MIN_Q_LEN, (q_lens * GROUP + (BLOCK_M - 1)) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    if tl.program_id(0) == 0:
        seen = tl.minimum(kv_lens, q_lens - 1 + WINDOW) if WINDOW > 0 else kv_lens
        tl.store(COUNTS + 2, tl.sum(tl.where(tiles > 0, seen, 0), 0))
        tl.store(QUEUE, 0)
    if total >= SPLIT_ITEMS:
        if tl.program_id(0) == 0:
            tl.store(COUNTS, total)
            tl.store(COUNTS + 1, 0)
        if tl.program_id(0) * TILES_EACH < total:
            _place_tiles(
                CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, rows, tiles, ends, q_lens, kv_lens, total,
                GROUP, BLOCK_M, BLOCK_N, WINDOW, LONGEST, TILES_EACH,
            )  # fmt: skip
    elif tl.program_id(0) == 0:
        _cut_tiles(
            CU_SEQLENS_Q, CACHE_SEQLENS, ITEMS, MERGES, COUNTS, tiles, ends, total,
            GROUP, BLOCK_M, BLOCK_N, WINDOW, MIN_BLOCKS, SPLIT_ITEMS, BLOCK,
        )  # fmt: skip


class DeviceTiler:
    """Plans steps of at most max_tokens tokens in max_rows rows into one preallocated TilePlan.

    max_tokens counts the tokens of all rows, decode rows included.
    """

    def __init__(
        self,
        spec: TileSpec,
        *,
        max_tokens: int,
        max_rows: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        assert max_rows >= 1 and spec.min_q_len >= 1 and spec.min_blocks >= 1
        self.max_rows = max_rows
        self._tiles = TilePlan.allocate(
            spec, max_tokens=max_tokens, max_rows=max_rows, head_dim=head_dim, device=device
        )

    def plan(self, cu_seqlens_q: Tensor, cache_seqlens: Tensor) -> TilePlan:
        """Plan the rows of cu_seqlens_q [B + 1] and cache_seqlens [B], int32 on the device.

        Padding rows have q_len 0.  Each call overwrites and returns the same tensors.  Raises
        ValueError if B exceeds max_rows.
        """
        num_rows = check_lengths(cu_seqlens_q, cache_seqlens, self.max_rows, "tile")
        tiles, spec = self._tiles, self._tiles.spec
        plan_tiles[(triton.cdiv(len(tiles.items), TILES_EACH),)](
            cu_seqlens_q, cache_seqlens, tiles.items, tiles.merges, tiles.counts, tiles.queue,
            num_rows,
            GROUP=spec.group, BLOCK_M=spec.block_m, BLOCK_N=spec.block_n, WINDOW=spec.window,
            LONGEST=spec.longest_key, MIN_Q_LEN=spec.min_q_len, MIN_BLOCKS=spec.min_blocks,
            SPLIT_ITEMS=spec.split_items, BLOCK=triton.next_power_of_2(spec.split_items + 1),
            MAX_ROWS=triton.next_power_of_2(self.max_rows), TILES_EACH=TILES_EACH,
            num_warps=4 if self.max_rows <= 256 else 8,
        )  # fmt: skip
        return tiles
