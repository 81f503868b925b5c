"""An engine with an image encoder on a simulated device, which checks what it is asked to do."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import structs

from benchmarks.schedule.device_model import ENCODER, H200_VL, SimulatedClock, SimulatedDevice
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PromptImage, SamplingParams
from runtime.scheduler.batch import Batch
from runtime.scheduler.decode_columns import DecodeRows
from runtime.scheduler.prefill import PrefillRows

STAGES = len(ENCODER.stage_operations)
SIDE = ENCODER.token_side
CHECKED_STEPS = 8  # records of all pages take longer to compare than steps; what is wrong stays so


@cache
def pixels_of(side: int) -> bytes:
    return bytes(3 * (side * SIDE) ** 2)


def image(start: int, side: int, number: int) -> PromptImage:
    pixels, digest = pixels_of(side), number.to_bytes(32, "little")
    return PromptImage(start, side * side, side * SIDE, side * SIDE, pixels, digest)


def prompt(*parts: int | tuple[int, int]) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Numbers of text tokens, and (side, number) of images."""
    images: list[PromptImage] = []
    length = 0
    for part in parts:
        if isinstance(part, int):
            length += part
        else:
            images.append(image(length, *part))
            length += images[-1].num_tokens
    return [5] * length, tuple(images)


class CheckedDevice(SimulatedDevice):
    """Asserts what a real one needs of the stages of the encoder."""

    def __init__(self, clock: SimulatedClock, limit: int) -> None:
        super().__init__(clock, 1, model=H200_VL)
        self.batches: list[Batch] = []
        self.begun: tuple[bytes, int] | None = None
        self.features: set[bytes] = set()
        self.most_bytes = 0
        self._limit = limit
        self._sizes: dict[bytes, int] = {}
        self._images: dict[int, Any] = {}  # of each slot

    def forward(self, batch: Batch) -> None:
        self.batches.append(batch)
        super().forward(batch)
        assert len(batch.slots), "a step without rows has no results"
        for row in batch.new_rows:
            self._images[row.slot] = row.images
        for stages in batch.image_stages:
            self._encode(batch, stages)
        self._check_rows(batch)
        for digest in batch.images_dropped:
            begun = self.begun is not None and self.begun[0] == digest
            self.begun = None if begun else self.begun
            self.features.discard(digest)
        held = [*self.features, *([self.begun[0]] if self.begun else [])]
        num_bytes = sum(self._sizes[digest] for digest in held)
        assert num_bytes <= max(self._limit, self._sizes[held[0]] if len(held) == 1 else 0)

    def _encode(self, batch: Batch, stages: Any) -> None:
        assert 0 <= stages.first < stages.end <= STAGES
        if stages.image is not None:
            assert stages.first == 0
            before = self.begun and self.begun[0]
            given_up = before in (None, stages.digest) or before in batch.images_dropped
            assert given_up, "two images are half-way through the encoder"
            tokens = stages.image.num_tokens
            self._sizes[stages.digest] = tokens * 2 * ENCODER.feature_size
            self.begun = stages.digest, 0
        assert self.begun == (stages.digest, stages.first), "stages follow each other"
        self.begun = stages.digest, stages.end
        if stages.end == STAGES:
            self.begun = None
            self.features.add(stages.digest)

    def _check_rows(self, batch: Batch) -> None:
        rows = slice(batch.decode_rows, None)
        columns = batch.slots[rows], batch.starts[rows], batch.q_lens[rows]
        for slot, start, length in zip(*(each.tolist() for each in columns), strict=True):
            for one in self._images[slot]:
                tokens = one.width * one.height // SIDE**2
                if one.start < start + length and one.start + tokens > start:
                    assert one.digest in self.features, "a chunk has an image without features"


class EncodingServer:
    """An engine on a checked device, whose every step is within its limit."""

    def __init__(
        self,
        *,
        target_ms: float = 0.0,
        cache_bytes: int = 512 << 20,
        device: type[CheckedDevice] = CheckedDevice,
        **changes: Any,
    ):
        self.clock = SimulatedClock()
        self.device = device(self.clock, cache_bytes)
        config = structs.replace(
            H200_VL.config(20_000, target_ms),
            image_cache_bytes=cache_bytes, **{"num_pages": 2000, **changes},
        )  # fmt: skip
        self.engine = Engine(config, 1000, self.device, clock=self.clock)
        self.finished: dict[int, str | None] = {}
        self.first: dict[int, float] = {}
        self.charged: list[tuple[int, int]] = []  # tokens of steps with decode rows, and limits
        self._budget = self._steps = 0
        self._whole_image_tokens = config.whole_image_tokens
        scheduler = self.engine.scheduler
        self._step, self._tokens = scheduler._step, scheduler.prefill.chunks.tokens
        scheduler._step = self._checked_step  # type: ignore[method-assign]
        scheduler.prefill.chunks.tokens = self._noted_tokens  # type: ignore[method-assign]

    def _noted_tokens(self, *args: Any) -> int:
        self._budget = self._tokens(*args)
        return self._budget

    def _checked_step(self, *args: Any) -> tuple[DecodeRows, PrefillRows | None]:
        decoding, prefill = self._step(*args)
        work, times = prefill and prefill.encoder, self.engine.scheduler.times
        if prefill is None or work is None or not len(decoding.slots) or not times.knows_encoder(0):
            return decoding, prefill
        charged = len(prefill.tokens) + times.encoder_tokens(work.num_stages, work.operations)
        # Alone neither a stage nor an image that is encoded whole can be cut.
        wholes = [one.image is not None and one.end == STAGES for one in work.stages]
        whole = wholes == [True] and work.stages[0].image.num_tokens <= self._whole_image_tokens
        if prefill.tokens or not (whole or work.num_stages <= 1):
            assert charged <= self._budget + 1e-6, "a step is longer than its limit"
        self.charged.append((int(charged), self._budget))
        return decoding, prefill

    def add(self, id: int, tokens: list[int], images: tuple[PromptImage, ...] = (), **kwargs: Any):
        max_tokens, priority = kwargs.get("max_tokens", 20), kwargs.get("priority", 0)
        params = SamplingParams(max_tokens=max_tokens)
        self.engine.add(EngineRequest(id, 0, tokens, params, priority, images=images))

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                assert output.error is None, output.error
                self.first.setdefault(output.id, self.clock.now)
                if output.finish is not None:
                    self.finished[output.id] = output.finish
            self._steps += 1
            if self._steps % CHECKED_STEPS == 0 or self.engine.idle:
                self.engine.requests.check_integrity()

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("a prompt starves")

    def learn(self) -> None:
        """Run prompts of text and images beside a row that decodes."""
        self.add(9000, [1] * 100, max_tokens=400)
        self.step(3)
        for id in range(9001, 9005):
            self.add(id, *prompt(300, (16, id), 200), max_tokens=4)
            self.step(40)
        while len(self.finished) < 5:
            self.step()
        self.device.batches.clear()
