"""Active groups of a row, which may hold kept tokens: found by their maxima, read in chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.sampling.kernels.row import (
    GROUP,
    LOG_MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusted,
    number,
)

HINTS = tl.constexpr(16)  # pivots of a pass over the maxima
LANES = tl.constexpr(32)
LEAST = tl.constexpr(48.0)  # tokens below e^-48 of the largest probability are dropped


@triton.jit
def lower_bound(high, ratio, best, total, vocab, row):
    """A lower bound of all kept logits, computed from the groups' maxima.

    The maxima that reach a pivot bound the number and weight of the tokens that do from below.
    """
    top_k, top_p = tl.load(row + TOP_K), number(row, TOP_P)
    temperature = number(row, TEMPERATURE)
    low, top = tl.maximum(best - LEAST * temperature, -3e38), best
    target = float("inf")
    if (top_p < 1.0) & (top_k == 0):  # else the total depends on top-k
        # All tokens below this together weigh less than what top-p may drop.
        spare = 0.5 * (1.0 - top_p) * total / vocab
        low = tl.maximum(low, best + temperature * tl.minimum(tl.log(spare), 0.0))
        target = top_p * total * 1.0001
    if (top_p >= 1.0) | (top_k == 0):  # else top-p's total includes all that top-k keeps
        log_min_p = number(row, LOG_MIN_P)
        slack = 1e-5 * (tl.abs(best) - temperature * log_min_p)
        low = tl.maximum(low, best + temperature * log_min_p - slack)
    index = tl.arange(0, HINTS)
    for _ in range(2):
        step = (top - low) * (1.0 / (HINTS + 1))
        pivots = low + step * (index + 1).to(tl.float32)
        reached = high[None, :] >= pivots[:, None]
        enough = (top_k > 0) & (tl.sum(reached.to(tl.int32), 1) >= top_k)
        enough |= tl.sum(tl.where(reached, ratio[None, :], 0.0), 1) >= target
        above = tl.sum(enough.to(tl.int32), 0)  # pivots ascend: the first `above` are reached
        top = tl.where(above < HINTS, low + step * (above + 1).to(tl.float32), top)
        low += step * above.to(tl.float32)
    return low


@triton.jit
def activate(active, group, on):
    """Write the groups that are on to `active`, ascending; returns their number."""
    tl.debug_barrier()
    tl.store(active + tl.cumsum(on.to(tl.int32), 0) - 1, group, mask=on)
    tl.debug_barrier()
    return tl.sum(on.to(tl.int32), 0)


@triton.jit
def load_active(
    logits,
    counts,
    row,
    active,
    start,
    end,
    below_min_tokens,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """(groups [CHUNK], token ids and adjusted logits [CHUNK, LANES, GROUP / LANES])."""
    at = start + tl.arange(0, CHUNK)
    group = tl.load(active + at, mask=at < end, other=num_groups)
    lane = tl.arange(0, LANES)[:, None] * (GROUP // LANES)
    token = lane + tl.arange(0, GROUP // LANES)[None, :]
    token = group[:, None, None] * GROUP + token[None, :, :]
    return group, token, adjusted(logits, counts, row, token, below_min_tokens, vocab, IN_PROMPT)
