"""RowImages: what a step needs of the images of its rows, and what it does in their encoder.

A batch says which stages run, for which image, and whose features are given up (Batch.image_stages,
images_dropped): nothing is decided here, so that all ranks of a model have the same.  Features are
kept by the digest of the pixels: for the image's next chunks, for the same image in another prompt,
in a later turn or in another of `n` answers.

The positions of the rope are behind those of the KV where images come before (model_zoo/vision/
positions.py), by a number for each slot, which stays on the device: rows that decode need no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from model_zoo.inputs import StepImages
from model_zoo.vision.encoder import Encoding
from model_zoo.vision.positions import ImagePositions, ImageSpan
from runtime.executor.image_buffers import StepImageBuffers
from runtime.executor.transfers import upload
from runtime.messages import PromptImage
from runtime.scheduler.batch import Batch, ImageStages, NewRow
from runtime.stats import ImageCounts

T = TypeVar("T")


class Encoder(Protocol):
    """Of model_zoo/vision/encoder.py, or runtime/cuda_graph/encoder_graphs.py."""

    def begin(self, pixels: Tensor) -> Encoding: ...

    def advance(self, encoding: Encoding, stages: int) -> Tensor | None: ...

    @property
    def feature_shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class EncoderClock:
    """Counts the seconds that the encoder takes: of a GPU, without waiting for it."""

    def __init__(self, counts: ImageCounts, device: torch.device) -> None:
        self._counts, self._on_gpu = counts, device.type == "cuda"
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, work: Callable[[], T]) -> T:
        if not self._on_gpu:
            started = time.perf_counter()
            result = work()
            self._counts.seconds += time.perf_counter() - started
            return result
        self.collect()
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        result = work()
        ended.record()
        self._running.append((started, ended))
        return result

    def collect(self) -> None:
        """Add what has ended."""
        while self._running and self._running[0][1].query():
            started, ended = self._running.pop(0)
            self._counts.seconds += started.elapsed_time(ended) / 1000


class RowImages:
    def __init__(
        self,
        encoder: Encoder,
        *,
        token_side: int,
        num_slots: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """token_side: pixels of a side of what one token stands for; max_tokens: of a step"""
        self.counts = ImageCounts()
        self.buffers = StepImageBuffers(max_tokens, encoder.feature_shape, encoder.dtype, device)
        # [slots]: what is added to a token's place for its position.
        self.position_deltas = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._sent = np.zeros(num_slots, dtype=np.int64)  # their values
        self.encoder = encoder
        self._side, self._device = token_side, device
        self._clock = EncoderClock(self.counts, device)
        self._features: dict[bytes, Tensor] = {}  # by digest
        self._begun: tuple[bytes, Encoding] | None = None  # half-way through the encoder
        # By slot: where its images are, and their digests.
        self._rows: dict[int, tuple[ImagePositions, list[bytes]]] = {}

    def in_step(self, batch: Batch) -> bool:
        """Whether a token of the batch is of an image, before or after prepare()."""
        if not self._rows and not any(row.images for row in batch.new_rows):
            return False
        new = {row.slot: self._positions(row) for row in batch.new_rows}
        for slot, start, end in _prefill_rows(batch):
            known = self._rows.get(slot)
            positions = new[slot] if slot in new else known and known[0]
            if positions and positions.overlapping(start, end):
                return True
        return False

    def prepare(self, batch: Batch, num_tokens: int) -> StepImages | None:
        """Run the batch's stages of the encoder, and queue the copies that the step needs.

        num_tokens: of the step, padding included.  The result is that of `buffers`, valid until the
        next step is prepared.  None: no token is of an image.
        """
        for row in batch.new_rows:
            self._rows.pop(row.slot, None)
            positions = self._positions(row)
            if positions is not None:
                self._rows[row.slot] = positions, [image.digest for image in row.images]
        self._send_deltas(batch)
        self._clock.collect()
        read = self._digests_read(batch) if batch.images_dropped else set[bytes]()
        for digest in batch.images_dropped:
            if digest not in read:  # before the encoder needs the room
                self._drop(digest)
        for stages in batch.image_stages:
            self._encode(stages)
        step_images = self._step_images(batch, num_tokens) if self.in_step(batch) else None
        for digest in read.intersection(batch.images_dropped):
            self._drop(digest)
        return step_images

    def _digests_read(self, batch: Batch) -> set[bytes]:
        """Of the images of which the step computes tokens."""
        found: set[bytes] = set()
        for slot, start, end in _prefill_rows(batch):
            positions, digests = self._rows.get(slot, (None, []))
            if positions is not None:
                found.update(digests[number] for number in positions.overlapping(start, end))
        return found

    def _step_images(self, batch: Batch, num_tokens: int) -> StepImages:
        places = np.zeros((3, num_tokens), dtype=np.int64)
        index = np.full(num_tokens, -1, dtype=np.int64)
        found: list[Tensor] = []
        count, at = 0, batch.decode_rows
        assert (batch.q_lens[:at] == 1).all(), "a decode row has one token"
        places[:, :at] = batch.starts[:at] + self._sent[batch.slots[:at]]
        for slot, start, end in _prefill_rows(batch):
            row = slice(at, at + end - start)
            at += end - start
            known = self._rows.get(slot)
            if known is None:
                places[:, row] = np.arange(start, end)
                continue
            positions, digests = known
            places[:, row] = positions.triples(start, end)
            for number in positions.overlapping(start, end):
                span = positions.spans[number]
                first, last = max(span.start, start), min(span.end, end)
                features = self._features[digests[number]]
                found.append(features[first - span.start : last - span.start])
                index[row][first - start : last - start] = np.arange(count, count + last - first)
                count += last - first
        return self.buffers.write(found, index, places)

    def deltas(self, batch: Batch) -> Tensor | None:
        """[T]: position_deltas of the tokens of a batch that is prepared; None: all are 0."""
        deltas = self._sent[batch.slots]
        if not deltas.any():
            return None
        return upload(np.repeat(deltas, batch.q_lens), self._device)

    def _positions(self, row: NewRow) -> ImagePositions | None:
        if not row.images:
            return None
        side = self._side
        return ImagePositions(
            [ImageSpan(one.start, one.height // side, one.width // side) for one in row.images]
        )

    def _send_deltas(self, batch: Batch) -> None:
        """Those of the rows' next tokens; where the step has images, triples are used instead."""
        changed: dict[int, int] = {}
        for slot, _, end in _prefill_rows(batch) if self._rows else _slots_reset(batch):
            known = self._rows.get(slot)
            delta = 0 if known is None else known[0].delta(end)
            if self._sent[slot] != delta:
                self._sent[slot] = changed[slot] = delta
        if changed:
            numbers = np.array([[*changed], [*changed.values()]], dtype=np.int64)
            slots, deltas = upload(numbers, self._device).unbind()
            self.position_deltas.index_copy_(0, slots, deltas)

    def _encode(self, stages: ImageStages) -> None:
        """Run stages of an image; after the last there are features."""
        features = self._clock.run(lambda: self._advance(stages))
        if features is not None:
            self._features[stages.digest] = features
            self._begun = None
            self.counts.encoded += 1

    def _advance(self, stages: ImageStages) -> Tensor | None:
        if stages.image is not None:
            self._begun = stages.digest, self.encoder.begin(self._pixels(stages.image))
        assert self._begun is not None and self._begun[0] == stages.digest
        encoding = self._begun[1]
        assert encoding.stage == stages.first, "stages follow each other"
        return self.encoder.advance(encoding, stages.end - stages.first)

    def _pixels(self, image: PromptImage) -> Tensor:
        """uint8 [height, width, 3] on the device"""
        pinned = self._device.type == "cuda"
        shape = image.height, image.width, 3
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        pixels.numpy().reshape(-1)[:] = np.frombuffer(image.pixels, dtype=np.uint8)
        return pixels.to(self._device, non_blocking=True)

    def _drop(self, digest: bytes) -> None:
        """Free the features of an image, or what there is of them."""
        self._features.pop(digest, None)
        if self._begun is not None and self._begun[0] == digest:
            self._begun = None


def _prefill_rows(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Slot, first place and the place after the last, of the rows that do not decode."""
    first = batch.decode_rows
    starts = batch.starts[first:]
    ends = starts + batch.q_lens[first:]
    yield from zip(batch.slots[first:].tolist(), starts.tolist(), ends.tolist(), strict=True)


def _slots_reset(batch: Batch) -> Iterable[tuple[int, int, int]]:
    """As _prefill_rows, of the slots of new sequences alone: no slot has images."""
    return [(row.slot, 0, 0) for row in batch.new_rows]
