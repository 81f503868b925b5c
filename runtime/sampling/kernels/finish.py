# finish_rows: samples the token of each row and updates the state of its slot.
#   grid      (R,)
#   reads     maxima, sums [R, groups] of scan_groups; 256 logits of the row.  For rows with
#             filters the output of filter_rows: the token, or kept sums and the threshold
#   writes    tokens, usable [R], of which `output` tells the place, and which may be in pinned
#             memory of the host; last_token [slots]; counts [slots, V] of rows with penalties.
#             Where all logits are -inf, so that no token is allowed, tokens gets -1 and last_token
#             any id: a step that is already queued may read it
#   skips     rows whose slot is negative: they get token -1, and are usable if their first 256
#             logits are: a NaN in the KV cache or a hidden state makes all logits NaN
#   math      greedy: the first of the largest.  Others: the first token whose cumulative weight
#             exceeds u * total; prefix sums over groups, then inside one, in fp64
#   bound     latency: three dependent loads; 6 KB a row
#   checked   tests/runtime/sampling/test_sample_kernels.py against torch_sampler.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import start_successor_and_wait
from runtime.sampling.kernels.row import (
    GREEDY_BELOW,
    GROUP,
    LOG2E,
    PENALTIES,
    TEMPERATURE,
    WIDTH,
    adjusted,
    first,
    has_filters,
    is_below_min_tokens,
    is_sampled,
    kept,
    number,
    pick,
    uniform,
)


@triton.jit
def _search_groups(
    logits,
    counts,
    row,
    position,
    high,
    best,
    sums,
    threshold,
    samples,
    filtered,
    vocab,
    num_groups,
    PADDED: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """The row's token: first its group, then its index in the group."""
    group = tl.arange(0, PADDED)
    factor = LOG2E / tl.maximum(number(row, TEMPERATURE), GREEDY_BELOW)
    chosen = first(group, high == best, 0)
    rest = tl.zeros([], tl.float64)
    if samples:
        weights = tl.load(sums + group, mask=group < num_groups, other=0.0)
        if not filtered:
            weights *= tl.exp2((high - best) * factor)
        weights = weights.to(tl.float64)
        target = uniform(row, position) * tl.sum(weights, 0)
        chosen, before = pick(group, weights, target)
        rest = target - before
    index = tl.arange(0, GROUP)
    below_min_tokens = is_below_min_tokens(row, position)
    x = adjusted(logits, counts, row, chosen * GROUP + index, below_min_tokens, vocab, IN_PROMPT)
    winner = first(index, x == best, 0)
    if samples:
        weights = tl.exp2((x - best) * factor)
        if filtered:
            weights = tl.where(kept(x, best, tl.load(threshold), row), weights, 0.0)
        winner, _ = pick(index, weights.to(tl.float64), rest)
    return tl.minimum(chosen * GROUP + winner, vocab - 1)


@triton.jit(
    do_not_specialize=["stride_tokens", "stride_usable"],
    do_not_specialize_on_alignment=[
        "slots",
        "positions",
        "last_token",
        "tokens_out",
        "usable_out",
        "output",
    ],
)
def finish_rows(
    logits,
    slots,
    positions,
    rows,
    counts,
    maxima,
    sums,
    found_tokens,
    thresholds,
    last_token,
    tokens_out,
    usable_out,
    output,
    stride_logits,
    vocab,
    num_groups,
    stride_tokens,
    stride_usable,
    PADDED: tl.constexpr,  # groups, rounded up to a power of two
    IN_PROMPT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        start_successor_and_wait()
    slot = tl.load(slots + place).to(tl.int64)
    which = tl.load(output)
    tokens_out += which * stride_tokens
    usable_out += which * stride_usable
    if slot < 0:
        tl.store(tokens_out + place, -1)
        index = tl.arange(0, GROUP)
        x = tl.load(logits + place * stride_logits + index, mask=index < vocab, other=0.0)
        x = x.to(tl.float32)
        wrong = (x != x) | (x == float("inf"))
        some = tl.max(wrong.to(tl.int32), 0)
        tl.store(usable_out + place, (some == 0).to(usable_out.dtype.element_ty))
    else:
        row = rows + slot * WIDTH
        position = tl.load(positions + place)
        mine = place * num_groups
        group = tl.arange(0, PADDED)
        high = tl.load(maxima + mine + group, mask=group < num_groups, other=-float("inf"))
        best = tl.max(high, 0)
        usable = best < float("inf")
        allowed = best > -float("inf")
        samples = is_sampled(row) & usable & allowed
        filtered = samples & has_filters(row)
        counts += slot * vocab
        winner = place.to(tl.int32) * 0 - 1
        if filtered:
            winner = tl.load(found_tokens + place)
        if winner < 0:
            winner = _search_groups(
                logits + place * stride_logits, counts, row, position, high, best, sums + mine,
                thresholds + place, samples, filtered, vocab, num_groups, PADDED, IN_PROMPT,
            )  # fmt: skip
        tl.store(tokens_out + place, tl.where(allowed, winner, -1).to(tokens_out.dtype.element_ty))
        tl.store(usable_out + place, usable.to(usable_out.dtype.element_ty))
        tl.store(last_token + slot, winner.to(last_token.dtype.element_ty))
        if tl.load(row + PENALTIES) != 0:
            seen = counts + winner
            old = tl.load(seen).to(tl.int32)
            full = (old & (IN_PROMPT - 1)) == IN_PROMPT - 1
            tl.store(seen, tl.where(full, old, old + 1).to(counts.dtype.element_ty))
