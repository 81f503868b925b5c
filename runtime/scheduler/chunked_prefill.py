"""ChunkBudget: how many prompt tokens a step takes (chunked prefill).

Decode rows get their next token when the step ends, and every step reads all weights, so a few
prompt tokens in every step cost less than many in some steps.  Waiting prompts are spread over a
few steps, and no step may take longer than a target.  `--itl-target-ms` sets it.  The automatic
target gives way where it would make the whole server slow:

    some decode rows, short queue                steps that mostly read the weights
    many decode rows, long without a prompt      prompts get a share of the step, which grows with
                                                 the queue
    a long queue for each decode row             up to MAX_WIDENING times the target
    more prompts than decode rows, for long      steps of MAX_STEP_SECONDS

Of sizes that are nearly the same it takes one whose GEMMs fill the device (`full_wave_sizes`).

The numbers are the best of `python -m benchmarks.schedule.bench_schedule` for the usual loads of an
8B model; they are times, not tokens, so that they mean the same for every model.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from runtime.config import ResolvedConfig
from runtime.scheduler.step_time import StepTimes

AUTO_TARGET_SECONDS = 0.010  # the target of a step without --itl-target-ms
MAX_WIDENING = 7.0  # times the automatic target, for a long queue or without decode rows
QUEUE_SECONDS_PER_ROW = 0.025  # of prefill for each decode row: a longer queue widens the target
FEW_ROWS = 8  # fewer decode rows count as so many: the latency of a single one matters, too
LONG_QUEUE_SECONDS = 1.0  # of prefill
MAX_STEP_SECONDS = 0.12  # of a step, for a long queue of more prompts than decode rows
# The least share of a step's time for prefill under the automatic target.  It is little more than
# prompts need on average: otherwise requests that arrived together would stay together, with their
# prompts crowded into some steps and none in others.
PREFILL_SHARE, MAX_PREFILL_SHARE = 0.5, 0.6
MAX_SHARE_QUEUE_SECONDS = 1.5  # of prefill: at this queue the share has grown to the largest
WEIGHT_BOUND_ROWS = 48  # decode rows at most, in steps that mostly read the weights
WEIGHT_BOUND_STEPS = 30  # of that kind at most, to prefill all that waits
# Steps with prefill in a row, until one only decodes.  Steps of one size alone would not show which
# part of their time is due to prefill, and a wrong estimate could keep them at that size.
MAX_MIXED_STEPS = 200
MIN_PREFILL_STEPS = 4  # the steps that the waiting tokens are spread over, at least
MIN_SIZE_RATIO, MAX_SIZE_RATIO = 0.6, 1.5  # a full-wave size so close replaces the computed size
FULL_WAVE_SPEEDUP = 1.15  # a full-wave size may exceed the tokens that fit the target by this


class PrefillLoad(NamedTuple):
    """The prompts to prefill."""

    num_prompts: int  # prefilling, or waiting and admissible
    num_tokens: int  # that all prompts, prefilling or waiting, have left
    context_len: int  # computed tokens of the longest prompt that is prefilling


class ChunkShape(NamedTuple):
    """The step sizes that suit a device, in tokens."""

    min_prefill_tokens: int  # smaller chunks would only read the weights more often
    tile: int  # rows of a GEMM tile
    weight_bound_tokens: int  # a step of so many takes about as long as reading the weights


GPU = ChunkShape(128, 128, 256)
CPU = ChunkShape(32, 16, 0)


class ChunkBudget:
    def __init__(self, resolved: ResolvedConfig, times: StepTimes) -> None:
        self._max_tokens = resolved.max_batched_tokens
        self._target_seconds = resolved.itl_target_ms / 1000
        # On a CPU a step of any size takes longer than the automatic target.
        self._limited = bool(self._target_seconds) or resolved.device != "cpu"
        self._chunk_shape = CPU if resolved.device == "cpu" else GPU
        self._full_wave_sizes = resolved.full_wave_sizes
        self._times = times

    def tokens(self, rows: int, kv_tokens: int, load: PrefillLoad) -> int:
        """Prompt tokens for a step whose decode rows read `kv_tokens` of KV.

        rows: decode rows, by their tokens
        """
        room = self._max_tokens - rows
        # A single prompt delays no other request.
        if not self._limited or (not rows and load.num_prompts == 1):
            return room
        if rows > FEW_ROWS and self._times.num_mixed_steps >= MAX_MIXED_STEPS:
            return 0
        if self._queue_is_short(rows, load.num_tokens):
            return min(room, self._chunk_shape.weight_bound_tokens - rows)
        min_prefill_tokens, tile, _ = self._chunk_shape
        seconds = self._step_seconds(rows, kv_tokens, load)
        fits = self._times.prompt_tokens(rows, kv_tokens, load.context_len, seconds)
        fits = min(4 * min_prefill_tokens if fits is None else fits, load.num_tokens)
        spread = min(fits, load.num_tokens // MIN_PREFILL_STEPS) if rows else fits
        min_total = -(-(rows + min_prefill_tokens) // tile) * tile
        total = max((rows + spread) // tile * tile, min_total)
        max_total = (rows + fits) * (1.0 if self._target_seconds else FULL_WAVE_SPEEDUP)
        return min(room, self._full_wave_size(total, min_total, max_total) - rows)

    def _queue_is_short(self, rows: int, tokens: int) -> bool:
        """Whether steps that mostly read the weights prefill the queue soon enough.

        With few decode rows larger steps are short enough; many leave too little room for prefill.
        """
        if self._target_seconds or not FEW_ROWS < rows <= WEIGHT_BOUND_ROWS:
            return False
        return tokens <= WEIGHT_BOUND_STEPS * (self._chunk_shape.weight_bound_tokens - rows)

    def _full_wave_size(self, total: int, min_total: int, max_total: float) -> int:
        """A size near `total` whose GEMMs fill the device, else `total`; tokens of a step."""
        full = self._full_wave_sizes
        index = bisect_left(full, total)
        if index < len(full) and full[index] <= max(total, min(max_total, MAX_SIZE_RATIO * total)):
            return full[index]
        if index and full[index - 1] >= max(min_total, MIN_SIZE_RATIO * total):
            return full[index - 1]
        return total

    def _step_seconds(self, rows: int, kv_tokens: int, load: PrefillLoad) -> float:
        """The longest time that the step may take."""
        if not rows:
            return AUTO_TARGET_SECONDS * MAX_WIDENING
        if self._target_seconds:
            return self._target_seconds
        queue_seconds = load.num_tokens * self._times.per_token
        if load.num_prompts > rows and queue_seconds > LONG_QUEUE_SECONDS:
            return MAX_STEP_SECONDS
        widening = queue_seconds / (QUEUE_SECONDS_PER_ROW * max(rows, FEW_ROWS))
        widening = min(max(widening, 1.0), MAX_WIDENING)
        decode = self._times.decode_seconds(rows, kv_tokens)
        growth = min(queue_seconds / MAX_SHARE_QUEUE_SECONDS, 1.0)
        share = PREFILL_SHARE + (MAX_PREFILL_SHARE - PREFILL_SHARE) * growth
        return max(AUTO_TARGET_SECONDS * widening, decode / (1 - share))
