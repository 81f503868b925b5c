"""EncoderSchedule: which stages of the image encoder a step runs, and what it pays for them.

A stage is a block of the encoder's transformer.  A chunk can have tokens of an image once all
stages of it have run, at the latest in the same step before the model.  What a stage takes is
learned as part of a step's time, and counted in prompt tokens that take as long: a step that may
have so many prompt tokens runs stages in place of some of them, as many as fit.  So an image that
decode rows would have to wait for is encoded over several steps, one image after the other, in the
order in which prompts get their tokens.  Without decode rows an image is encoded at once, and so is
always one of at most whole_image_tokens, whose stages are one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

from runtime.messages import PromptImage
from runtime.scheduler.batch import ImageStages
from runtime.scheduler.chunked_prefill import EncoderLimits
from runtime.scheduler.images.features import begun_for, unread_images
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepTimes


class EncoderWork:
    """The stages of one step."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.stages: list[ImageStages] = []
        self.num_stages = 0
        self.operations = 0.0  # 10^9


class EncoderSchedule:
    def __init__(self, requests: RequestTable, times: StepTimes) -> None:
        self._requests, self._times, self._features = requests, times, requests.images
        self._whole_image_tokens = requests.resolved.whole_image_tokens
        stages = requests.resolved.encoder_stages
        # Of all stages before each: operations for a token, and for a pair.
        self._tokens, self._pairs = (
            [0.0, *accumulate(stage[which] for stage in stages)] for which in (0, 1)
        )

    def operations(self, num_tokens: int, first: int, end: int) -> float:
        """Of the stages from `first` up to `end` of an image, in 10^9."""
        linear = self._tokens[end] - self._tokens[first]
        return num_tokens * (linear + num_tokens * (self._pairs[end] - self._pairs[first]))

    def cost(self, num_tokens: int, first: int, end: int) -> float:
        """What these stages take, in prompt tokens; 0 as long as nothing is known of it."""
        operations = self.operations(num_tokens, first, end)
        return self._times.encoder_tokens(end - first, operations)

    def tokens_left(self, sequences: Iterable[Sequence]) -> int:
        """What their images that are not encoded yet will take, in prompt tokens."""
        num_stages = self._features.num_stages
        return sum(
            math.ceil(self.cost(one.num_tokens, self._stage_of(one), num_stages))
            for one in self._missing(sequences)
        )

    def work_left(self, sequences: Iterable[Sequence]) -> tuple[int, float]:
        """-> the stages that these images still need, and the operations in them, in 10^9."""
        num_stages, stages, operations = self._features.num_stages, 0, 0.0
        for image in self._missing(sequences):
            first = self._stage_of(image)
            stages += num_stages - first
            operations += self.operations(image.num_tokens, first, num_stages)
        return stages, operations

    def _missing(self, sequences: Iterable[Sequence]) -> list[PromptImage]:
        """The images that have to be encoded for these sequences, each once."""
        missing: dict[bytes, PromptImage] = {}
        for sequence in sequences:
            if sequence.request.images:
                missing |= {one.digest: one for one in unread_images(sequence)}
        return [one for one in missing.values() if one.digest not in self._features]

    def first_cost(self, sequence: Sequence, limits: EncoderLimits) -> int:
        """The least that the next token of a sequence costs in the encoder, in prompt tokens."""
        image = self._next_missing(sequence)
        if image is None or not limits.charged or image.start > sequence.num_computed_tokens:
            return 0
        first = self._stage_of(image)
        end = first + self._least_stages(image, limits)
        return math.ceil(self.cost(image.num_tokens, first, end))

    def _least_stages(self, image: PromptImage, limits: EncoderLimits) -> int:
        """The fewest that a step may run of an image."""
        if limits.cut and image.num_tokens > self._whole_image_tokens:
            return 1
        return self._features.num_stages - self._stage_of(image)

    def waits_for(self, sequence: Sequence) -> Sequence | None:
        """The sequence whose image has to be encoded before the next token of this one can be."""
        begun, image = self._features.begun, self._next_missing(sequence)
        if begun is None or image is None or image.digest == begun.digest:
            return None
        if image.start > sequence.num_computed_tokens:
            return None
        prefilling = self._requests.prefilling.values()
        ready = (one for one in prefilling if one.held_since is None)
        return next((one for one in ready if begun_for(begun, one)), None)

    def stage_for_others(self, sequence: Sequence, limits: EncoderLimits) -> int:
        """What the next stage costs of an image that is begun for others than `sequence`."""
        begun = self._features.begun
        if begun is None or not limits.cut or begun_for(begun, sequence):
            return 0
        return math.ceil(self.cost(begun.num_tokens, begun.stage, begun.stage + 1))

    def encode(
        self,
        work: EncoderWork,
        sequence: Sequence,
        count: int,
        room: int,
        *,
        must_run: bool,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Run stages for the next `count` tokens of a sequence, which may take `room` tokens.

        must_run: a stage at least is run if one is needed, however long it takes
        alone: whatever others wait for.  The image that is half-way is given up unless it is one of
        this sequence, and so are features that others have yet to read, where there is no room:
        those images are encoded again
        -> for how many of these tokens there are features then, and room, and what it cost
        """
        start, cost = sequence.num_computed_tokens, 0
        end = start + count
        if alone:
            self._features.give_up_unless_wanted([sequence])
        for image in unread_images(sequence):
            if image.start >= end:
                break
            if image.digest not in self._features:
                before = max(image.start - start, 0)
                must = must_run and not before and not cost
                others: Iterable[Sequence] = () if alone else self._requests.prefilling.values()
                cost += self._run(work, image, others, room - cost - before, must=must)
                if image.digest not in self._features:
                    end = start + before
                    break
                least = before if work.limits.cut else before + 1
                end = min(end, start + max(room - cost, least))
            if image.start < end:
                first = image.start >= start or sequence.needs_slot_init
                self._features.read(image.digest, first=first)
        return end - start, cost

    def _run(
        self,
        work: EncoderWork,
        image: PromptImage,
        others: Iterable[Sequence],
        room: int,
        *,
        must: bool,
    ) -> int:
        """Run stages of an image, unless there is no room beside what `others` can read.

        -> what they cost
        """
        features, cost = self._features, 0
        begun = features.begun
        if begun is not None and begun.digest != image.digest:
            if work.limits.cut:
                return 0  # its turn comes when the other is encoded
            cost = self._advance(work, features.num_stages - begun.stage, None)
        first = self._stage_of(image)
        count = self._affordable(work, image, first, room - cost, must=must)
        if not count:
            return cost
        if features.begun is None and not features.try_begin(image, others):
            return cost
        return cost + self._advance(work, count, image)

    def _affordable(
        self, work: EncoderWork, image: PromptImage, first: int, room: int, *, must: bool
    ) -> int:
        """The number of stages to run of an image."""
        end = num_stages = self._features.num_stages
        if not work.limits.charged:
            return num_stages - first
        if work.limits.cut:
            of_stage = self.operations(image.num_tokens, first, first + 1)
            least = self._least_stages(image, work.limits)
            if not self._times.knows_encoder(of_stage):  # a step shows how long the least takes
                end = first + least * int(not work.num_stages)
            while end > first and self.cost(image.num_tokens, first, end) > room:
                end -= least
            return end - first or least * int(must)
        fits = self.cost(image.num_tokens, first, num_stages) <= room
        return num_stages - first if fits or must else 0

    def _advance(self, work: EncoderWork, count: int, image: PromptImage | None) -> int:
        begun = self._features.begun
        assert begun is not None
        first, end, num_tokens = begun.stage, begun.stage + count, begun.num_tokens
        work.stages.append(self._features.advance(count, image))
        work.num_stages += count
        work.operations += self.operations(num_tokens, first, end)
        return math.ceil(self.cost(num_tokens, first, end)) if work.limits.charged else 0

    def _stage_of(self, image: PromptImage) -> int:
        """The next stage of an image whose features are not there."""
        begun = self._features.begun
        return begun.stage if begun is not None and begun.digest == image.digest else 0

    def _next_missing(self, sequence: Sequence) -> PromptImage | None:
        """The first image of a sequence that has to be encoded."""
        if not sequence.request.images:
            return None
        missing = (one for one in unread_images(sequence) if one.digest not in self._features)
        return next(missing, None)
