"""Filtering and sampling of a row with at most FEW candidates, which are compared pairwise.

The comparisons give every token's rank and the weight above it, so that top-k, top-p and min-p are
applied and the token is sampled without reading the logits again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.sampling.kernels.groups import load_active
from runtime.sampling.kernels.row import (
    GROUP,
    LOG_MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    number,
    pick,
    uniform,
)

FEW = tl.constexpr(256)  # tokens that can be gathered
BLOCK = tl.constexpr(32)  # candidates that all others are compared with at once


@triton.jit
def gather(
    logits,
    counts,
    row,
    active,
    end,
    below_min_tokens,
    least,
    values,
    tokens,
    vocab,
    num_groups,
    CHUNK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    """Write the logits that reach `least` and their token ids to values, tokens [FEW].

    Returns their number; it stops once there are more than FEW.
    """
    found, start = 0, 0
    while (start < end) & (found <= FEW):
        _, token, x = load_active(
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
        token = tl.reshape(token, [CHUNK, GROUP])
        x = tl.reshape(x, [CHUNK, GROUP])
        reached = (x >= least).to(tl.int32)
        within = tl.cumsum(reached, 1)
        number_of = tl.sum(reached, 1)
        before = found + tl.cumsum(number_of, 0) - number_of
        at = before[:, None] + within - 1
        mask = (reached > 0) & (at < FEW)
        tl.store(values + at, x, mask=mask)
        tl.store(tokens + at, token, mask=mask)
        found += tl.sum(number_of, 0)
        start += CHUNK
    tl.debug_barrier()
    return found


@triton.jit
def sample_from_few(values, tokens, found, total, best, factor, row, position):
    """The token sampled from `found` <= FEW gathered candidates, which ascend by id."""
    index = tl.arange(0, FEW)
    mine = index < found
    x = tl.load(values + index, mask=mine, other=-float("inf"))
    weight = tl.exp2((x - best) * factor)
    number_above = tl.zeros([FEW], tl.int32)
    weight_above = tl.zeros([FEW], tl.float32)
    for start in range(0, found, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = tl.load(values + at, mask=at < found, other=-float("inf"))
        higher = other[None, :] > x[:, None]
        number_above += tl.sum(higher.to(tl.int32), 1)
        other_weight = tl.exp2((other - best) * factor)
        weight_above += tl.sum(tl.where(higher, other_weight[None, :], 0.0), 1)
    top_k, top_p = tl.load(row + TOP_K), number(row, TOP_P)
    keeps = mine
    if top_k > 0:
        # The total is that of exactly k tokens, though all that tie with the last one are kept.
        keeps = mine & (number_above < top_k)
        last = tl.min(tl.where(keeps, x, float("inf")), 0)
        extra = tl.maximum(tl.sum(keeps.to(tl.int32), 0) - top_k, 0).to(tl.float64)
        total = tl.sum(tl.where(keeps, weight, 0.0).to(tl.float64), 0)
        total -= extra * tl.exp2((last - best) * factor).to(tl.float64)
    if top_p < 1.0:
        short = weight_above.to(tl.float64) < top_p.to(tl.float64) * total
        keeps = keeps & (short | (x == best))
    temperature = number(row, TEMPERATURE)
    last = tl.min(tl.where(keeps, x, float("inf")), 0)
    least = tl.maximum(tl.div_rn(last - best, temperature), number(row, LOG_MIN_P))
    scaled = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
    weight = tl.where(mine & (scaled >= least), weight, 0.0).to(tl.float64)
    chosen, _ = pick(index, weight, uniform(row, position) * tl.sum(weight, 0))
    return tl.load(tokens + chosen)
