"""The filter threshold of a row with more than FEW candidates, without a sort.

The least kept logit is the least v such that the tokens above it number less than k, or weigh less
than p of the total.  Each pass over the groups whose maximum reaches the lower bound compares their
logits with PIVOTS between the bounds: evenly spaced by value, later by representation, so that it
terminates: with two neighbours of the logits' type, or with one token or equal tokens between the
bounds.  Sums are in fp32 a lane and in fp64 across lanes, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.sampling.kernels.groups import LANES, activate, load_active
from runtime.sampling.kernels.row import PENALTIES, TOP_K, TOP_P, kept, number

PIVOTS = tl.constexpr(4)
EVEN_PASSES = tl.constexpr(8)  # with pivots evenly spaced by value
# Phases: count tokens for top-k; with top-p, sum the weights that top-k keeps; search for top-p.
BY_NUMBER, WEIGH, BY_WEIGHT, DONE = (tl.constexpr(phase) for phase in range(4))


@triton.jit
def _key(value, shift):
    """An integer that orders float32 values as their value does; neighbours differ by 1.

    shift: low bits that are the same in all numbers of the logits' type, 16 for bfloat16.
    """
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift).to(tl.int64)


@triton.jit
def _value(key, shift):
    """The float32 of a key."""
    bits = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, evenly, shift):
    """[PIVOTS] keys between low and high, neither included; ascending."""
    index = tl.arange(0, PIVOTS) + 1
    if evenly:
        bottom, top = _value(low, shift), _value(high, shift)
        value = bottom + (top - bottom) * (index.to(tl.float32) / (PIVOTS + 1))
        keys = _key(value, shift)
    else:
        keys = low + (high - low) * index // (PIVOTS + 1)
    return tl.minimum(tl.maximum(keys, low + 1), high - 1)


@triton.jit
def _at(index, values, where):
    return tl.sum(tl.where(index == where, values, 0), 0)


@triton.jit
def _added(total, x, pivot, weight):
    """Each lane's weight of the logits that reach the pivot, added to its total [CHUNK, LANES]."""
    return total + tl.sum(tl.where(x >= pivot, weight, 0.0), 2)


@triton.jit
def _whole(total):
    return tl.sum(tl.sum(total, 1).to(tl.float64), 0)


