"""Which graph a step gets, and which graphs are made when; captures themselves need a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from runtime.cuda_graph import graphs as module
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.graphs import MISSES, RESERVE_BYTES, CapturedGraph, Graphs
from runtime.cuda_graph.step import StepTensors

NOTHING = StepTensors(torch.zeros(0), torch.zeros(0))


class ReplayedGraph:
    def replay(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Of 256 rows, none captured yet; a capture only notes its bucket."""
    buckets = Buckets(256, 8192)
    made = Graphs(lambda bucket: NOTHING, lambda bucket: None, buckets, torch.device("cpu"))
    made._uncaptured = buckets.graphs()

    def note(bucket: Bucket) -> None:
        made._keep(bucket, CapturedGraph(ReplayedGraph(), NOTHING))  # type: ignore[arg-type]

    monkeypatch.setattr(made, "_capture", note)
    monkeypatch.setattr(module, "free_bytes", lambda device: RESERVE_BYTES)
    return made


def test_a_step_without_a_graph_takes_the_next_larger_one(graphs: Graphs) -> None:
    graphs.capture_startup_set()
    assert graphs.fit(5, 5) == Bucket(8, 8, True)
    assert graphs.fit(129, 129) == Bucket(256, 256, True)
    assert graphs.fit(200, 3) == Bucket(256, 256, False)
    while graphs.capture_next():
        pass
    assert graphs.fit(5, 5) == Bucket(5, 5, True)
    assert graphs.fit(200, 3) == Bucket(256, 32, False)


def test_a_step_is_not_padded_to_more_than_twice_its_tokens(graphs: Graphs) -> None:
    assert graphs.fit(700, 9) == Bucket(768, 128, False)
    graphs._capture(Bucket(2048, 256, False))
    assert graphs.fit(700, 9) == Bucket(768, 128, False), "as it is, without a graph"
    assert graphs.fit(1030, 9) == Bucket(2048, 256, False)


def test_rows_that_decode_and_prompts_have_graphs_of_their_own(graphs: Graphs) -> None:
    graphs._capture(Bucket(32, 32, False))
    assert graphs.fit(20, 20) == Bucket(20, 20, True)
    graphs._capture(Bucket(32, 32, True))
    assert graphs.fit(20, 20) == Bucket(32, 32, True)
    assert graphs.fit(20, 19) == Bucket(32, 32, False)


def test_a_loaded_server_captures_what_it_misses_most(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    graphs.capture_startup_set()
    known = len(graphs.captured)

    def step(rows: int) -> None:
        graphs.capture_missed()
        graphs.fit(rows, rows)

    for _ in range(MISSES):
        step(16)
        step(17)
    assert len(graphs.captured) == known
    step(17)
    assert graphs.fit(17, 17) == Bucket(17, 17, True)
    for _ in range(5 * MISSES):
        step(200)
    assert len(graphs.captured) == known + 1, "the next one waits for some seconds"
    now += module.SECONDS_APART
    step(200)
    assert graphs.fit(200, 200) == Bucket(200, 200, True)


def test_nothing_is_captured_when_memory_is_short(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.capture_startup_set()
    known = len(graphs.captured)
    monkeypatch.setattr(module, "free_bytes", lambda device: RESERVE_BYTES - 1)
    assert not graphs.capture_next()
    assert len(graphs.captured) == known


def test_a_graph_that_cannot_be_captured_ends_capturing_and_nothing_else(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.capture_startup_set()
    known = dict(graphs.captured)

    def fail(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(graphs, "_capture", fail)
    for _ in range(MISSES):
        graphs.fit(17, 17)
    graphs.capture_missed()
    assert "17 tokens could not be captured" in caplog.text and "no memory left" in caplog.text
    assert not graphs.capture_next()
    assert graphs.captured == known
    assert graphs.fit(17, 17) == Bucket(32, 32, True)


def test_a_server_starts_without_graphs_where_nothing_can_be_captured(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(bucket: Bucket) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_capture", fail)
    assert graphs.measure() == 0
    assert "not permitted" in caplog.text
    graphs.capture_startup_set()
    assert not graphs.capture_next() and not graphs.captured


def test_lack_of_memory_for_the_first_graphs_reaches_the_memory_planner(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(graphs, "_capture", fail)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.measure()


def test_what_cannot_be_captured_says_itself_what_is_wrong(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(module.torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(module.torch.cuda, "stream", lambda stream: nullcontext())
    graphs._run, graphs._stream, graphs._pool = cause, MagicMock(), None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="pageable memory"):
        graphs._capture(Bucket(8, 8, True))


def test_steps_too_large_for_a_graph_do_not_delay_the_capture_of_those_that_miss_one(
    graphs: Graphs,
) -> None:
    graphs.capture_startup_set()
    for _ in range(2 * MISSES):
        graphs.fit(8000, 3)
    for _ in range(MISSES):
        graphs.fit(17, 17)
    graphs.capture_missed()
    assert Bucket(17, 17, True) in graphs.captured


def test_a_graph_for_fewer_rows_is_not_captured_while_others_wait_for_answers(
    graphs: Graphs,
) -> None:
    graphs._capture(Bucket(768, 256, False))
    graphs._uncaptured.remove(Bucket(768, 256, False))
    for _ in range(2 * MISSES):
        assert graphs.fit(700, 9) == Bucket(768, 256, False)
    graphs.capture_missed()
    assert Bucket(768, 128, False) not in graphs.captured
