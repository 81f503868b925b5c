"""The image encoder beside decoding: whole stages, within a step's limit, and nothing left over."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given

from benchmarks.schedule.device_model import ENCODER, H200_VL
from runtime.engine.load_report import LoadReport
from runtime.messages import PromptImage
from runtime.scheduler.batch import Batch
from runtime.scheduler.step_time import StepLoad
from tests.support.examples import examples
from tests.support.images.encoding_server import STAGES, CheckedDevice, EncodingServer, prompt

SIDES = (2, 8, 16, 32, 64)  # tokens of an image's sides


@dataclass(repr=False)
class Visit:
    tokens: list[int]
    images: tuple[PromptImage, ...]
    arrives: int
    leaves: int | None
    max_tokens: int
    priority: int

    def __repr__(self) -> str:
        images = [(one.start, one.num_tokens, one.digest[0]) for one in self.images]
        rest = self.arrives, self.leaves, self.max_tokens, self.priority
        return f"Visit({len(self.tokens)}, {images}, {rest})"


@dataclass
class Load:
    target_ms: float
    cache_bytes: int
    num_pages: int
    max_num_seqs: int
    whole_image_tokens: int
    visits: list[Visit] = field(default_factory=list[Visit])


@st.composite
def loads(draw: st.DrawFn) -> Load:
    load = Load(
        target_ms=draw(st.sampled_from([0.0, 9.0, 30.0])),
        cache_bytes=draw(st.sampled_from([1, 40 << 20, 200 << 20, 512 << 20])),
        num_pages=draw(st.sampled_from([240, 400, 4000])),
        max_num_seqs=draw(st.sampled_from([2, 4, 16])),
        whole_image_tokens=draw(st.sampled_from([0, 64, 256])),
    )
    parts = st.one_of(
        st.integers(1, 700),
        st.tuples(st.sampled_from(SIDES), st.integers(0, 3)),
    )
    for _ in range(draw(st.integers(1, 8))):
        # One number is one picture: (side, number) are its digest's.
        chosen = draw(st.lists(parts, min_size=1, max_size=5))
        named = [p if isinstance(p, int) else (p[0], 10 * p[0] + p[1]) for p in chosen]
        tokens, images = prompt(3, *named, 2)
        visit = Visit(
            tokens,
            images,
            arrives=draw(st.integers(0, 60)),
            leaves=draw(st.none() | st.none() | st.integers(0, 150)),
            max_tokens=draw(st.integers(1, 60)),
            priority=draw(st.sampled_from([0, 0, 1])),
        )
        load.visits.append(visit)
    return load


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(loads())
def test_every_prompt_ends_and_no_step_is_charged_more_than_its_limit(load: Load) -> None:
    server = EncodingServer(
        target_ms=load.target_ms, cache_bytes=load.cache_bytes,
        num_pages=load.num_pages, max_num_seqs=load.max_num_seqs,
        whole_image_tokens=load.whole_image_tokens,
    )  # fmt: skip
    room = load.num_pages * 16
    visits = [v for v in load.visits if len(v.tokens) + v.max_tokens <= room]
    for step in range(151):
        for id, visit in enumerate(visits):
            if visit.arrives == step:
                server.add(
                    id, visit.tokens, visit.images,
                    max_tokens=visit.max_tokens, priority=visit.priority,
                )  # fmt: skip
            if visit.leaves == step:
                server.engine.abort(id)
        server.step()
    server.run()
    for batch in server.device.batches:
        for one in batch.image_stages:
            if one.image is not None and one.image.num_tokens <= load.whole_image_tokens:
                assert one.end == STAGES
    ended = {id for id, visit in enumerate(visits) if id in server.finished}
    left = {id for id, v in enumerate(visits) if v.leaves is not None and v.leaves < v.arrives}
    assert ended | left == set(range(len(visits)))
    assert server.engine.requests.images.begun is None, "an image stays half-way"


def test_an_image_that_is_alone_is_encoded_in_one_step_with_its_whole_prompt() -> None:
    server = EncodingServer()
    server.add(1, *prompt(10, (32, 1), 14), max_tokens=3)
    server.step()
    [batch] = server.device.batches
    assert [(one.first, one.end) for one in batch.image_stages] == [(0, STAGES)]
    assert batch.q_lens.tolist() == [10 + 1024 + 14]


def test_beside_rows_that_decode_an_image_takes_several_steps_and_as_many_as_one_needs() -> None:
    server = EncodingServer()
    server.learn()
    for id in range(32):
        server.add(id, [1] * 128, max_tokens=2000)
    server.step(40)
    server.device.batches.clear()
    server.add(100, *prompt(10, (32, 1), 14))
    while 100 not in server.first:
        server.step()
    cuts = [one for batch in server.device.batches for one in batch.image_stages]
    assert 2 <= len(cuts) < STAGES
    ends = [one.end for one in cuts]
    assert [one.first for one in cuts] == [0, *ends[:-1]] and ends[-1] == STAGES
    assert all(batch.decode_rows == 32 for batch in server.device.batches[:-1])


def beside_rows(*sides: int) -> list[tuple[int, int, int]]:
    """Of images of so many tokens a side that come together beside rows that decode, whose small
    ones are encoded whole: the step, and the stages that it runs."""
    server = EncodingServer(whole_image_tokens=256)
    server.learn()
    for id in range(32):
        server.add(id, [1] * 128, max_tokens=2000)
    server.step(40)
    server.device.batches.clear()
    ids = range(100, 100 + len(sides))
    for id, side in zip(ids, sides, strict=True):
        server.add(id, *prompt(10, (side, id), 14))
    while not set(ids) <= server.first.keys():
        server.step()
    assert all(batch.decode_rows >= 32 for batch in server.device.batches)
    return [
        (at, one.first, one.end)
        for at, batch in enumerate(server.device.batches)
        for one in batch.image_stages
    ]


def test_beside_rows_that_decode_small_images_are_encoded_whole_and_large_ones_are_cut() -> None:
    assert [stages for _, *stages in beside_rows(16)] == [[0, STAGES]]
    assert len(beside_rows(17)) > 1
    small = beside_rows(16, 16, 16, 16)
    assert [stages for _, *stages in small] == [[0, STAGES]] * 4
    assert len({step for step, *_ in small}) > 1, "a step has no room for all"


def test_before_its_time_is_known_the_encoder_runs_one_small_image_a_step() -> None:
    server = EncodingServer(whole_image_tokens=256)
    server.add(1, [1] * 100, max_tokens=200)
    server.step(2)
    for id in range(2, 6):
        server.add(id, *prompt(10, (8, id), 14))
    server.step(2)
    [*batches] = (batch for batch in server.device.batches if batch.image_stages)
    assert [(one.first, one.end) for one in batches[0].image_stages] == [(0, STAGES)]


def test_the_load_that_an_engine_reports_has_what_its_encoder_has_left_once_for_an_image() -> None:
    server = EncodingServer()
    server.learn()
    report = LoadReport(server.engine, lambda *sent: None, 1)

    def left() -> tuple[float, float]:
        work = report._work()
        return work.encoder_stages, work.encoder_operations

    for id in range(32):
        server.add(id, [1] * 128, max_tokens=2000)
    server.step(40)
    assert left() == (0, 0)
    for id in (100, 101):
        server.add(id, *prompt(10, (32, 1), 14))
    waiting, found = left(), []
    while 101 not in server.first:
        server.step()
        found.append(left())
    whole = STAGES, server.engine.scheduler.prefill.encoder.operations(1024, 0, STAGES)
    # That two prompts share the image is known once they are admitted.
    assert waiting[0] > whole[0] and waiting[1] > whole[1]
    assert 0 < found[0][0] < whole[0] and 0 < found[0][1] < whole[1]
    assert found == sorted(found, reverse=True) and found[-1] == (0, 0)


class SlowLaunches(CheckedDevice):
    """The host takes LAUNCH seconds to queue a step with the encoder, beside the device's work."""

    LAUNCH = 0.03

    def forward(self, batch: Batch) -> None:
        super().forward(batch)
        if batch.image_stages:
            self._clock.now += self.LAUNCH
            self._free_at = max(self._free_at, self._clock.now)
        self.spent = [*getattr(self, "spent", []), self._free_at - self._began]


