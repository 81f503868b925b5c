# search_thresholds: the least logit that a row keeps under top-k and top-p, without a sort.
#   grid      (R,); rows that keep all tokens end at once
#   reads     maxima, sums [R, groups] of scan_groups; of the logits the groups that can matter
#   writes    thresholds [R] fp32; sums [R, groups]: what is kept of each group, of
#             exp((logit - best) / temperature); active [R, groups] int32, scratch
#   math      The least token kept is the least v whose tokens above it are fewer than k, or weigh
#             less than p of the whole.  Each pass over the groups whose maximum reaches the lower
#             bound compares with PIVOTS logits between the bounds; the maxima alone give a lower
#             bound to begin with, as there are at least so many tokens and so much weight above.
#             Pivots are evenly spaced by value, later by representation, so that a search ends:
#             between two neighbours of the logits' type, or with one token left.  Sums in fp32 a
#             lane and fp64 across lanes, always in the same order.
#   drops     tokens of less than e^-48 of the likeliest one's probability
#   bound     latency: some 2 us a pass over up to CHUNK groups; all groups are read about twice
#             where the distribution is flat
#   checked   tests/runtime/test_sample_kernels.py against runtime/sampler.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.launch import start_successor_and_wait
from runtime.kernels.sample_row import (
    GROUP,
    LOG2E,
    PENALTIES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDTH,
    adjusted,
    draws,
    kept,
    number,
    too_early,
    trims,
)

PIVOTS = tl.constexpr(4)
HINTS = tl.constexpr(16)  # pivots of a pass over the maxima
EVEN_PASSES = tl.constexpr(8)  # with pivots evenly spaced by value
LANES = tl.constexpr(32)
LEAST = tl.constexpr(48.0)
# A search counts tokens for top-k; weighs what it leaves, if there is top-p; and weighs for top-p.
BY_NUMBER, WEIGH, BY_WEIGHT, DONE = (tl.constexpr(phase) for phase in range(4))


@triton.jit
def _key(value, shift):
    """Where a float32 stands among those of its type: an int that grows as it does.

    shift: low bits that are the same in all numbers of the type, 16 for bfloat16.
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
def _hint(high, ratio, best, total, vocab, row):
    """A logit that the least token kept reaches for certain, judged by the groups' maxima."""
    top_k, top_p = tl.load(row + TOP_K), number(row, TOP_P)
    temperature = number(row, TEMPERATURE)
    low, top = tl.maximum(best - LEAST * temperature, -3e38), best
    wanted = float("inf")
    if (top_p < 1.0) & (top_k == 0):  # else the whole is not known before top-k is
        # Tokens that weigh less than this are too few to weigh more than what may be dropped.
        spare = 0.5 * (1.0 - top_p) * total / vocab
        low = tl.maximum(low, best + temperature * tl.minimum(tl.log(spare), 0.0))
        wanted = top_p * total * 1.0001
    index = tl.arange(0, HINTS)
    for _ in range(2):
        step = (top - low) * (1.0 / (HINTS + 1))
        pivots = low + step * (index + 1).to(tl.float32)
        reached = high[None, :] >= pivots[:, None]
        enough = (top_k > 0) & (tl.sum(reached.to(tl.int32), 1) >= top_k)
        enough |= tl.sum(tl.where(reached, ratio[None, :], 0.0), 1) >= wanted
        above = tl.sum(enough.to(tl.int32), 0)  # pivots ascend: the first so many are reached
        top = tl.where(above < HINTS, low + step * (above + 1).to(tl.float32), top)
        low += step * above.to(tl.float32)
    return low


@triton.jit
def _activate(active, group, on):
    """List the groups that are on, in their order; returns their number."""
    tl.debug_barrier()
    tl.store(active + tl.cumsum(on.to(tl.int32), 0) - 1, group, mask=on)
    tl.debug_barrier()
    return tl.sum(on.to(tl.int32), 0)


