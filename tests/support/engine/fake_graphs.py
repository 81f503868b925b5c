"""An executor whose CUDA graphs are names, for tests on a CPU of which graphs there are."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from runtime.cuda_graph import graphs as module
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.graphs import CapturedGraph
from runtime.cuda_graph.launch import (
    RESERVE_BYTES,
    LaunchPlanner,
    StepLaunch,
)
from runtime.cuda_graph.step import StepTensors
from runtime.scheduler.batch import make_batch
from tests.support.engine.bench import resolved

NOTHING = StepTensors(torch.zeros(0), torch.zeros(0))
CPU = torch.device("cpu")


class ReplayedGraph:
    def replay(self) -> None:
        pass


class FakeExecutor:
    """A GraphExecutor of 256 rows with no graph yet, whose captures only note their bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, reads_images: bool = False) -> None:
        images: Any = MagicMock() if reads_images else None
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
            images=images,
        )
        self.free = RESERVE_BYTES
        planner = self.executor.planner = LaunchPlanner(
            self.executor._buckets,
            self.executor.graphs.captured,
            free_bytes=lambda: self.free,
            uncaptured=self.executor._buckets.graphs(),
        )
        self.executor.graph_counts = planner.counts
        self.planner = planner
        self.captured = self.executor.graphs.captured
        monkeypatch.setattr(self.executor.graphs, "capture", self.capture)
        monkeypatch.setattr(module, "free_bytes", lambda device: self.free)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def capture(self, bucket: Bucket) -> None:
        self.captured[bucket] = CapturedGraph(ReplayedGraph(), NOTHING)  # type: ignore[arg-type]

    def fit(self, tokens: int, rows: int) -> Bucket:
        return self.planner.fit(tokens, rows)

    def step(
        self, tokens: int, rows: int, *, all_hidden_states: bool = False, has_images: bool = False
    ) -> StepLaunch:
        batch = make_batch(slots=[0] * rows, tokens=[0] * tokens)
        return self.planner.plan(batch, all_hidden_states=all_hidden_states, has_images=has_images)


def let_no_capture_succeed(fake: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bucket: Bucket) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fake.executor.graphs, "capture", fail)
