# finish_rows: the token of each row, and what its slot remembers of it.
#   grid      (R,)
#   reads     maxima, sums [R, groups] of scan_groups, or for rows that leave tokens out the sums
#             and the threshold [R] of search_thresholds; 256 logits of the row
#   writes    tokens, usable [R]; last_token [slots]; counts [slots, V] of rows with penalties
#   math      greedy: the first of the largest.  Others: the first token whose cumulative weight
#             exceeds u * total; prefix sums over groups, then inside one, in fp64
#   bound     latency: three dependent loads; 6 KB a row
#   checked   tests/runtime/test_sample_kernels.py against runtime/sampler.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.launch import start_successor_and_wait
from runtime.kernels.sample_row import (
    GREEDY_BELOW,
    GROUP,
    LOG2E,
    PENALTIES,
    TEMPERATURE,
    WIDTH,
    adjusted,
    draws,
    kept,
    number,
    too_early,
    trims,
    uniform,
)


@triton.jit
def _first(index, found, otherwise):
    """The least index where `found`, else `otherwise`."""
    least = tl.min(tl.where(found, index, 0x7FFFFFFF), 0)
    return tl.where(least == 0x7FFFFFFF, otherwise, least)


@triton.jit
def _pick(index, weights, target):
    """(the first index whose cumulative weight exceeds the target, the weight before it)."""
    some = weights > 0
    last = tl.max(tl.where(some, index, 0), 0)  # if rounding puts the target at the end
    chosen = _first(index, some & (tl.cumsum(weights, 0) > target), last)
    return chosen, tl.sum(tl.where(index < chosen, weights, 0.0), 0)


@triton.jit(
    do_not_specialize_on_alignment=["slots", "positions", "last_token", "tokens_out", "usable_out"]
)
def finish_rows(
    logits,
    slots,
    positions,
    rows,
    counts,
    maxima,
    sums,
    thresholds,
    last_token,
    tokens_out,
    usable_out,
    stride_logits,
    vocab,
    num_groups,
    PADDED: tl.constexpr,  # groups, rounded up to a power of two
    IN_PROMPT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        start_successor_and_wait()
    slot = tl.load(slots + place).to(tl.int64)
    if slot < 0:
        tl.store(tokens_out + place, -1)
        tl.store(usable_out + place, 1)
    else:
        row = rows + slot * WIDTH
        position = tl.load(positions + place)
        group = tl.arange(0, PADDED)
        inside = group < num_groups
        highest = tl.load(maxima + place * num_groups + group, mask=inside, other=-float("inf"))
        best = tl.max(highest, 0)
        usable = (best > -float("inf")) & (best < float("inf"))
        drawing = draws(row) & usable
        trimmed = drawing & trims(row)
        factor = LOG2E / tl.maximum(number(row, TEMPERATURE), GREEDY_BELOW)
        chosen = _first(group, highest == best, 0)
        rest = tl.zeros([], tl.float64)
        if drawing:
            weights = tl.load(sums + place * num_groups + group, mask=inside, other=0.0)
            if not trimmed:
                weights *= tl.exp2((highest - best) * factor)
            weights = weights.to(tl.float64)
            target = uniform(row, position) * tl.sum(weights, 0)
            chosen, before = _pick(group, weights, target)
            rest = target - before
        index = tl.arange(0, GROUP)
        token = chosen * GROUP + index
        x = adjusted(
            logits + place * stride_logits,
            counts + slot * vocab,
            row,
            token,
            too_early(row, position),
            vocab,
            IN_PROMPT,
        )
        winner = _first(index, x == best, 0)
        if drawing:
            weights = tl.exp2((x - best) * factor)
            if trimmed:
                keeps = kept(x, best, tl.load(thresholds + place), row)
                weights = tl.where(keeps, weights, 0.0)
            winner, _ = _pick(index, weights.to(tl.float64), rest)
        winner = tl.minimum(chosen * GROUP + winner, vocab - 1)
        tl.store(tokens_out + place, winner.to(tokens_out.dtype.element_ty))
        tl.store(usable_out + place, usable.to(usable_out.dtype.element_ty))
        tl.store(last_token + slot, winner.to(last_token.dtype.element_ty))
        if tl.load(row + PENALTIES) != 0:
            seen = counts + slot * vocab + winner
            old = tl.load(seen).to(tl.int32)
            full = (old & (IN_PROMPT - 1)) == IN_PROMPT - 1
            tl.store(seen, tl.where(full, old, old + 1).to(counts.dtype.element_ty))