@triton.jit
def _chunk(
    logits,
    counts,
    row,
    active,
    start,
    end,
    early,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """(groups [CHUNK], their adjusted logits [CHUNK, LANES, GROUP / LANES])."""
    at = start + tl.arange(0, CHUNK)
    group = tl.load(active + at, mask=at < end, other=num_groups)
    lane = tl.arange(0, LANES)[:, None] * (GROUP // LANES)
    token = lane + tl.arange(0, GROUP // LANES)[None, :]
    token = group[:, None, None] * GROUP + token[None, :, :]
    return group, adjusted(logits, counts, row, token, early, vocab, IN_PROMPT)


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
    by_number,
    best,
    factor,
    early,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """[PIVOTS] fp64: how many tokens reach each pivot, or what they weigh."""
    # One variable a pivot: with a dimension for them, logits would move between threads.
    index = tl.arange(0, PIVOTS)
    p0, p1 = _at(index, pivots, 0), _at(index, pivots, 1)
    p2, p3 = _at(index, pivots, 2), _at(index, pivots, 3)
    t0 = tl.zeros([CHUNK, LANES], tl.float32)
    t1, t2, t3 = t0, t0, t0
    for start in tl.range(0, end, CHUNK, num_stages=STAGES):
        _, x = _chunk(
            logits, counts, row, active, start, end, early, vocab, num_groups, CHUNK, IN_PROMPT
        )
        weight = tl.where(by_number, 1.0, tl.exp2((x - best) * factor))
        t0, t1 = _added(t0, x, p0, weight), _added(t1, x, p1, weight)
        t2, t3 = _added(t2, x, p2, weight), _added(t3, x, p3, weight)
    lower = tl.where(index == 0, _whole(t0), _whole(t1))
    upper = tl.where(index == 2, _whole(t2), _whole(t3))
    return tl.where(index < 2, lower, upper)


@triton.jit
def _search(
    logits,
    counts,
    row,
    active,
    group,
    high,
    ratio,
    total,
    best,
    factor,
    early,
    SHIFT: tl.constexpr,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """The least logit kept, or one between it and the next, which is dropped."""
    top_k, top_p = tl.load(row + TOP_K), number(row, TOP_P)
    least = _hint(high, ratio, best, total.to(tl.float32), vocab, row)
    # Penalties move logits off the numbers of their type.
    shift = tl.where(tl.load(row + PENALTIES) != 0, 0, SHIFT)
    # The lower bound is reached by as much as is wanted, the upper one by less.
    low, top = _key(least, shift) - 1, _key(best, shift) + 1
    above, above_measure = top, total * 0
    low_measure = total * 0 + 1e9
    target = tl.where(top_k > 0, top_k.to(tl.float64), top_p.to(tl.float64) * total)
    phase = tl.where(top_k > 0, BY_NUMBER, tl.where(top_p < 1.0, BY_WEIGHT, DONE))
    passes = 0
    index = tl.arange(0, PIVOTS)
    while phase != DONE:
        end = _activate(active, group, high >= _value(low, shift))
        keys = _pivots(low, above, passes < EVEN_PASSES, shift)
        if phase == WEIGH:
            keys = tl.where(index == 0, low, above)
        measures = _measure(
            logits, counts, row, active, end, _value(keys, shift), phase == BY_NUMBER, best, factor,
            early, vocab, num_groups, CHUNK, STAGES, IN_PROMPT,
        )  # fmt: skip
        equal = tl.exp2((_value(low, shift) - best) * factor).to(tl.float64)
        if phase == WEIGH:
            # Exactly k tokens make up the whole, though all that equal the last of them stay.
            weight = _at(index, measures, 1) + (target - above_measure) * equal
            one = low_measure - above_measure <= 1.5
            low_measure = _at(index, measures, 0)
            target = top_p.to(tl.float64) * tl.where(one, low_measure, weight)
            above, above_measure = top, total * 0
            passes = 0
            phase += BY_WEIGHT - WEIGH
        else:
            reached = tl.sum((measures >= target).to(tl.int32), 0)
            if reached > 0:
                low = _at(index, keys, reached - 1)
                low_measure = _at(index, measures, reached - 1)
            if reached < PIVOTS:
                above = _at(index, keys, reached)
                above_measure = _at(index, measures, reached)
            # Of the tokens between the bounds each weighs no less than the lower one would.
            equal = tl.exp2((_value(low, shift) - best) * factor).to(tl.float64)
            unit = tl.where(phase == BY_NUMBER, 1.0, equal)
            passes += 1
            if (above - low <= 1) | (low_measure - above_measure <= 1.5 * unit):
                phase = tl.where((phase == BY_NUMBER) & (top_p < 1.0), WEIGH, DONE)
    return _value(low, shift)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def search_thresholds(
    logits,
    slots,
    positions,
    rows,
    counts,
    maxima,
    sums,
    thresholds,
    active,
    stride_logits,
    vocab,
    num_groups,
    SHIFT: tl.constexpr,  # low bits that are 0 in the logits' type as float32
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        start_successor_and_wait()
    slot = tl.load(slots + place).to(tl.int64)
    if slot >= 0:
        row = rows + slot * WIDTH
        if draws(row) & trims(row):
            group = tl.arange(0, PADDED)
            inside = group < num_groups
            mine = place * num_groups
            high = tl.load(maxima + mine + group, mask=inside, other=-float("inf"))
            best = tl.max(high, 0)
            if (best > -float("inf")) & (best < float("inf")):
                factor = LOG2E / number(row, TEMPERATURE)
                ratio = tl.exp2((high - best) * factor)
                weights = tl.load(sums + mine + group, mask=inside, other=0.0) * ratio
                early = too_early(row, tl.load(positions + place))
                logits += place * stride_logits
                counts += slot * vocab
                threshold = _search(
                    logits, counts, row, active + mine, group, high, ratio,
                    tl.sum(weights.to(tl.float64), 0), best, factor, early,
                    SHIFT, vocab, num_groups, CHUNK, STAGES, IN_PROMPT,
                )  # fmt: skip
                tl.store(thresholds + place, threshold)
                on = kept(high, best, threshold, row) & inside
                tl.store(sums + mine + group, tl.zeros([PADDED], tl.float32), mask=inside)
                end = _activate(active + mine, group, on)
                for start in range(0, end, CHUNK):
                    some, x = _chunk(
                        logits, counts, row, active + mine, start, end, early,
                        vocab, num_groups, CHUNK, IN_PROMPT,
                    )  # fmt: skip
                    weight = tl.exp2((x - best) * factor)
                    weight = tl.where(kept(x, best, threshold, row), weight, 0.0)
                    weight = tl.sum(tl.sum(weight, 2), 1)
                    tl.store(sums + mine + some, weight, mask=some < num_groups)
