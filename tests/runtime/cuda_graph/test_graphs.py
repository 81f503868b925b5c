"""Which graph a step gets, and which graphs are captured when; captures themselves need a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from runtime.cuda_graph import graphs as module
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.graphs import CapturedGraph, Graphs
from runtime.cuda_graph.launch import MISSES, RESERVE_BYTES, SECONDS_APART, Bucket, LaunchPlanner
from runtime.cuda_graph.step import StepTensors
from runtime.scheduler.batch import make_batch
from tests.support.engine.fake_model import resolved

NOTHING = StepTensors(torch.zeros(0), torch.zeros(0))
CPU = torch.device("cpu")


class ReplayedGraph:
    def replay(self) -> None:
        pass


class FakeExecutor:
    """A GraphExecutor of 256 rows with no graph yet, whose captures only note their bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = resolved(max_num_seqs=256, max_batched_tokens=8192)
        kv = KVPool.allocate(
            layers=1, pages=1, kv_heads=1, page_size=4, head_dim=2, dtype=torch.float32, device=CPU
        )
        self.executor = GraphExecutor(
            MagicMock(),
            resolved=config,
            vocab_size=7,
            kv=kv,
            backend=ReferenceBackend(),
            device=CPU,
        )
        self.now, self.free = 100.0, RESERVE_BYTES
        planner = self.executor.planner = LaunchPlanner(
            self.executor._buckets,
            self.executor.graphs.captured,
            free_bytes=lambda: self.free,
            uncaptured=sorted(
                self.executor._buckets.graphs(), key=lambda b: (b.decode, -b.tokens, -b.rows)
            ),
            clock=lambda: self.now,
        )
        self.planner = planner
        self.captured = self.executor.graphs.captured
        monkeypatch.setattr(self.executor.graphs, "capture", self.capture)
        monkeypatch.setattr(module, "free_bytes", lambda device: self.free)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def capture(self, bucket: Bucket) -> None:
        self.captured[bucket] = CapturedGraph(ReplayedGraph(), NOTHING)  # type: ignore[arg-type]

    def fit(self, tokens: int, rows: int) -> Bucket:
        return self.planner.fit(tokens, rows)

    def launch(self, tokens: int, rows: int) -> Bucket:
        """The bucket of a step, after what it captures."""
        batch = make_batch(slots=[0] * rows, tokens=[0] * tokens)
        launch = self.planner.plan(batch, all_hidden_states=False)
        self.executor._capture(launch.capture)
        return launch.bucket


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    return FakeExecutor(monkeypatch)


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


def test_a_loaded_server_captures_what_it_misses_most(graphs: FakeExecutor) -> None:
    graphs.executor.capture_startup_set()
    known = len(graphs.captured)

    for _ in range(MISSES):
        graphs.launch(16, 16)
        graphs.launch(17, 17)
    assert len(graphs.captured) == known
    graphs.launch(17, 17)
    assert graphs.fit(17, 17) == Bucket(17, 17, True)
    for _ in range(5 * MISSES):
        graphs.launch(200, 200)
    assert len(graphs.captured) == known + 1, "the next one waits for some seconds"
    graphs.now += SECONDS_APART
    graphs.launch(200, 200)
    assert graphs.fit(200, 200) == Bucket(200, 200, True)


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
    for _ in range(MISSES):
        graphs.fit(17, 17)
    graphs.launch(8, 8)
    assert "17 tokens could not be captured" in caplog.text and "no memory left" in caplog.text
    assert not graphs.executor.prepare()
    assert graphs.captured == known
    assert graphs.fit(17, 17) == Bucket(32, 32, True)


def test_a_server_starts_without_graphs_where_nothing_can_be_captured(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(bucket: Bucket) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.executor.graphs, "capture", fail)
    assert graphs.executor.measure_graphs() == 0
    assert "not permitted" in caplog.text
    graphs.executor.capture_startup_set()
    assert not graphs.executor.prepare() and not graphs.captured


def test_lack_of_memory_for_the_first_graphs_is_told_to_who_plans_it(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(graphs.executor.graphs, "capture", fail)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.executor.measure_graphs()


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
    monkeypatch.setattr(module.torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(module.torch.cuda, "stream", lambda stream: nullcontext())
    broken._stream, broken._pool = MagicMock(), None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="pageable memory"):
        broken.capture(Bucket(8, 8, True))


def test_steps_too_large_for_a_graph_do_not_take_the_turn_of_those_that_miss_one(
    graphs: FakeExecutor,
) -> None:
    graphs.executor.capture_startup_set()
    for _ in range(2 * MISSES):
        graphs.fit(8000, 3)
    for _ in range(MISSES):
        graphs.fit(17, 17)
    graphs.launch(8, 8)
    assert Bucket(17, 17, True) in graphs.captured


def test_a_graph_for_fewer_rows_is_not_captured_while_others_wait_for_answers(
    graphs: FakeExecutor,
) -> None:
    graphs.capture(Bucket(768, 256, False))
    graphs.planner.take(Bucket(768, 256, False))
    for _ in range(2 * MISSES):
        assert graphs.fit(700, 9) == Bucket(768, 256, False)
    graphs.launch(8, 8)
    assert Bucket(768, 128, False) not in graphs.captured
