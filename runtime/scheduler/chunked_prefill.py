"""ChunkBudget: how many prompt tokens a step takes (chunked prefill).

Decode rows get their next token when the step ends, so prompt tokens delay them; a prompt that
waits delays its own first token.  The objective is the least waiting of all requests together, in
steps that are as even as the work allows:

    flow    the prompt tokens that have to be computed for each step of the decode rows, so that the
            queue does not grow: their ratio is that of the requests that finished lately
    drain   the prompt tokens with which the waiting prompts and the decode rows wait least until
            the queue is empty
    slack   the prompt tokens that lengthen the step by less than is noticed
    even    the prompt tokens of each step if the prompts of all requests there are, computed ones
            included, were spread over the length of an answer

A step takes the larger of sqrt(flow^2 + drain^2) and slack.  The root takes no more than flow,
drain and even, whichever is largest: requests that started close together end close together, and
their clients send the next prompts as one queue again.  `--itl-target-ms` takes the place of all
four: it is how long a step may take.  Times are those that StepTimes has learned.  Sizes are
rounded to those whose GEMMs fill the device (`full_wave_sizes`), and what one step rounds off, the
next ones make up for.  docs/scheduling.md derives the formula and shows what it does.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from runtime.config import ResolvedConfig
from runtime.scheduler.step_time import StepTimes

log = logging.getLogger("wavefill.scheduler")

FIRST_TOKEN_WEIGHT = 20.0  # a first token may take so many times as long as the next ones
HEADROOM = 1.25  # prompt tokens computed for each that arrives, so that the queue ends
UNNOTICED_GAP_SECONDS = 0.008  # between two tokens
UNNOTICED_STRETCH = 2.0  # times the decode-only step, for at most half of the longest prompt
IMAGE_STRETCH = 1.4  # times the step of prompts of text with as many tokens

MIX_REQUESTS = 256  # that the ratio of prompt tokens to generated tokens remembers
# Steps with prefill in a row, until one only decodes.  Steps of one size alone would not show which
# part of their time is due to prefill, and a wrong estimate could keep them at that size.
MAX_MIXED_STEPS = 200
FEW_ROWS = 8  # fewer decode rows need no such step: prompts come and go
MIN_FULL_WAVE_RATIO = 0.75  # of the smallest full-wave size: smaller steps take whole tiles
MAX_CARRIED_TILES = 4  # of rounding, that are made up for in later steps


class PrefillLoad(NamedTuple):
    """The prompts to prefill: those that have a slot, and those waiting for which there is room."""

    num_prompts: int
    num_tokens: int  # that they have left
    context_len: int  # computed tokens of the longest context that is prefilling
    longest: int  # tokens that one of those with a slot has left, at most
    known_tokens: int  # of the decode rows, on the host
    num_computed: int = 0  # tokens of those prompts that were computed, not cached
    encoder_tokens: int = 0  # that take as long as encoding what is left of their images
    has_images: bool = False  # there are tokens of images among them


class ChunkShape(NamedTuple):
    """The step sizes that suit a device, in tokens."""

    min_prefill_tokens: int  # smaller chunks would only read the weights more often
    tile: int  # rows of a GEMM tile
    weight_bound_tokens: int  # a step of so many takes about as long as reading the weights
    busy_tokens: int  # a step of so many computes at the device's full speed


class EncoderLimits(NamedTuple):
    """How the work of a step for the image encoder is limited."""

    charged: bool  # it takes the place of prompt tokens
    cut: bool  # between any two stages of a large image; else between images


GPU = ChunkShape(128, 128, 256, 2048)
CPU = ChunkShape(32, 16, 0, 256)


class RequestMix:
    """What requests are like: prompt tokens computed, and cached, and tokens generated."""

    def __init__(self) -> None:
        # Of those that finished lately.
        self._prompt = self._computed = self._generated = self._finished = 0.0
        # Of the decode rows.
        self._rows_prompt = self._rows_computed = 0
        self._encoder = 0.0  # the encoder's work for images, in prompt tokens
        self._rows_encoder = 0

    def record(self, prompt: int, cached: int, generated: int, encoder: int = 0) -> None:
        """A request has finished, of whose `prompt` tokens `cached` were not computed.

        encoder: prompt tokens that take as long as encoding its images took
        """
        keep = 1 - 1 / MIX_REQUESTS
        self._prompt = keep * self._prompt + prompt
        self._computed = keep * self._computed + prompt - cached
        self._encoder = keep * self._encoder + encoder
        self._generated = keep * self._generated + generated
        self._finished = keep * self._finished + 1

    def count_row(self, prompt: int, cached: int, sign: int = 1, encoder: int = 0) -> None:
        """A request decodes from now on; with `sign` -1, it no longer does."""
        self._rows_prompt += sign * prompt
        self._rows_computed += sign * (prompt - cached)
        self._rows_encoder += sign * encoder

    @property
    def encoder_share(self) -> float:
        """What images took in the encoder for each token of their prompts, in prompt tokens."""
        return self._encoder / self._prompt if self._encoder else 0.0

    @property
    def encoder_ratio(self) -> float:
        """The same, for each prompt token that was computed."""
        computed = self._computed + self._rows_computed
        encoder = self._encoder + self._rows_encoder
        return encoder / computed if computed and encoder else 0.0

    def computed_per_generated(self, known_tokens: int) -> float:
        """Prompt tokens computed for each token generated; 0 before the first request has finished.

        known_tokens: of all decode rows, their prompts included.  What these have generated shows
        that answers have become longer, before any of them has finished.
        """
        if not self._generated:
            return 0.0
        finished = self._computed / self._generated
        generated = self._generated + known_tokens - self._rows_prompt
        return min(finished, (self._computed + self._rows_computed) / max(generated, 1.0))

    def computed_per_step(self, prefilling_tokens: int) -> float:
        """Prompt tokens of a step, if all requests there are were spread over one answer's steps.

        prefilling_tokens: of the prompts that do not decode yet.  The decode rows' own prompts are
        known, other than the mix of those that finished: it is not out of date when loads change.
        """
        if not self._generated:
            return 0.0
        steps = max(self._generated / self._finished, 1.0)
        return (self._rows_computed + prefilling_tokens) / steps

    @property
    def mean_answer(self) -> float:
        """Tokens of an answer; 0 before the first request has finished."""
        return self._generated / self._finished if self._finished else 0.0

    @property
    def computed_share(self) -> float:
        """Of the prompt tokens, those that are not cached; 1 before the first request."""
        return self._computed / self._prompt if self._prompt else 1.0


class ChunkBudget:
    def __init__(self, resolved: ResolvedConfig, times: StepTimes, mix: RequestMix) -> None:
        self._max_tokens = resolved.max_batched_tokens
        self._target_seconds = resolved.itl_target_ms / 1000
        # On a CPU a step of any size takes longer than an unnoticed gap.
        self._limited = bool(self._target_seconds) or resolved.device != "cpu"
        self._chunk_shape = CPU if resolved.device == "cpu" else GPU
        self._full_wave_sizes = resolved.full_wave_sizes
        self._times = times
        self._mix = mix
        self._warned = False
        self._carried = 0.0  # prompt tokens that rounding has left for later steps

    def tokens(self, rows: int, kv_tokens: int, load: PrefillLoad) -> int:
        """Prompt tokens for a step whose decode rows read `kv_tokens` of KV.

        rows: decode rows, by their tokens
        """
        room = self._max_tokens - rows
        # A single prompt delays no other request.
        if not self._limited or (not rows and load.num_prompts == 1):
            return room
        if not rows:
            least = self._chunk_shape.busy_tokens
            return min(room, self._even_size(max(load.num_tokens / FIRST_TOKEN_WEIGHT, least), 0))
        if rows > FEW_ROWS and self._times.num_mixed_steps >= MAX_MIXED_STEPS:
            return 0
        if not self._times.per_token:
            return min(room, 4 * self._chunk_shape.min_prefill_tokens)
        work = load.num_tokens + load.encoder_tokens
        slack = self._size_within(rows + min(self._slack(rows, kv_tokens, load), work))
        if self._target_seconds:
            self._warn_if_missed(rows, kv_tokens)
            return min(room, max(slack, self._min_size(rows)) - rows)
        needed = max(self._needed(rows, kv_tokens, load), self._chunk_shape.min_prefill_tokens)
        if load.encoder_tokens:
            needed = self._with_encoder(needed, rows, kv_tokens, load)
        if needed >= work:
            return min(room, work)
        return min(room, max(self._even_size(needed, rows), slack) - rows)

    def encoder_limits(self, rows: int, load: PrefillLoad) -> EncoderLimits:
        """What tokens() means for the image encoder.

        It takes part of them, whole stages beside decode rows (of a small image, all of them) and
        whole images without, where a step has a limit.
        """
        limited = self._limited and (rows > 0 or load.num_prompts > 1)
        return EncoderLimits(charged=limited, cut=limited and rows > 0)

    def _warn_if_missed(self, rows: int, kv_tokens: int) -> None:
        """Log, once, that the decode rows alone take longer than the target."""
        seconds = self._times.decode_seconds(rows, kv_tokens)
        if seconds > self._target_seconds and not self._warned:
            self._warned = True
            log.warning(
                "--itl-target-ms %g cannot be kept: %d decode rows alone take %.1f ms a step; "
                "raise it, or lower --max-num-seqs",
                *(1000 * self._target_seconds, rows, 1000 * seconds),
            )

    def _needed(
        self, rows: int, kv_tokens: int, load: PrefillLoad, encoder_ratio: float = 1.0
    ) -> float:
        """sqrt(flow^2 + drain^2), but at most the largest of flow, drain and even: prompt tokens.

        A step of p tokens that take t seconds each, with decode rows that alone take d seconds,
        lets `rows` next tokens wait d + p t; the queue of n prompts and w tokens, one after the
        other, waits (n + 1) / 2 times the (d + p t) w / p that it takes to end.  The sum, in which
        a first token counts as FIRST_TOKEN_WEIGHT next ones, is least for
        p = sqrt((n + 1) / 2 w d / (t rows FIRST_TOKEN_WEIGHT)).

        encoder_ratio: what a token of a prompt takes, its share of the encoder included
        """
        per_generated = self._mix.computed_per_generated(load.known_tokens) * encoder_ratio
        flow = HEADROOM * per_generated * rows
        even = HEADROOM * self._mix.computed_per_step(load.num_tokens + load.num_computed)
        decode = self._times.decode_seconds(rows, kv_tokens)
        waiting = (load.num_prompts + 1) / 2 * load.num_tokens * decode / self._times.per_token
        drain = math.sqrt(waiting / (rows * FIRST_TOKEN_WEIGHT))
        return max(flow, drain, min(math.hypot(flow, drain), even))

    def _with_encoder(self, needed: float, rows: int, kv_tokens: int, load: PrefillLoad) -> float:
        """`needed` prompt tokens, and for the encoder what is needed for its work as well.

        Prompts with images take longer than others of as many tokens.  That decode rows wait for
        them, too, lengthens a step by IMAGE_STRETCH at most: the rest is for the prompts to wait.
        """
        ratio = 1 + self._mix.encoder_ratio
        load = load._replace(
            num_tokens=load.num_tokens + load.encoder_tokens,
            num_computed=int(load.num_computed * ratio),
        )
        decode = self._times.decode_seconds(rows, kv_tokens) / self._times.per_token
        most = IMAGE_STRETCH * (decode + needed) - decode
        return min(max(self._needed(rows, kv_tokens, load, ratio), needed), most)

    def _slack(self, rows: int, kv_tokens: int, load: PrefillLoad) -> float:
        """Prompt tokens with which the step takes no longer than the target, or is noticed."""

        longer = self._times.images_seconds if load.has_images else 0.0

        def fits(seconds: float) -> int:
            seconds -= longer
            return self._times.prompt_tokens(rows, kv_tokens, load.context_len, seconds) or 0

        if self._target_seconds:
            return fits(self._target_seconds)
        decode = self._times.decode_seconds(rows, kv_tokens)
        stretched = min(fits(UNNOTICED_STRETCH * decode), load.longest / 2)
        return max(fits(UNNOTICED_GAP_SECONDS), stretched)

    def _min_size(self, rows: int) -> int:
        """The smallest step that prompts take part in: however long it takes, no prompt starves."""
        tile = self._chunk_shape.tile
        return -(-(rows + self._chunk_shape.min_prefill_tokens) // tile) * tile

    def _size_within(self, total: float) -> int:
        """The largest size of a step within `total` tokens that suits the device; 0 if none."""
        full, tile = self._full_wave_sizes, self._chunk_shape.tile
        if full and total >= full[0]:
            return full[bisect_right(full, total) - 1]
        return int(total) // tile * tile

    def _even_size(self, prefill: float, rows: int) -> int:
        """One of the two sizes next to rows + prefill tokens, so that their mean is that many."""
        full, tile = self._full_wave_sizes, self._chunk_shape.tile
        total = rows + prefill
        if total <= self._chunk_shape.weight_bound_tokens:
            return self._chunk_shape.weight_bound_tokens
        target = total + self._carried
        if full and total > MIN_FULL_WAVE_RATIO * full[0]:
            index = min(bisect_left(full, target), len(full) - 1)
            low, high = full[max(index - 1, 0)], full[index]
        else:
            low = max(int(target) // tile * tile, self._min_size(rows))
            high = low + tile
        size = high if target - low > high - target else low
        carried = MAX_CARRIED_TILES * tile
        self._carried = min(max(target - size, -carried), carried)
        return size
