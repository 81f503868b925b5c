"""align: the pairs of a token and an expert by expert, and the tiles that they make up.

align
  grid      (E,): a program of each expert reads all pairs
  reads     ids [T, k] int32
  writes    of expert e: counts[e], and its pairs, ascending, at pairs[e * T ..]; zeros into
            arrivals, for the kernel that sums.  The last program to arrive also writes the number
            of tiles, and of each tile of at most `rows` pairs the expert + 1024 times its number
            among the expert's
  math      a pair's rank among an expert's is a sum over the preceding ones: the same at every run
  bound     latency: T k / 8192 steps
  checked   tests/model_zoo/layers/moe/test_align.py
"""

from __future__ import annotations

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
STEP = 8192  # pairs that a program reads at once, at most


@triton.jit(do_not_specialize=["num_pairs", "tokens", "num_arrivals"])
def _align(
    IDS, PAIRS, COUNTS, TILES, NUM_TILES, ARRIVALS, ARRIVED, num_pairs, tokens, num_arrivals,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    if DEPENDENT:
        wait_for_launcher()
    mine = PAIRS + expert.to(tl.int64) * tokens
    count = 0
    for start in range(0, num_pairs, STEP):
        pair = start + tl.arange(0, STEP)
        is_mine = tl.load(IDS + pair, mask=pair < num_pairs, other=-1) == expert
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
        tiles = (counts + ROWS - 1) // ROWS
        first = tl.cumsum(tiles, 0) - tiles
        tl.store(NUM_TILES, tl.sum(tiles, 0))
        for i in range(0, tl.max(tiles, 0)):
            tl.store(TILES + first + i, e + i * EXPERTS, mask=i < tiles)


@dataclass(frozen=True, slots=True)
class AlignedPairs:
    """The pairs of T tokens by expert; a pair is token * k + the expert's place among its k."""

    pairs: Tensor  # [E, T] int32: the first counts[e] of a row
    counts: Tensor  # [E] int32
    tiles: Tensor  # [most] int32: expert + MAX_EXPERTS * number of the tile among the expert's
    num_tiles: Tensor  # [1] int32
    arrivals: Tensor  # int32 zeros

    @property
    def most_tiles(self) -> int:
        """What num_tiles cannot exceed."""
        return len(self.tiles)


def align(ids: Tensor, num_experts: int, rows: int, num_arrivals: int) -> AlignedPairs:
    """ids [T, k] int32, different ones in a row -> the tiles of at most `rows` pairs.

    num_arrivals: how many zeros to write
    """
    (tokens, top_k), device = ids.shape, ids.device
    num_pairs = tokens * top_k
    most = min(num_pairs, num_pairs // rows + num_experts)
    sizes = (num_experts * tokens, num_experts, most, 1, num_arrivals)
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    found = AlignedPairs(parts[0].view(num_experts, tokens), *parts[1:])
    step = min(STEP, max(128, triton.next_power_of_2(num_pairs)))
    _align[(num_experts,)](
        ids, found.pairs, found.counts, found.tiles, found.num_tiles, found.arrivals,
        workspace(device)[1], num_pairs, tokens, num_arrivals, E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), ROWS=rows, STEP=step,
        num_warps=8 if step >= 2048 else 4, **dependent_launch(device),
    )  # fmt: skip
    return found