@triton.jit
def _measure(
    logits,
    counts,
    row,
    active,
    end,
    pivots,
    ground,
    ceiling,
    by_number,
    best,
    factor,
    below_min_tokens,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """([PIVOTS] fp64, the number or the weight of the tokens that reach each pivot; the least logit
    that reaches the ground, and the largest below the ceiling)."""
    # One variable a pivot: with a dimension for them, logits would move between threads.
    index = tl.arange(0, PIVOTS)
    p0, p1 = _at(index, pivots, 0), _at(index, pivots, 1)
    p2, p3 = _at(index, pivots, 2), _at(index, pivots, 3)
    t0 = tl.zeros([CHUNK, LANES], tl.float32)
    t1, t2, t3 = t0, t0, t0
    bottom, roof = t0 + float("inf"), t0 - float("inf")
    for start in tl.range(0, end, CHUNK, num_stages=STAGES):
        _, _, x = load_active(
            logits,
            counts,
            row,
            active,
            start,
            end,
            below_min_tokens,
            vocab,
            num_groups,
            CHUNK,
            IN_PROMPT,
        )
        weight = tl.where(by_number, 1.0, tl.exp2((x - best) * factor))
        t0, t1 = _added(t0, x, p0, weight), _added(t1, x, p1, weight)
        t2, t3 = _added(t2, x, p2, weight), _added(t3, x, p3, weight)
        bottom = tl.minimum(bottom, tl.min(tl.where(x >= ground, x, float("inf")), 2))
        roof = tl.maximum(roof, tl.max(tl.where(x < ceiling, x, -float("inf")), 2))
    lower = tl.where(index == 0, _whole(t0), _whole(t1))
    upper = tl.where(index == 2, _whole(t2), _whole(t3))
    sums = tl.where(index < 2, lower, upper)
    return sums, tl.min(tl.min(bottom, 1), 0), tl.max(tl.max(roof, 1), 0)


@triton.jit
def _narrowed(keys, measures, target, low, low_measure, above, above_measure):
    """The adjacent bounds or pivots of which the lower one reaches the target and the upper not."""
    index = tl.arange(0, PIVOTS)
    reached = tl.sum((measures >= target).to(tl.int32), 0)  # they descend: the first `reached` do
    if reached > 0:
        low = _at(index, keys, reached - 1)
        low_measure = _at(index, measures, reached - 1)
    if reached < PIVOTS:
        above = _at(index, keys, reached)
        above_measure = _at(index, measures, reached)
    return low, low_measure, above, above_measure


@triton.jit
def search(
    logits, counts, row, active, group, high, least, total, best, factor, below_min_tokens,
    SHIFT: tl.constexpr, vocab, num_groups, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):  # fmt: skip
    """The least logit kept, or a value between it and the next smaller one, which is dropped.

    least: a lower bound of all kept logits
    """
    top_k, top_p = tl.load(row + TOP_K), number(row, TOP_P)
    # With penalties, logits need not be representable in their type.
    shift = tl.where(tl.load(row + PENALTIES) != 0, 0, SHIFT)
    # The tokens that reach the lower bound meet the target, those that reach the upper do not.
    low, top = _key(least, shift) - 1, _key(best, shift) + 1
    above, above_measure = top, total * 0
    low_measure = total * 0 + 1e9
    target = tl.where(top_k > 0, top_k.to(tl.float64), top_p.to(tl.float64) * total)
    phase = tl.where(top_k > 0, BY_NUMBER, tl.where(top_p < 1.0, BY_WEIGHT, DONE))
    passes = 0
    index = tl.arange(0, PIVOTS)
    while phase != DONE:
        end = activate(active, group, high >= _value(low, shift))
        keys = _pivots(low, above, passes < EVEN_PASSES, shift)
        if phase == WEIGH:
            keys = tl.where(index == 0, low, above)
        ground, ceiling = _value(low, shift), _value(above, shift)
        measures, bottom, roof = _measure(
            logits, counts, row, active, end, _value(keys, shift), ground, ceiling,
            phase == BY_NUMBER, best, factor, below_min_tokens, vocab, num_groups, CHUNK, STAGES,
            IN_PROMPT,
        )  # fmt: skip
        equal = tl.exp2((_value(low, shift) - best) * factor).to(tl.float64)
        if phase == WEIGH:
            # The total is that of exactly k tokens, though all that tie with the last are kept.
            weight = _at(index, measures, 1) + (target - above_measure) * equal
            one = low_measure - above_measure <= 1.5
            low_measure = _at(index, measures, 0)
            target = top_p.to(tl.float64) * tl.where(one, low_measure, weight)
            above, above_measure = top, total * 0
            passes = 0
            phase += BY_WEIGHT - WEIGH
        else:
            low, low_measure, above, above_measure = _narrowed(
                keys, measures, target, low, low_measure, above, above_measure
            )
            # Move both bounds to the nearest logits between them.
            low = tl.minimum(tl.maximum(low, _key(bottom, shift)), above - 1)
            above = tl.maximum(tl.minimum(above, _key(roof, shift) + 1), low + 1)
            # Each token between the bounds weighs at least as much as one at the lower bound.
            equal = tl.exp2((_value(low, shift) - best) * factor).to(tl.float64)
            unit = tl.where(phase == BY_NUMBER, 1.0, equal)
            passes += 1
            if (above - low <= 1) | (low_measure - above_measure <= 1.5 * unit):
                phase = tl.where((phase == BY_NUMBER) & (top_p < 1.0), WEIGH, DONE)
    return _value(low, shift)


@triton.jit
def sum_kept(
    logits,
    counts,
    row,
    active,
    group,
    high,
    threshold,
    best,
    factor,
    below_min_tokens,
    sums,
    vocab,
    num_groups,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """Replace the sums of all groups by those of exp((logit - best) / T) of the kept tokens."""
    tl.store(sums + group, tl.zeros([PADDED], tl.float32), mask=group < num_groups)
    end = activate(active, group, kept(high, best, threshold, row) & (group < num_groups))
    for start in range(0, end, CHUNK):
        some, _, x = load_active(
            logits,
            counts,
            row,
            active,
            start,
            end,
            below_min_tokens,
            vocab,
            num_groups,
            CHUNK,
            IN_PROMPT,
        )
        weight = tl.exp2((x - best) * factor)
        weight = tl.where(kept(x, best, threshold, row), weight, 0.0)
        tl.store(sums + some, tl.sum(tl.sum(weight, 2), 1), mask=some < num_groups)
