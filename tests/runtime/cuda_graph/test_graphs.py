"""Which graph a step gets, and which graphs are captured when; captures themselves need a GPU."""

from __future__ import annotations

import random
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from runtime.cuda_graph import pool as pool_module
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.graphs import Graphs
from runtime.cuda_graph.launch import (
    RESERVE_BYTES,
    SMALL,
    LaunchPlanner,
)
from runtime.cuda_graph.step import StepTensors
from runtime.stats import GraphCounts
from tests.support.engine.fake_graphs import CPU, FakeExecutor


def test_a_step_without_a_graph_takes_the_next_larger_one(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    assert graphs.fit(5, 5) == Bucket(8, 8, True)
    assert graphs.fit(129, 129) == Bucket(256, 256, True)
    assert graphs.fit(200, 3) == Bucket(256, 256, False)
    while graphs.executor.prepare():
        pass
    assert graphs.fit(5, 5) == Bucket(5, 5, True)
    assert graphs.fit(200, 3) == Bucket(256, 32, False)


def test_a_step_is_not_padded_to_more_than_twice_its_tokens(graphs: FakeExecutor) -> None:
    assert graphs.fit(700, 9) == Bucket(768, 128, False)
    graphs.capture(Bucket(2048, 256, False))
    assert graphs.fit(700, 9) == Bucket(768, 128, False), "as it is, without a graph"
    assert graphs.fit(1030, 9) == Bucket(2048, 256, False)


def test_rows_that_decode_and_prompts_have_graphs_of_their_own(graphs: FakeExecutor) -> None:
    graphs.capture(Bucket(32, 32, False))
    assert graphs.fit(20, 20) == Bucket(20, 20, True)
    graphs.capture(Bucket(32, 32, True))
    assert graphs.fit(20, 20) == Bucket(32, 32, True)
    assert graphs.fit(20, 19) == Bucket(32, 32, False)


def test_no_step_captures_a_graph_however_often_it_is_missed(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    known, before = set(graphs.captured), graphs.executor.graph_counts.captures
    for _ in range(200):
        for rows in (3, 17, 200):
            assert graphs.step(rows, rows).graph, "in the next larger one"
    assert set(graphs.captured) == known and graphs.executor.graph_counts.captures == before


def test_no_step_that_could_have_a_graph_runs_without_from_the_start_on() -> None:
    for rows in (1, 5, 256, 300, 700, 1024):
        buckets = Buckets(rows, 8192)
        captured = set(buckets.startup_set())
        planner = LaunchPlanner(
            buckets, captured, free_bytes=lambda: RESERVE_BYTES, uncaptured=buckets.graphs()
        )
        for best in buckets.graphs():
            found = planner.fit(best.tokens, best.rows)
            assert found in captured, (best, found)
            assert found.tokens <= max(2 * best.tokens, SMALL)


def test_the_first_idle_moment_goes_to_the_size_that_is_padded_most(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    graphs.executor.prepare()
    assert graphs.fit(130, 130) == Bucket(192, 192, True)
    for _ in range(2):
        graphs.executor.prepare()
    assert graphs.fit(65, 65) == Bucket(96, 96, True)


def test_an_idle_moment_goes_to_what_the_load_before_has_missed(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    for _ in range(1000):
        graphs.step(17, 17)
    graphs.executor.prepare()
    assert graphs.fit(17, 17) == Bucket(17, 17, True)


def test_steps_in_a_larger_graph_and_without_one_are_counted(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    counts = graphs.executor.graph_counts
    assert counts.captures == len(graphs.captured)
    counts.reset()
    graphs.step(16, 16)
    assert counts == GraphCounts()
    graphs.step(17, 17)
    graphs.step(200, 3)
    assert counts == GraphCounts(steps_in_larger=2)
    graphs.step(4096, 3)
    launch = graphs.step(16, 16, all_hidden_states=True)
    assert not launch.graph and counts == GraphCounts(steps_in_larger=2, steps_without=2)


def test_nothing_is_captured_when_memory_is_short(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    known = len(graphs.captured)
    graphs.free = RESERVE_BYTES - 1
    assert not graphs.executor.prepare()
    assert len(graphs.captured) == known


def test_a_graph_that_cannot_be_captured_ends_capturing_and_nothing_else(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.executor.capture_startup_set()
    known = dict(graphs.captured)

    def fail(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(graphs.executor.graphs, "capture", fail)
    assert not graphs.executor.prepare()
    assert "192 tokens could not be captured" in caplog.text and "no memory left" in caplog.text
    assert not graphs.executor.prepare()
    assert graphs.captured == known
    assert graphs.fit(17, 17) == Bucket(32, 32, True)


def test_what_cannot_be_captured_says_itself_what_is_wrong(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenGraph:
        """A stream whose capture has been broken off."""

        def capture_begin(self, **options: object) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("capture was invalidated")

    def cause(bucket: Bucket) -> StepTensors:
        raise RuntimeError("a copy from pageable memory")

    monkeypatch.undo()
    broken = Graphs(cause, lambda bucket: None, CPU)
    monkeypatch.setattr(pool_module.torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(pool_module.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(pool_module.torch.cuda, "stream", lambda stream: nullcontext())
    broken.pool._stream, broken.pool._pool = MagicMock(), None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="pageable memory"):
        broken.capture(Bucket(8, 8, True))


def test_steps_too_large_for_a_graph_do_not_take_the_turn_of_those_that_miss_one(
    graphs: FakeExecutor,
) -> None:
    graphs.executor.capture_startup_set()
    for _ in range(2000):
        graphs.step(8000, 3)
    for _ in range(1000):
        graphs.step(17, 17)
    graphs.executor.prepare()
    assert Bucket(17, 17, True) in graphs.captured


def test_a_graph_for_fewer_rows_comes_last(graphs: FakeExecutor) -> None:
    """Padding the rows of a mixed step costs little."""
    graphs.executor.capture_startup_set()
    for _ in range(1000):
        assert graphs.step(700, 9).bucket == Bucket(768, 256, False)
    while any(bucket.decode for bucket in graphs.planner._uncaptured):
        graphs.executor.prepare()
        assert Bucket(768, 128, False) not in graphs.captured
    graphs.executor.prepare()
    assert Bucket(768, 128, False) in graphs.captured


def test_a_start_captures_no_graph_for_images_and_idle_moments_capture_all(
    graphs: FakeExecutor, seeing: FakeExecutor
) -> None:
    for one in (graphs, seeing):
        one.executor.capture_startup_set()
    assert seeing.captured.keys() == graphs.captured.keys()
    launch = seeing.step(1048, 1, has_images=True)
    assert not launch.graph and launch.bucket == Bucket(1152, 256, False, images=True)
    while seeing.executor.prepare():
        pass
    assert seeing.captured.keys() == set(seeing.executor._buckets.graphs())
    for tokens, rows in ((1048, 1), (2048, 256), (3, 3), (1, 1), (600, 40)):
        launch = seeing.step(tokens, rows, has_images=True)
        assert launch.graph and launch.bucket.images
        assert not seeing.step(tokens, rows).bucket.images
    assert not seeing.step(2049, 1, has_images=True).graph
    assert not seeing.step(64, 2, has_images=True, all_hidden_states=True).graph


def test_steps_with_images_take_no_graph_of_others_and_others_none_of_theirs(
    seeing: FakeExecutor,
) -> None:
    draw = random.Random(0)
    everything = seeing.executor._buckets.graphs()
    for _ in range(200):
        seeing.captured.clear()
        for bucket in draw.sample(everything, draw.randint(1, len(everything))):
            seeing.capture(bucket)
        for has_images in (True, False):
            tokens = draw.randint(1, 2100)
            launch = seeing.step(tokens, draw.randint(1, min(tokens, 256)), has_images=has_images)
            assert launch.bucket.images == has_images
            assert launch.graph == (launch.bucket in seeing.captured)
            assert tokens <= launch.bucket.tokens <= max(3 * tokens, 2 * SMALL)
            assert launch.bucket.rows >= len(launch.batch.slots)


def test_images_that_a_load_has_missed_most_come_first(seeing: FakeExecutor) -> None:
    seeing.executor.capture_startup_set()
    for _ in range(1000):
        seeing.step(290, 2, has_images=True)
    seeing.executor.prepare()
    assert seeing.step(290, 2, has_images=True).bucket == Bucket(320, 256, False, images=True)
    assert seeing.step(290, 2, has_images=True).graph
