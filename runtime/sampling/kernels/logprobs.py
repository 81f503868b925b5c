# scan_scores: the maximum and sum of exponentials of each group of 256 logits of a row.
#   grid      (group tiles, N), N rows that are scored
#   reads     logits [R, V] bf16, fp16 or fp32, of the rows sources [N] int32; masked by
#             bits_at [N] and words as in apply_masks.py
#   writes    maxima, sums [N, groups] fp32, the latter of exp(logit - maximum)
#   bound     memory: the logits once
# score_rows: the sampled token's log-probability and rank; the likeliest or the requested tokens.
#   grid      (N, 2): one program for the sampled token, one for the alternatives
#   reads     the inputs and outputs of scan_scores; last_token [slots], of the rows' slots [N];
#             num_listed [N] requested ids, if any, in words from listed_at [N] on
#   writes    logprobs [N] fp32, ranks [N] int64; top_ids [N, width] int64 and top_logprobs
#             [N, width] fp32, -inf after the last one
#   scratch   active [N, groups] int32
#   math      fp32, sums across groups in fp64; of equal logits the smallest id ranks first
#   bound     latency: a memory access for each alternative; the rank is counted only in groups
#             whose maximum exceeds the sampled token's logit
#   checked   tests/runtime/sampling/test_constrained_rows.py against runtime/sampling/logprobs.py
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from runtime.sampling.kernels.apply_masks import load_masked
from runtime.sampling.kernels.groups import activate
from runtime.sampling.kernels.row import GROUP, first
from runtime.sampling.logprobs import LogprobsTensors

