"""WaitingQueue: sequences that wait for admission; and which requests may be queued at all."""

from __future__ import annotations

import heapq
from bisect import insort
from itertools import chain

from runtime.config import ResolvedConfig
from runtime.messages import EngineRequest
from runtime.scheduler.images.image_sums import ImageSums
from runtime.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences by priority key.  Those that finish while they wait are removed lazily.

    The first few are kept in a sorted list apart from the heap, so that the scheduler can choose
    among them.  Held sequences are counted, but never at the front.
    """

    FRONT: int = 16  # sequences: enough to find a short prompt behind long ones

    def __init__(self) -> None:
        self._front: list[Sequence] = []  # ascending
        self._heap: list[tuple[tuple[int, int], Sequence]] = []  # all after the front
        self._held: set[Sequence] = set()
        self._num_finished = 0
        self.count = 0  # sequences that wait, held ones included
        self.num_tokens = 0  # of the prompts that wait
        self.images = ImageSums()  # in these prompts

    @property
    def num_admissible(self) -> int:
        """Sequences that are not held."""
        return self.count - len(self._held)

    def push(self, sequence: Sequence) -> None:
        if sequence.held_since is not None:
            self._held.add(sequence)
            self.count += 1
            return
        if sequence in self._held:
            self._held.remove(sequence)
        else:
            self.count += 1
        # A preempted sequence gets another token when the step in flight is committed.
        sequence.num_waiting_tokens = len(sequence.tokens)
        self._count(sequence, 1)
        front = self._front
        if front and sequence.priority_key < front[-1].priority_key:
            insort(front, sequence, key=lambda one: one.priority_key)
            if len(front) <= self.FRONT:
                return
            sequence = front.pop()
        heapq.heappush(self._heap, (sequence.priority_key, sequence))

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens += sign * sequence.num_waiting_tokens
        for image in sequence.request.images:
            self.images.add(image, sign)

    def front(self) -> list[Sequence]:
        """The first FRONT sequences by priority key, in order.  The caller must not modify it."""
        front, heap = self._front, self._heap
        if any(sequence.finish is not None for sequence in front):
            alive = [sequence for sequence in front if sequence.finish is None]
            self._num_finished -= len(front) - len(alive)
            self._front = front = alive
        while heap and len(front) < self.FRONT:
            sequence = heapq.heappop(heap)[1]
            if sequence.finish is None:
                front.append(sequence)
            else:
                self._num_finished -= 1
        return front

    def head(self) -> Sequence | None:
        front = self.front()
        return front[0] if front else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence of the front."""
        self.count -= 1
        self._count(sequence, -1)
        self._front.remove(sequence)

    def mark_finished(self, sequence: Sequence) -> None:
        """`finish` of a waiting sequence was set.  Compacts when half of the queue has finished."""
        self.count -= 1
        if sequence in self._held:
            self._held.remove(sequence)
            return
        self._count(sequence, -1)
        self._num_finished += 1
        if self._num_finished * 2 > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[1].finish is None]
            heapq.heapify(self._heap)
            self._front = [sequence for sequence in self._front if sequence.finish is None]
            self._num_finished = 0

    def check_integrity(self) -> None:
        """Assert that the counters agree with the queue."""
        waiting = chain(self._front, (sequence for _, sequence in self._heap))
        alive = [sequence for sequence in waiting if sequence.finish is None]
        assert len(alive) + len(self._held) == self.count
        assert all(one.held_since is not None and one.finish is None for one in self._held)
        assert all(one.held_since is None for one in alive)
        assert sum(sequence.num_waiting_tokens for sequence in alive) == self.num_tokens
        images = ImageSums()
        for image in chain.from_iterable(sequence.request.images for sequence in alive):
            images.add(image)
        assert images == self.images


def validation_error(
    request: EngineRequest, resolved: ResolvedConfig, vocab_size: int
) -> str | None:
    """Why this request can never run, or would harm others if it did; None if it can.

    The server has checked the same before: this protects the engine.
    """
    tokens, params = request.tokens, request.params
    if not tokens:
        return "the prompt has no tokens: send at least one"
    pooled = params.pooling is not None
    if params.max_tokens != 0 if pooled else params.max_tokens < 1:
        return f"`max_tokens` is {params.max_tokens}: it must be {'0' if pooled else 'at least 1'}"
    for name, ids in (
        ("prompt", tokens),
        ("stop_ids", params.stop_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_ids", params.allowed_ids),
        ("logprob_ids", params.logprob_ids),
        ("banned", list(chain.from_iterable(params.banned))),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            return (
                f"`{name}` contains {wrong}, not a token id of this model: "
                f"ids run from 0 to {vocab_size - 1}"
            )
    if request.images:
        error = _image_error(request, resolved.image_token_side, resolved.max_image_pixels)
        if error is not None:
            return error
    if len(tokens) + (not pooled) > resolved.max_model_len:
        answer = "" if pooled else " with at least one token of answer"
        return (
            f"prompt has {len(tokens)} tokens, the maximum context length is "
            f"{resolved.max_model_len}{answer}: shorten the prompt"
        )
    # The last token of an answer has no KV position.
    longest = min(len(tokens) + params.max_tokens, resolved.max_model_len) - (not pooled)
    if resolved.kv_capacity.needed(longest) > resolved.num_pages:
        capacity = resolved.kv_capacity.longest(resolved.num_pages, resolved.max_model_len)
        return (
            f"prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}: the KV cache "
            f"holds {capacity} tokens of one request: shorten the prompt or lower max_tokens"
        )
    return None


def _image_error(request: EngineRequest, side: int, most: int) -> str | None:
    """Why the images of a request do not fit its prompt, or the model; None if they do."""
    if not side:
        return "the prompt has images, which this model does not read: send text alone"
    end = 0
    for number, image in enumerate(request.images):
        width, height = image.width, image.height
        if min(width, height) < side or width % side or height % side:
            return (
                f"image {number} is {width} x {height} pixels: sides are expected to be multiples "
                f"of {side}"
            )
        if width * height > 2 * most:  # long ones are a little larger than the limit
            return f"image {number} has {width * height} pixels, about {most} are taken at most"
        if image.num_tokens != width // side * (height // side):
            size = f"{width} x {height}"
            return f"image {number} of {size} pixels does not take {image.num_tokens} tokens"
        if len(image.pixels) != 3 * width * height:
            return f"image {number} has {len(image.pixels)} bytes, not 3 for each pixel"
        if image.start < end or image.start + image.num_tokens > len(request.tokens):
            return f"image {number} is not within the prompt, behind the images before it"
        end = image.start + image.num_tokens
    return None
