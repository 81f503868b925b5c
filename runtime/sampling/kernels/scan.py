# scan_groups: the maximum and the weight of each group of 256 neighbouring logits of a row.
#   grid      (group tiles, R): a program reads TILE groups, a warp one at a time
#   reads     logits [R, V] bf16, fp16 or fp32; slots, positions [R] int32; rows of the slots;
#             counts [slots, V] int16 of rows with penalties
#   writes    maxima [R, groups] fp32; sums [R, groups] fp32 of sampled rows: of
#             exp((logit - maximum) / temperature)
#   skips     rows whose slot is negative
#   math      fp32; NaN counts as +inf
#   bound     memory: the logits once, 26 us for 256 rows of 151,936 in bf16 at 3 TB/s
#   checked   tests/runtime/sampling/test_sample_kernels.py against torch_sampler.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import start_successor_and_wait
from runtime.sampling.kernels.row import (
    GROUP,
    LOG2E,
    TEMPERATURE,
    WIDTH,
    adjusted,
    is_below_min_tokens,
    is_sampled,
    number,
)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def scan_groups(
    logits,
    slots,
    positions,
    rows,
    counts,
    maxima,
    sums,
    stride_logits,
    vocab,
    num_groups,
    TILE: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        start_successor_and_wait()
    slot = tl.load(slots + place).to(tl.int64)
    if slot >= 0:
        row = rows + slot * WIDTH
        below_min_tokens = is_below_min_tokens(row, tl.load(positions + place))
        group = tl.program_id(0) * TILE + tl.arange(0, TILE)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = adjusted(
            logits + place * stride_logits,
            counts + slot * vocab,
            row,
            token,
            below_min_tokens,
            vocab,
            IN_PROMPT,
        )
        highest = tl.max(x, 1)
        out = place * num_groups + group
        tl.store(maxima + out, highest, mask=group < num_groups)
        if is_sampled(row):
            # A group that is masked as a whole has weight 0: -inf - -inf would be NaN.
            base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
            weights = tl.exp2((x - base[:, None]) * (LOG2E / number(row, TEMPERATURE)))
            tl.store(sums + out, tl.sum(weights, 1), mask=group < num_groups)