SCAN_TILE, CHUNK = 4, 8  # groups that a program reads at once
LAST = tl.constexpr(0x7FFFFFFF)
UNALIGNED = ["sources", "slots", "bits_at", "listed_at", "num_listed", "sums"]


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def scan_scores(
    logits,
    sources,
    bits_at,
    words,
    maxima,
    sums,
    stride_logits,
    vocab,
    num_groups,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if DEPENDENT:
        start_successor_and_wait()
    source = tl.load(sources + place).to(tl.int64)
    x = load_masked(logits + source * stride_logits, words, tl.load(bits_at + place), token, vocab)
    highest = tl.max(x, 1)
    # A group that is masked as a whole has weight 0: -inf - -inf would be NaN.
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    out = place * num_groups + group
    tl.store(maxima + out, highest, mask=group < num_groups)
    tl.store(sums + out, tl.sum(tl.exp(x - base[:, None]), 1), mask=group < num_groups)


@triton.jit
def _list_some(logits, words, bits_at, listed, count, log_total, ids, logprobs, vocab, width):
    """Log-probabilities of the requested ids."""
    for start in range(0, width, GROUP):
        index = start + tl.arange(0, GROUP)
        token = tl.load(listed + index, mask=index < count, other=LAST)
        x = load_masked(logits, words, bits_at, token, vocab)
        tl.store(ids + index, token.to(tl.int64), mask=index < width)
        tl.store(logprobs + index, x - log_total, mask=index < width)


@triton.jit
def _list_likeliest(
    logits, words, bits_at, high, log_total, ids, logprobs, vocab, width, PADDED: tl.constexpr
):
    """The most likely tokens, one after the other, each from the group with the largest remaining
    maximum."""
    group = tl.arange(0, PADDED)
    index = tl.arange(0, GROUP)
    value, taken = log_total * 0 + float("inf"), width * 0 - 1
    for rank in range(0, width):
        best = tl.max(high, 0)
        where = first(group, high == best, 0)
        token = where * GROUP + index
        x = load_masked(logits, words, bits_at, token, vocab)
        # Tokens before the last one, by value and then by id, have been taken.
        left = (x < value) | ((x == value) & (token > taken))
        chosen = first(token, left & (x == best), where * GROUP)
        tl.store(ids + rank, chosen.to(tl.int64))
        tl.store(logprobs + rank, best - log_total)
        next_best = tl.max(tl.where(left & (token != chosen), x, -float("inf")), 0)
        high = tl.where(group == where, next_best, high)
        value, taken = best, chosen


@triton.jit
def _count_above(
    logits, words, bits_at, high, value, active, vocab, num_groups, PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """How many tokens have a larger logit than `value`."""
    end = activate(active, tl.arange(0, PADDED), high > value)
    above = 0
    for start in range(0, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        group = tl.load(active + at, mask=at < end, other=num_groups)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = load_masked(logits, words, bits_at, token, vocab)
        above += tl.sum(tl.sum((x > value).to(tl.int32), 1), 0)
    return above


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=UNALIGNED)
def score_rows(
    logits,
    sources,
    slots,
    bits_at,
    listed_at,
    num_listed,
    words,
    last_token,
    maxima,
    sums,
    active,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    stride_logits,
    vocab,
    num_groups,
    width,
    PADDED: tl.constexpr,  # groups, rounded up to a power of two
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        start_successor_and_wait()
    source = tl.load(sources + place).to(tl.int64)
    bits = tl.load(bits_at + place)
    logits += source * stride_logits
    group, mine = tl.arange(0, PADDED), place * num_groups
    inside = group < num_groups
    high = tl.load(maxima + mine + group, mask=inside, other=-float("inf"))
    partial = tl.load(sums + mine + group, mask=inside, other=0.0)
    best = tl.max(high, 0)
    total = tl.sum((partial * tl.exp(high - best)).to(tl.float64), 0)
    log_total = best + tl.log(total.to(tl.float32))
    if tl.program_id(1) == 0:
        token = tl.load(last_token + tl.load(slots + place)).to(tl.int32)
        value = tl.max(load_masked(logits, words, bits, token + tl.arange(0, 1), vocab), 0)
        above = _count_above(
            logits, words, bits, high, value, active + mine, vocab, num_groups, PADDED, CHUNK
        )
        tl.store(logprobs + place, value - log_total)
        tl.store(ranks + place, (above + 1).to(tl.int64))
    else:
        ids, values = top_ids + place * width, top_logprobs + place * width
        count = tl.load(num_listed + place)
        if count > 0:
            _list_some(
                logits, words, bits, words + tl.load(listed_at + place), count, log_total, ids,
                values, vocab, width,
            )  # fmt: skip
        else:
            _list_likeliest(logits, words, bits, high, log_total, ids, values, vocab, width, PADDED)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of logits that are scored, in columns [N] int32 of any alignment.

    sources: rows of the logits; slots: those of their tokens; bits_at: where their masks begin,
    negative: none; listed_at, num_listed: the requested ids, none: the most likely
    """

    sources: Tensor
    slots: Tensor
    bits_at: Tensor
    listed_at: Tensor
    num_listed: Tensor


def score(
    logits: Tensor, rows: ScoredRows, words: Tensor, last_token: Tensor, scores: LogprobsTensors
) -> None:
    """Fill `scores` for the last tokens of the rows' slots, by logits [R, V].

    words [..] int32 hold masks and id lists.  Needs 12 bytes of scratch for 256 logits of a row.
    """
    count, vocab = len(rows.sources), logits.shape[1]
    groups = triton.cdiv(vocab, GROUP.value)
    options = dependent_launch(logits.device)
    maxima, sums = torch.empty((2, count, groups), dtype=torch.float32, device=logits.device)
    active = torch.empty((count, groups), dtype=torch.int32, device=logits.device)
    sizes = (logits.stride(0), vocab, groups)
    scan_scores[(triton.cdiv(groups, SCAN_TILE), count)](
        logits, rows.sources, rows.bits_at, words, maxima, sums, *sizes, TILE=SCAN_TILE, **options
    )
    score_rows[(count, 2)](
        logits, rows.sources, rows.slots, rows.bits_at, rows.listed_at, rows.num_listed, words,
        last_token, maxima, sums, active, *scores.tensors(), *sizes, scores.top_ids.shape[1],
        PADDED=triton.next_power_of_2(groups), CHUNK=CHUNK, **options,
    )  # fmt: skip
