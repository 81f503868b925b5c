"""What a start measures of graphs: their memory, and which large steps need one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.cuda_graph import graphs as module
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.encoder_graphs import EncoderGraphs
from runtime.cuda_graph.graphs import Graphs
from runtime.cuda_graph.pool import GraphPool
from runtime.cuda_graph.step import StepTensors
from runtime.scheduler.batch import make_batch
from tests.support.engine.fake_graphs import CPU, NOTHING, FakeExecutor, let_no_capture_succeed


def test_a_server_starts_without_graphs_where_nothing_can_be_captured(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_no_capture_succeed(graphs, monkeypatch)
    graphs.executor.graphs.launch_bound_tokens = 8192  # by the largest, before another one failed
    assert graphs.executor.measure_graphs() == 0 == graphs.executor.launch_bound_tokens
    assert "not permitted" in caplog.text
    graphs.executor.capture_startup_set()
    assert not graphs.executor.prepare() and not graphs.captured


def test_a_rank_that_cannot_capture_ends_instead_of_leaving_the_others_to_their_sums(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_no_capture_succeed(graphs, monkeypatch)
    graphs.executor.must_capture = True
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.executor.measure_graphs()
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.executor.capture_startup_set()


def test_lack_of_memory_for_the_first_graphs_is_told_to_who_plans_it(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(graphs.executor.graphs, "capture", fail)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.executor.measure_graphs()


class CountedEncoder(EncoderGraphs):
    """Its graphs take 70 bytes."""

    def __init__(self) -> None:
        self.captures = 0

    def measure(self, pool: GraphPool) -> int:
        return 70

    def capture(self, pool: GraphPool) -> None:
        self.captures += 1


def test_the_encoders_graphs_are_counted_and_captured_at_the_start(
    seeing: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    without = seeing.executor.measure_graphs()
    encoder = seeing.executor._encoder_graphs = CountedEncoder()
    assert seeing.executor.measure_graphs() == without + 70
    seeing.executor.capture_startup_set()
    assert encoder.captures == 1


def test_where_no_step_can_be_captured_the_encoder_is_not_tried(
    seeing: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_no_capture_succeed(seeing, monkeypatch)
    encoder = seeing.executor._encoder_graphs = CountedEncoder()
    assert seeing.executor.measure_graphs() == 0
    seeing.executor.capture_startup_set()
    assert encoder.captures == 0


@pytest.mark.parametrize(
    ("launch_ms", "compute_ms", "largest"), [(31, 10, 6144), (45, 38, 0), (30, 90, 0)]
)
def test_steps_that_the_host_launches_more_slowly_than_the_device_computes_get_graphs(
    graphs: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    launch_ms: int,
    compute_ms: int,
    largest: int,
) -> None:
    now, executor = [0.0], graphs.executor
    launched: list[Bucket] = []
    replayed: list[Bucket] = []

    class SlowGraph:
        def __init__(self) -> None:
            self.bucket = launched[-1]

        def replay(self) -> None:
            first = self.bucket not in replayed
            replayed.append(self.bucket)
            now[0] += compute_ms / 1000 + (0.005 if first else 0.0)

    def record(run: Any) -> tuple[SlowGraph, StepTensors]:
        outputs = run()
        return SlowGraph(), outputs

    def launch(bucket: Bucket) -> StepTensors:
        launched.append(bucket)
        now[0] += launch_ms / 1000
        return NOTHING

    monkeypatch.setattr(executor, "graphs", Graphs(launch, lambda bucket: None, CPU))
    monkeypatch.setattr(executor.graphs.pool, "record", record)
    monkeypatch.setattr(module, "alias", lambda output: output)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    executor.measure_graphs()
    found = executor.launch_bound_tokens
    assert found == pytest.approx(2048 * launch_ms / compute_ms, abs=1)
    largest_bucket = executor._buckets.graphs()[0]
    assert replayed.count(largest_bucket) == 2, "whatever the times: all ranks replay together"
    assert executor.extend_graphs(found) == (largest > 0) and not executor.extend_graphs(found)
    most = max(bucket.tokens for bucket in graphs.planner._uncaptured)
    assert most == max(largest, 2048) and most <= max(found, 2048)


def test_the_pool_that_images_need_beside_the_largest_graph_is_counted_once(
    seeing: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(bucket: Bucket) -> None:
        seeing.capture(bucket)
        largest = bucket.tokens == 2048 and bucket.rows == 256
        seeing.free -= {False: 1000, True: 50}[bucket.images] if largest else 3

    monkeypatch.setattr(seeing.executor.graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    seeing.free = 1 << 20
    others = len(seeing.executor._buckets.graphs()) - 2
    assert seeing.executor.measure_graphs() == 1000 + 50 + 3 * others
    assert seeing.planner.bytes_per_graph == 3


class Recorded:
    """Graphs that are recorded, and replayed in turns, as the names of the choices before them."""

    def __init__(self, graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.choice = ""
        self.buckets: list[Bucket] = []
        executor = graphs.executor
        monkeypatch.setattr(executor.graphs, "_dry_run", self._dry_run)
        monkeypatch.setattr(executor.graphs.pool, "record", self._record)
        monkeypatch.setattr(executor.graphs.pool, "renew", lambda: self.done.append("renew"))
        monkeypatch.setattr(executor, "forward", lambda batch: self.done.append("forward"))
        monkeypatch.setattr(executor, "sample", lambda batch: self.done.append("sample"))
        monkeypatch.setattr(module, "replayed_us", self._replayed)

    def choices(self, *names: str) -> list[Callable[[], None]]:
        return [lambda name=name: setattr(self, "choice", name) for name in names]

    def _dry_run(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        self.done.append("dry run")

    def _record(self, run: Callable[[], object]) -> tuple[str, None]:
        if self.choice == "fails":
            raise self.error
        self.done.append(f"record {self.choice}")
        return self.choice, None

    def _replayed(self, recorded: list[str], calls: int, replays: int) -> list[float]:
        assert calls == 1 and replays >= 5
        self.done.append(f"replay {' '.join(recorded)}")
        return [float(len(name)) for name in recorded]

    error: Exception = RuntimeError("operation not permitted when stream is capturing")


def test_a_step_is_timed_with_each_choice_over_the_block_of_a_real_step(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(graphs, monkeypatch)
    batch = make_batch(slots=[0], tokens=[0], q_lens=[1])
    found = graphs.executor.step_times(batch, recorded.choices("one", "other"))
    assert found == [3.0, 5.0]
    step = graphs.planner.plan(batch, all_hidden_states=False)
    assert recorded.buckets == [step.bucket] * 2 and step.bucket.decode
    # Dry runs send a block of padding: the step comes after all of them.
    assert recorded.done == [
        "dry run", "record one", "dry run", "record other", "forward", "sample",
        "replay one other", "renew",
    ]  # fmt: skip


def test_a_choice_after_which_no_step_can_be_captured_takes_infinitely_long(
    graphs: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not here")
    recorded = Recorded(graphs, monkeypatch)
    batch = make_batch(slots=[0], tokens=[0], q_lens=[1])
    for error in (
        RuntimeError("operation not permitted when stream is capturing"),
        torch.OutOfMemoryError("no memory left"),
        triton_errors.OutOfResources(300, 227, "shared memory"),
    ):
        recorded.error = error
        recorded.done.clear()
        found = graphs.executor.step_times(batch, recorded.choices("one", "fails", "other"))
        assert found == [3.0, float("inf"), 5.0]
        assert recorded.done[-1] == "renew" and recorded.choice == "one", "for the step between"
        assert graphs.executor.step_times(batch, recorded.choices("fails", "one")) == []
        assert recorded.done[-1] == "renew", "what was recorded is dropped"
