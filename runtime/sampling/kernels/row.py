"""What the sampler's kernels share: the row of parameters of a slot, and logits adjusted by it.

A slot has one row of ROW, all sampling parameters of its request; apply_rows stores it, and the
kernels read nothing else of the request but its token counts.  Logits are read in groups of GROUP
neighbours: a group's result does not depend on which program read it, so it is batch-invariant.
"""

from __future__ import annotations

import math

import numpy as np
import triton
import triton.language as tl

from attention.common.dependent_launch import start_successor_and_wait

STOP_IDS = 8  # that a row can mask before min_tokens
ROW = np.dtype(
    [
        ("slot", np.int32),  # the row's; -1: the row is unused
        ("temperature", np.float32),
        ("top_p", np.float32),  # 1 is off
        ("log_min_p", np.float32),  # -inf is off
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("penalties", np.int32),  # 1: one of the three is in use
        ("top_k", np.int32),  # 0 is off
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("prompt_len", np.int32),
        ("min_tokens", np.int32),
        ("stop_ids", np.int32, STOP_IDS),  # -1: none
        ("unused", np.int32, 3),  # rows begin at multiples of 32 bytes
    ]
)
WIDTH = tl.constexpr(ROW.itemsize // 4)
GROUP = tl.constexpr(256)
LOG2E = tl.constexpr(math.log2(math.e))
GREEDY_BELOW = tl.constexpr(1e-5)  # as in runtime/sampling/torch_sampler.py

_WORDS = {name: tl.constexpr(ROW.fields[name][1] // 4) for name in ROW.names}
TEMPERATURE, TOP_P, LOG_MIN_P = (_WORDS[name] for name in ("temperature", "top_p", "log_min_p"))
PRESENCE, FREQUENCY = _WORDS["presence"], _WORDS["frequency"]
REPETITION, PENALTIES, TOP_K = _WORDS["repetition"], _WORDS["penalties"], _WORDS["top_k"]
SEED_LOW, SEED_HIGH = _WORDS["seed_low"], _WORDS["seed_high"]
PROMPT_LEN, MIN_TOKENS, STOPS = _WORDS["prompt_len"], _WORDS["min_tokens"], _WORDS["stop_ids"]
NUM_STOPS = tl.constexpr(STOP_IDS)
LANES = tl.constexpr(32)


# apply_rows: stores the sampling parameters of new sequences in their slots.
#   grid      (N,), fixed, so that a graph can capture it
#   reads     block [N, WIDTH] int32, each row for the slot in its first word
#   writes    rows [slots, WIDTH] int32
#   skips     rows with a negative slot
#   checked   tests/runtime/sampling/test_sampler_state.py
@triton.jit(do_not_specialize_on_alignment=["block"])
def apply_rows(block, rows, DEPENDENT: tl.constexpr):
    place = tl.program_id(0)
    if DEPENDENT:
        start_successor_and_wait()
    word = tl.arange(0, LANES)
    values = tl.load(block + place * WIDTH + word, mask=word < WIDTH, other=0)
    slot = tl.load(block + place * WIDTH).to(tl.int64)
    if slot >= 0:
        tl.store(rows + slot * WIDTH + word, values, mask=word < WIDTH)


@triton.jit
def number(row, word):
    """A word of a slot's row as float32."""
    return tl.load(row + word).to(tl.float32, bitcast=True)


@triton.jit
def is_sampled(row):
    """Whether the row is sampled, not greedy.  A temperature of NaN is greedy."""
    return (number(row, TEMPERATURE) >= GREEDY_BELOW) & (tl.load(row + TOP_K) != 1)


@triton.jit
def has_filters(row):
    """Whether a sampled row has top-k, top-p or min-p."""
    by_mass = (number(row, TOP_P) < 1.0) | (number(row, LOG_MIN_P) > -float("inf"))
    return by_mass | (tl.load(row + TOP_K) > 0)


@triton.jit
def is_below_min_tokens(row, position):
    """Whether stop ids are masked for the token at this position."""
    return position - tl.load(row + PROMPT_LEN) < tl.load(row + MIN_TOKENS)


@triton.jit
def _divided(x, by):
    """x / by, rounded as a division by one more step than an estimate needs.

    A correctly rounded division has a branch for rare numbers, and takes twice the registers.
    """
    inverse = tl.div_rn(1.0, by)
    estimate = x * inverse
    return tl.fma(tl.fma(-estimate, tl.zeros_like(x) + by, x), tl.zeros_like(x) + inverse, estimate)


@triton.jit
def adjusted(logits, counts, row, token, below_min_tokens, vocab, IN_PROMPT: tl.constexpr):
    """float32 logits of the tokens after penalties and stop ids; -inf outside the vocabulary.

    NaN becomes +inf, so that it wins every maximum and is detected.
    """
    inside = token < vocab
    x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
    if tl.load(row + PENALTIES) != 0:
        seen = tl.load(counts + token, mask=inside, other=0).to(tl.int32)
        output = seen & (IN_PROMPT - 1)
        repetition = number(row, REPETITION)
        repeated = tl.where(x > 0, _divided(tl.maximum(x, 0.0), repetition), x * repetition)
        x = tl.where(seen > 0, repeated, x)
        x -= number(row, FREQUENCY) * output.to(tl.float32)
        x -= tl.where(output > 0, number(row, PRESENCE), 0.0)
    x = tl.where(x == x, x, float("inf"))
    if below_min_tokens:
        for stop in range(NUM_STOPS):
            x = tl.where(token == tl.load(row + STOPS + stop), -float("inf"), x)
    return x


@triton.jit
def kept(x, best, threshold, row):
    """Whether tokens of these adjusted logits pass the row's filters.

    Compares log-probabilities relative to the largest, rounded as in runtime/sampling/rows.py: ties
    are kept or dropped together.
    """
    temperature = number(row, TEMPERATURE)
    least = tl.maximum(tl.div_rn(threshold - best, temperature), number(row, LOG_MIN_P))
    return tl.div_rn(x - best, tl.zeros_like(x) + temperature) >= least


@triton.jit
def uniform(row, position):
    """The float64 number in (0, 1) that runtime/sampling/rng.py gives this seed and position."""
    low = tl.load(row + SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(row + SEED_HIGH).to(tl.uint32, bitcast=True)
    zero = low * 0
    word, _, _, _ = tl.philox_impl(position.to(tl.uint32), zero, zero, zero, low, high)
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32


@triton.jit
def first(index, found, otherwise):
    """The least index where `found`, else `otherwise`."""
    least = tl.min(tl.where(found, index, 0x7FFFFFFF), 0)
    return tl.where(least == 0x7FFFFFFF, otherwise, least)


@triton.jit
def pick(index, weights, target):
    """(the first index whose cumulative weight exceeds the target, the weight before it)."""
    some = weights > 0
    last = tl.max(tl.where(some, index, 0), 0)  # if rounding puts the target at the end
    chosen = first(index, some & (tl.cumsum(weights, 0) > target), last)
    return chosen, tl.sum(tl.where(index < chosen, weights, 0.0), 0)