def test_a_step_does_not_count_what_the_host_takes_to_queue_the_next_one() -> None:
    server = EncodingServer(device=SlowLaunches)
    for id in range(32):
        server.add(id, [1] * 128, max_tokens=2000)
    server.step(60)
    for id in range(100, 112):
        server.add(id, *prompt(10, (16, id), 14), max_tokens=1)
        server.step(12)
    assert isinstance(server.device, SlowLaunches)
    *spent, _ = server.device.spent  # the last is in flight
    times = server.engine.scheduler.times
    recorded = [seconds for _, seconds in times.recent]
    assert recorded == pytest.approx(spent[-len(recorded) :])
    decoding = StepLoad(32, 0, 32 * 200, 0.0)
    assert times.seconds(decoding) == pytest.approx(H200_VL.step_ms(decoding) / 1000, rel=0.3)


def test_before_its_time_is_known_the_encoder_runs_one_stage_a_step() -> None:
    server = EncodingServer()
    server.add(1, [1] * 100, max_tokens=200)
    server.step(2)
    server.add(2, *prompt(10, (32, 1), 14))
    server.step(6)
    cuts = [one for batch in server.device.batches for one in batch.image_stages]
    assert [one.end - one.first for one in cuts[:2]] == [1, 1]


@pytest.mark.parametrize("target_ms", [0.0, 15.0, 30.0])
def test_a_large_image_after_small_ones_makes_no_step_long(target_ms: float) -> None:
    """Small images of one size do not show what an operation takes."""
    server = EncodingServer(target_ms=target_ms, num_pages=20_000)
    server.learn()
    for id in range(8):
        server.add(id, [1] * 128, max_tokens=6000)
    server.step(30)
    for id in range(1000, 1025):
        server.add(id, *prompt(10, (8, id), 14), max_tokens=2)
        while id not in server.first:
            server.step()
    num_steps = len(server.device.step_seconds)
    server.add(100, *prompt(10, (64, 1), 14))
    while 100 not in server.first:
        server.step()
    longest = max(seconds for _, seconds in server.device.step_seconds[num_steps:])
    assert longest <= 1.5 * max(target_ms / 1000, 0.020)


