"""ChunkBudget: how many prompt tokens a step takes.

Rows that decode get their next token when the step ends, and a step reads all weights whatever it
computes: a few prompt tokens in every step cost less than many in some.  So what waits is spread
over a few steps, and no step may take longer than a target.  `--itl-target-ms` sets it.  The
automatic one yields where it would make the whole server slow:

    some rows, and little waits                       steps that mostly read the weights
    many rows, whose step is long without a prompt    prompts get a share of the step: more of
                                                      it the longer the work that waits
    much waits for each row that decodes              up to WIDEST times the target
    more wait than decode, and for long               steps of LONGEST_SECONDS

Of sizes that are nearly the same, one is taken whose products fill the device (full_wave_sizes.py).

The numbers are the best of `python -m benchmarks.schedule.bench_schedule` for the usual loads of an
8B model; they are times, not tokens, so that they mean the same for every model.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from runtime.config import ResolvedConfig
from runtime.scheduler.step_time import StepTimes

AUTOMATIC_SECONDS = 0.010  # a target if none was asked for
WIDEST = 7.0  # times that, if much waits, or nobody decodes
MUCH_SECONDS = 0.025  # of prompts for each row that decodes: the automatic target grows from here
FEW_ROWS = 8  # count as so many: even one does not like to wait
LONG_SECONDS = 1.0  # of prompts
LONGEST_SECONDS = 0.12  # of a step, if more prompts wait than rows decode, and for that long
# Of a step's time prompts get at least so much under the automatic target.  Little more than they
# need on average: callers who began together would else stay together, and their prompts would
# crowd into some steps and leave others without any.
SHARE, LARGEST_SHARE = 0.5, 0.6
SHARE_SECONDS = 1.5  # of prompts that wait: the share has grown to the largest
READING_ROWS = 48  # at most, in steps that mostly read the weights
READING_STEPS = 30  # of that kind, at most, until all that waits is fed
# Steps with prompts in a row, until one only decodes.  Steps of one size alone would not tell which
# part of their time is the prompts', and what is guessed instead could keep them at that size.
MIXED_IN_A_ROW = 200
STEPS = 4  # that what waits is spread over, at least
SMALLER, LARGER = 0.6, 1.5  # times the size: as good, if the device computes it better
FASTER = 1.15  # times the tokens that should end in time: as many do if they fill the device


class Prompts(NamedTuple):
    """What there is to feed."""

    number: int  # under way, or waiting and free to begin
    tokens: int  # of all that are under way or wait
    context: int  # tokens before those that the longest prompt under way feeds next


class ChunkShape(NamedTuple):
    """What a device is good at."""

    fewest: int  # prompt tokens: smaller steps would only read the weights more often
    tile: int  # tokens that a matrix product computes together
    reading: int  # tokens of a step that still takes about as long as reading the weights


GPU = ChunkShape(128, 128, 256)
CPU = ChunkShape(32, 16, 0)


class ChunkBudget:
    def __init__(self, resolved: ResolvedConfig, times: StepTimes) -> None:
        self._most = resolved.max_batched_tokens
        self._asked = resolved.itl_target_ms / 1000
        # On a CPU a step of any size takes longer than the automatic target.
        self._limited = bool(self._asked) or resolved.device != "cpu"
        self._chunk_shape = CPU if resolved.device == "cpu" else GPU
        self._full_wave_sizes = resolved.full_wave_sizes
        self._times = times

    def tokens(self, rows: int, kv_tokens: int, prompts: Prompts) -> int:
        """Prompt tokens for a step in which `rows` decode, reading `kv_tokens`."""
        room = self._most - rows
        # A prompt that is alone harms nobody.
        if not self._limited or (not rows and prompts.number == 1):
            return room
        if rows > FEW_ROWS and self._times.mixed_in_a_row >= MIXED_IN_A_ROW:
            return 0
        if self._queue_is_short(rows, prompts.tokens):
            return min(room, self._chunk_shape.reading - rows)
        fewest, tile, _ = self._chunk_shape
        seconds = self._seconds(rows, kv_tokens, prompts)
        fits = self._times.prompt_tokens(rows, kv_tokens, prompts.context, seconds)
        fits = min(4 * fewest if fits is None else fits, prompts.tokens)
        wanted = min(fits, prompts.tokens // STEPS) if rows else fits
        least = -(-(rows + fewest) // tile) * tile
        total = max((rows + wanted) // tile * tile, least)
        most = (rows + fits) * (1.0 if self._asked else FASTER)
        return min(room, self._filling(total, least, most) - rows)

    def _queue_is_short(self, rows: int, tokens: int) -> bool:
        """Whether steps that mostly read the weights feed it soon enough.

        Beside few rows larger ones are short enough; many leave too little room in them.
        """
        if self._asked or not FEW_ROWS < rows <= READING_ROWS:
            return False
        return tokens <= READING_STEPS * (self._chunk_shape.reading - rows)

    def _filling(self, total: int, least: int, most: float) -> int:
        """About as many tokens as `total`, if the device computes those better."""
        full = self._full_wave_sizes
        place = bisect_left(full, total)
        if place < len(full) and full[place] <= max(total, min(most, LARGER * total)):
            return full[place]
        if place and full[place - 1] >= max(least, SMALLER * total):
            return full[place - 1]
        return total

    def _seconds(self, rows: int, kv_tokens: int, prompts: Prompts) -> float:
        """How long the step may take."""
        if not rows:
            return AUTOMATIC_SECONDS * WIDEST
        if self._asked:
            return self._asked
        wait = prompts.tokens * self._times.per_token
        if prompts.number > rows and wait > LONG_SECONDS:
            return LONGEST_SECONDS
        widening = min(max(wait / (MUCH_SECONDS * max(rows, FEW_ROWS)), 1.0), WIDEST)
        decode = self._times.decode_seconds(rows, kv_tokens)
        share = SHARE + (LARGEST_SHARE - SHARE) * min(wait / SHARE_SECONDS, 1.0)
        return max(AUTOMATIC_SECONDS * widening, decode / (1 - share))
