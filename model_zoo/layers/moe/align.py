"""align: the pairs of a token and an expert by expert, and the tiles that they make up.

align
  grid      (E,): a program of each expert reads all pairs
  reads     ids [T, k] int32; pairs of E and more are in no tile: their experts are not here
  writes    of expert e: counts[e], and its pairs, ascending, at pairs[e * T ..]; zeros into
            arrivals, for the kernel that sums.  The last program to arrive also writes the number
            of tiles, and of each tile of at most `rows` pairs the expert + 1024 times its number
            among the expert's
            If sorted rows are asked for: rows of x, in the order of the experts, and of each tile
            the first of them and their number
  math      a pair's rank among an expert's is a sum over the preceding ones: the same at every run
  bound     latency: T k / 8192 steps
  checked   tests/model_zoo/layers/moe/test_align.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.gemm.split_k import _is_last_to_arrive
from model_zoo.moe_config import MAX_EXPERTS

EXPERTS = tl.constexpr(MAX_EXPERTS)
ALIGNED = 4  # int32 numbers of 16 bytes
STEP = 8192  # pairs that a program reads at once, at most
AT_ONCE, COLUMNS = tl.constexpr(8), tl.constexpr(512)  # of rows of x that are copied


@triton.jit(do_not_specialize=["num_pairs", "tokens", "num_arrivals", "rows"])
def _align(
    IDS, PAIRS, COUNTS, TILES, NUM_TILES, ARRIVALS, ARRIVED, num_pairs, tokens, num_arrivals, rows,
    X, SORTED, TILE_ROWS, TILE_COUNTS, K, x_row, E: tl.constexpr, BLOCK_E: tl.constexpr,
    STEP: tl.constexpr, TOP_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    if DEPENDENT:
        wait_for_launcher()
    mine = PAIRS + expert.to(tl.int64) * tokens
    count, before = 0, 0
    for start in range(0, num_pairs, STEP):
        pair = start + tl.arange(0, STEP)
        ids = tl.load(IDS + pair, mask=pair < num_pairs, other=E)
        is_mine = ids == expert
        before += tl.sum((ids < expert).to(tl.int32), 0)
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(mine + count + rank - 1, pair, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(COUNTS + expert, count)
    each = tl.cdiv(num_arrivals, E)
    for start in range(0, each, STEP):
        place = start + tl.arange(0, STEP)
        at = expert * each + place
        zeros = tl.zeros([STEP], tl.int32)
        tl.store(ARRIVALS + at, zeros, mask=(place < each) & (at < num_arrivals))
    if _is_last_to_arrive(ARRIVED, E):
        e = tl.arange(0, BLOCK_E)
        counts = tl.load(COUNTS + e, mask=e < E, other=0, cache_modifier=".cg")
        tiles = (counts + rows - 1) // rows
        first = tl.cumsum(tiles, 0) - tiles
        tl.store(NUM_TILES, tl.sum(tiles, 0))
        for i in range(0, tl.max(tiles, 0)):
            tl.store(TILES + first + i, e + i * EXPERTS, mask=i < tiles)
            if SORTED is not None:
                row = tl.cumsum(counts, 0) - counts + i * rows
                tl.store(TILE_ROWS + first + i, row, mask=i < tiles)
                real = tl.minimum(counts - i * rows, rows)
                tl.store(TILE_COUNTS + first + i, real, mask=i < tiles)
    if SORTED is not None:
        _copy_rows(X, SORTED, mine, count, before, K, x_row, TOP_K)


@triton.jit
def _copy_rows(X, SORTED, PAIRS, count, before, K, x_row, TOP_K: tl.constexpr):
    """Rows of x of an expert's pairs -> SORTED [T k, K] from row `before` on."""
    tl.debug_barrier()  # other threads have stored the pairs
    for start in range(0, count, AT_ONCE):
        r = start + tl.arange(0, AT_ONCE)
        pair = tl.load(PAIRS + r, mask=r < count, other=0, cache_modifier=".cg")
        read = X + (pair // TOP_K).to(tl.int64)[:, None] * x_row
        written = SORTED + (before + r).to(tl.int64)[:, None] * K
        for column in range(0, K, COLUMNS):
            k = (column + tl.arange(0, COLUMNS))[None, :]
            mask = (r < count)[:, None] & (k < K)
            tl.store(written + k, tl.load(read + k, mask=mask), mask=mask)


@dataclass(frozen=True, slots=True)
class AlignedPairs:
    """The pairs of T tokens by expert; a pair is token * k + the expert's place among its k."""

    pairs: Tensor  # [E, T] int32: the first counts[e] of a row
    counts: Tensor  # [E] int32
    tiles: Tensor  # [most] int32: expert + MAX_EXPERTS * number of the tile among the expert's
    num_tiles: Tensor  # [1] int32
    arrivals: Tensor  # int32 zeros
    # Of sorted rows, or None:
    rows: Tensor | None = None  # [T k, K]: rows of x by expert
    tile_rows: Tensor | None = None  # [most] int32: a tile's first of them
    tile_counts: Tensor | None = None  # [most] int32: how many of them it has

    @property
    def most_tiles(self) -> int:
        """What num_tiles cannot exceed."""
        return len(self.tiles)


def align(
    ids: Tensor, num_experts: int, rows: int, num_arrivals: int, x: Tensor | None = None
) -> AlignedPairs:
    """ids [T, k] int32 -> the tiles of at most `rows` pairs.

    In a row of ids those below num_experts are different ones.

    num_arrivals: how many zeros to write
    x: [T, K], whose rows are to be sorted
    """
    (tokens, top_k), device = ids.shape, ids.device
    num_pairs = tokens * top_k
    most = min(num_pairs, num_pairs // rows + num_experts)
    listed = 0 if x is None else most
    sizes = (num_experts * tokens, num_experts, most, 1, num_arrivals, listed, listed)
    parts = _aligned_parts(sizes, device)
    sorted_rows = None if x is None else x.new_empty(num_pairs, x.shape[1])
    found = AlignedPairs(
        parts[0].view(num_experts, tokens), *parts[1:5], sorted_rows,
        *((None, None) if x is None else parts[5:]),
    )  # fmt: skip
    step = min(STEP, max(128, triton.next_power_of_2(num_pairs)))
    _align[(num_experts,)](
        ids, found.pairs, found.counts, found.tiles, found.num_tiles, found.arrivals,
        workspace(device)[1], num_pairs, tokens, num_arrivals, rows, x, sorted_rows,
        found.tile_rows, found.tile_counts, 0 if x is None else x.shape[1],
        0 if x is None else x.stride(0), E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), STEP=step, TOP_K=top_k,
        num_warps=8 if step >= 2048 else 4, **dependent_launch(device),
    )  # fmt: skip
    return found


def _aligned_parts(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """int32 tensors in one memory, each of which begins at a multiple of 16 bytes: Triton compiles
    kernels once more for pointers that do not."""
    rooms = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    whole = torch.empty(sum(rooms), dtype=torch.int32, device=device)
    return [part[:size] for part, size in zip(whole.split(rooms), sizes, strict=True)]