BYTES_A_TOKEN = 2 * ENCODER.feature_size


def test_images_that_have_no_room_beside_those_that_others_read_are_encoded_after_them() -> None:
    """Of both prompts each holds what the other needs: one's features, the other's turn."""
    server = EncodingServer(cache_bytes=6000 * BYTES_A_TOKEN, num_pages=20_000)
    server.learn()
    server.add(1, *prompt(500, (64, 1), 6000))
    server.add(2, *prompt((64, 2), 10))
    server.run(400)
    assert {1, 2} <= server.finished.keys()


def test_stages_are_not_lost_when_the_rows_that_decoded_end() -> None:
    server = EncodingServer(cache_bytes=5000 * BYTES_A_TOKEN, num_pages=20_000, max_num_seqs=16)
    server.learn()
    server.add(0, [1] * 128, max_tokens=600)
    server.step(3)
    server.add(1, [1] * 19_000, max_tokens=4)
    server.add(2, *prompt((64, 2), 3000), max_tokens=4)
    while server.engine.requests.images.begun is None:
        server.step()
    server.add(3, *prompt((32, 1), 10), max_tokens=4)
    server.engine.abort(0)
    server.run(400)
    assert {1, 2, 3} <= server.finished.keys()


def test_an_image_is_encoded_beside_a_long_prompt_of_text() -> None:
    server = EncodingServer(num_pages=20_000, max_num_seqs=64)
    server.learn()
    for id in range(32):
        server.add(id, [1] * 128, max_tokens=2000)
    server.step(40)
    server.add(100, [1] * 19_000)
    server.add(101, *prompt((64, 1), 10))
    while 101 not in server.first:
        server.step()
    assert 100 not in server.first, "the image waited for the text"


