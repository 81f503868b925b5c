"""ChunkBudget: how many prompt tokens a step takes.

Rows that decode get their next token when the step ends, so prompts are cut to what keeps a step
within a target, and to half of those that wait: a step reads all weights whatever it computes, and
a few prompt tokens in every step cost less than many in some.  `--itl-target-ms` sets the target.
The automatic one yields where it would make the whole server slow:

    many rows, whose step is long without a prompt    prompts get their share of the step
    prompts of more than MUCH_SECONDS wait            up to WIDEST times the target
    more than MUCH_FOR_A_ROW for each that decodes    up to twice that, in steps twice as large

Of sizes that are nearly the same, one is taken whose products fill the device (full_steps.py).

The numbers are the best of `python -m benchmarks.bench_schedule` for the usual loads of an 8B
model; they are times, not tokens, so that they mean the same for every model.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from runtime.config import Resolved
from runtime.step_time import StepTimes

AUTOMATIC_SECONDS = 0.014  # a target if none was asked for
WIDEST = 3.5  # times that, if much waits
MUCH_SECONDS = 0.5  # of prompts: from here on the automatic target grows with what waits
MUCH_FOR_A_ROW = 0.5  # seconds of prompts that wait, for each row that decodes
PROMPT_SHARE = 0.55  # of a step's time, at least, under the automatic target
STEPS = 2  # that what waits is spread over, at least
NEARLY = 0.75  # of what a step could take: enough, if fewer tokens suit the device better


class Prompts(NamedTuple):
    """What there is to feed."""

    number: int  # under way, or waiting and free to begin
    tokens: int  # of all that are under way or wait
    context: int  # tokens before those that the longest prompt under way feeds next


class Grain(NamedTuple):
    """What a device is good at."""

    fewest: int  # prompt tokens: smaller steps would only read the weights more often
    tile: int  # tokens that a matrix product computes together
    most: int  # tokens of a step, but if much waits: larger ones have no graph, and gain little


GPU = Grain(256, 128, 2048)
CPU = Grain(32, 16, 1 << 30)


class ChunkBudget:
    def __init__(self, resolved: Resolved, times: StepTimes) -> None:
        self._most = resolved.max_batched_tokens
        self._asked = resolved.itl_target_ms / 1000
        # On a CPU a step of any size takes longer than the automatic target.
        self._limited = bool(self._asked) or resolved.device != "cpu"
        self._grain = CPU if resolved.device == "cpu" else GPU
        self._full_steps = resolved.full_steps
        self._times = times

    def tokens(self, rows: int, kv_tokens: int, prompts: Prompts) -> int:
        """Prompt tokens for a step in which `rows` decode, reading `kv_tokens`."""
        room = self._most - rows
        # A prompt that is alone harms nobody.
        if not self._limited or (not rows and prompts.number == 1):
            return room
        wait = prompts.tokens * self._times.per_token
        widest = WIDEST
        fewest, tile, most = self._grain
        if wait > max(MUCH_SECONDS, MUCH_FOR_A_ROW * rows):
            widest, most = 2 * WIDEST, 2 * most
        seconds = self._seconds(rows, kv_tokens, wait, widest)
        fits = self._times.prompt_tokens(rows, kv_tokens, prompts.context, seconds)
        if fits is None:
            fits = 2 * fewest
        if rows:
            fits = min(fits, prompts.tokens // STEPS)
        least = -(-(rows + fewest) // tile) * tile
        total = self._filling(max(min((rows + fits) // tile * tile, most), least), least)
        return min(room, total - rows)

    def _filling(self, total: int, least: int) -> int:
        """Not many fewer tokens than `total`, if the device computes those better."""
        place = bisect_right(self._full_steps, total) - 1
        fewest = max(least, total * NEARLY)
        return (
            self._full_steps[place] if place >= 0 and self._full_steps[place] >= fewest else total
        )

    def _seconds(self, rows: int, kv_tokens: int, wait: float, widest: float) -> float:
        """How long the step may take, if prompts of `wait` seconds wait."""
        if not rows:
            return AUTOMATIC_SECONDS * widest
        if self._asked:
            return self._asked
        target = AUTOMATIC_SECONDS * min(max(wait / MUCH_SECONDS, 1.0), widest)
        return max(target, self._times.decode_seconds(rows, kv_tokens) / (1 - PROMPT_SHARE))
