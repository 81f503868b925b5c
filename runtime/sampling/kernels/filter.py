# filter_rows: top-k, top-p and min-p.
#   grid      (R,); rows without filters return at once
#   reads     maxima, sums [R, groups] of scan_groups; logits of groups that may hold kept tokens
#   writes    found [R] int32: the token, or -1 with more than FEW candidates; then also thresholds
#             [R] fp32, and sums [R, groups] of exp((logit - best) / temperature) of the kept tokens
#   scratch   active [R, groups] int32; values [R, FEW] fp32; tokens [R, FEW] int32
#   math      groups.py bounds the kept logits from below, by the maxima; few_candidates.py compares
#             the tokens above that pairwise, many_candidates.py searches among them
#   bound     latency: four dependent memory accesses and some twenty barriers; with many
#             candidates, about three reads of all groups that hold some
#   checked   tests/runtime/sampling/test_sample_kernels.py against torch_sampler.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import start_successor_and_wait
from runtime.sampling.kernels.few_candidates import FEW, gather, sample_from_few
from runtime.sampling.kernels.groups import activate, lower_bound
from runtime.sampling.kernels.many_candidates import search, sum_kept
from runtime.sampling.kernels.row import (
    LOG2E,
    TEMPERATURE,
    WIDTH,
    has_filters,
    is_below_min_tokens,
    is_sampled,
    number,
)


@triton.jit
def _filter_row(
    logits,
    row,
    position,
    counts,
    high,
    best,
    sums,
    found_token,
    threshold,
    active,
    values,
    tokens,
    vocab,
    num_groups,
    SHIFT: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """Filter one row; all pointers are offset to it."""
    group = tl.arange(0, PADDED)
    below_min_tokens = is_below_min_tokens(row, position)
    factor = LOG2E / number(row, TEMPERATURE)
    ratio = tl.exp2((high - best) * factor)
    partial = tl.load(sums + group, mask=group < num_groups, other=0.0)
    total = tl.sum((partial * ratio).to(tl.float64), 0)
    least = lower_bound(high, ratio, best, total.to(tl.float32), vocab, row)
    end = activate(active, group, high >= least)
    found = gather(
        logits, counts, row, active, end, below_min_tokens, least, values, tokens, vocab,
        num_groups, CHUNK,
        IN_PROMPT,
    )  # fmt: skip
    if found <= FEW:
        token = sample_from_few(values, tokens, found, total, best, factor, row, position)
        tl.store(found_token, token)
    else:
        border = search(
            logits, counts, row, active, group, high, least, total, best, factor, below_min_tokens,
            SHIFT, vocab, num_groups, CHUNK, STAGES, IN_PROMPT,
        )  # fmt: skip
        sum_kept(
            logits, counts, row, active, group, high, border, best, factor, below_min_tokens, sums,
            vocab, num_groups, PADDED, CHUNK, IN_PROMPT,
        )  # fmt: skip
        tl.store(threshold, border)
        tl.store(found_token, -1)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def filter_rows(
    logits,
    slots,
    positions,
    rows,
    counts,
    maxima,
    sums,
    found_tokens,
    thresholds,
    active,
    values,
    tokens,
    stride_logits,
    vocab,
    num_groups,
    SHIFT: tl.constexpr,  # low bits that are 0 in the logits' type as float32
    PADDED: tl.constexpr,  # groups, rounded up to a power of two
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
        if is_sampled(row) & has_filters(row):
            group = tl.arange(0, PADDED)
            mine = place * num_groups
            inside = group < num_groups
            high = tl.load(maxima + mine + group, mask=inside, other=-float("inf"))
            best = tl.max(high, 0)
            if (best > -float("inf")) & (best < float("inf")):
                few = place * FEW
                _filter_row(
                    logits + place * stride_logits, row, tl.load(positions + place),
                    counts + slot * vocab, high, best, sums + mine, found_tokens + place,
                    thresholds + place, active + mine, values + few, tokens + few,
                    vocab, num_groups, SHIFT, PADDED, CHUNK, STAGES, IN_PROMPT,
                )  # fmt: skip