def test_images_of_a_prompt_are_encoded_in_their_order_and_one_image_at_a_time() -> None:
    server = EncodingServer()
    server.learn()
    server.add(0, [1] * 128, max_tokens=2000)
    server.step(5)
    numbers = count(1)
    for id in range(1, 4):
        server.add(id, *prompt(5, *((32, next(numbers)) for _ in range(3)), 5))
    while len(server.finished) < 5 + 3:
        server.step()
    begun = [
        int.from_bytes(one.digest, "little")
        for batch in server.device.batches
        for one in batch.image_stages
        if one.image is not None
    ]
    assert sorted(begun) == list(range(1, 10))
    for first in (1, 4, 7):
        places = [begun.index(number) for number in range(first, first + 3)]
        assert places == sorted(places)


def half_way(server: EncodingServer) -> None:
    """Request 100's image is half-way through the encoder, beside a row that decodes."""
    server.learn()
    server.add(0, [1] * 128, max_tokens=2000)
    server.step(5)
    server.add(100, *prompt(10, (32, 1), 14))
    while server.engine.requests.images.begun is None:
        server.step()


def test_an_abort_in_the_middle_of_an_image_frees_what_there_is_of_it() -> None:
    server = EncodingServer()
    half_way(server)
    images = server.engine.requests.images
    before = images.num_bytes
    server.engine.abort(100)
    assert images.begun is None
    assert images.num_bytes == before - 1024 * 2 * ENCODER.feature_size
    server.step()
    assert server.device.begun is None
    assert server.device.batches[-1].images_dropped == ((1).to_bytes(32, "little"),)


def test_a_preemption_in_the_middle_of_an_image_frees_it_and_it_is_encoded_anew() -> None:
    server = EncodingServer()
    half_way(server)
    requests = server.engine.requests
    requests.preempt(requests.live[100])
    assert requests.images.begun is None
    server.device.batches.clear()
    while 100 not in server.finished:
        server.step()
    begun = [one for batch in server.device.batches for one in batch.image_stages if one.image]
    assert len(begun) == 1 and server.finished[100] == "length"


def test_an_image_that_another_prompt_needs_as_well_goes_on_after_an_abort() -> None:
    server = EncodingServer()
    half_way(server)
    server.add(101, *prompt(20, (32, 1), 5))
    server.step()
    begun = server.engine.requests.images.begun
    server.engine.abort(100)
    if begun is not None:
        assert server.engine.requests.images.begun is begun
    server.device.batches.clear()
    while 101 not in server.finished:
        server.step()
    stages = [one for batch in server.device.batches for one in batch.image_stages]
    assert all(one.image is None for one in stages), "it began anew"


def test_short_prompts_without_end_do_not_keep_an_image_from_being_encoded() -> None:
    server = EncodingServer()
    server.learn()
    server.add(0, [1] * 128, max_tokens=4000)
    server.step(5)
    server.add(100, *prompt(10, (32, 1), 14))
    for id in count(1000):
        if 100 in server.finished:
            break
        assert id < 1400, "it starves"
        server.add(id, [1] * 200, max_tokens=2)
        server.step()


@pytest.mark.parametrize("size", [1, 40 << 20])
def test_features_that_do_not_fit_are_encoded_again_and_never_exceed_their_room(size: int) -> None:
    server = EncodingServer(cache_bytes=size)
    server.add(0, [1] * 128, max_tokens=3000)
    for id in range(1, 5):
        server.add(id, *prompt(5, (32, id), 5, (16, 50 + id), 5, (32, 60), 5))
    while len(server.finished) < 4:
        server.step()
