"""What GraphExecutor does on the host around a step, here one that computes nothing."""

from __future__ import annotations

import math
import os

import pytest
import torch

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from runtime.cuda_graph import buffers, prepare
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.buffers import Layout
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.step import StepTensors
from runtime.messages import SamplingParams
from runtime.sampling.kernels.row import ROW
from runtime.scheduler.batch import Batch, NewRow, make_batch
from tests.support.engine.bench import resolved

SLOTS, VOCAB = 8, 13
CPU = torch.device("cpu")
PLAIN = SamplingParams(max_tokens=4)
SCORED = SamplingParams(max_tokens=4, prompt_logprobs=0)


class NoModel:
    """Logits are hidden states."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class HostExecutor:
    """A GraphExecutor whose step notes its bucket and whether it computes all hidden states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = KVPool.allocate(
            layers=1, pages=1, kv_heads=1, page_size=4, head_dim=2, dtype=torch.float32, device=CPU
        )
        self.executor = GraphExecutor(
            NoModel(),  # type: ignore[arg-type]
            resolved=resolved(max_num_seqs=SLOTS, max_batched_tokens=64),
            vocab_size=VOCAB,
            kv=kv,
            backend=ReferenceBackend(),
            device=CPU,
        )
        self.steps: list[tuple[Bucket, bool]] = []
        monkeypatch.setattr(self.executor._step, "run", self.step)

    def step(self, bucket: Bucket, *, all_hidden_states: bool = False) -> StepTensors:
        self.steps.append((bucket, all_hidden_states))
        rows = bucket.tokens if all_hidden_states else bucket.rows
        return StepTensors(torch.zeros(rows, VOCAB), torch.zeros(bucket.rows, VOCAB))

    def sent_slots(self) -> list[int]:
        """Of the new sequences in the block of the last step; -1 is none."""
        layout = Layout.of(self.steps[-1][0])
        _, _, new_rows, _, _ = layout.packed.views(self.executor._buffers.block.view(torch.uint8))
        return new_rows[:, 0].tolist()

    def column(self, index: int) -> list[int]:
        """Of the rows in the block of the last step."""
        bucket = self.steps[-1][0]
        return Layout.of(bucket).column(self.executor._buffers.block, index, bucket.rows).tolist()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostExecutor:
    return HostExecutor(monkeypatch)


def decode_step(slots: list[int], new_rows: list[NewRow], pages: int = 0) -> Batch:
    """The fourth token of each row, with so many new pages: 100, 101 ... in slot 1."""
    rows = len(slots)
    new_pages = [100 * slot + page for slot in slots for page in range(pages)]
    return make_batch(
        slots, [3] * rows, [1] * rows, [5] * rows, [pages] * rows, new_pages, [True] * rows, rows,
        new_rows,
    )  # fmt: skip


def test_sequences_that_the_block_has_no_room_for_reach_the_sampler(host: HostExecutor) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    new_rows = [
        NewRow(slot, SamplingParams(max_tokens=4, top_k=2 + slot), 0, 1, []) for slot in range(6)
    ]
    host.executor.forward(decode_step([*range(6)], new_rows))
    assert host.sent_slots() == [0, 1, 2, 3]
    stored = host.executor._sampler.state.rows.numpy().view(ROW)[:, 0]
    assert stored["top_k"].tolist() == [0, 0, 0, 0, 6, 7, 0, 0], "the step stores the first four"


def test_a_step_without_new_sequences_sends_none_of_an_earlier_one(host: HostExecutor) -> None:
    for _ in range(buffers.RING):
        host.executor.forward(decode_step([1, 2], [NewRow(2, PLAIN, 0, 1, [])]))
        assert host.sent_slots() == [2, -1]
    host.executor.forward(decode_step([1, 2], []))
    assert host.sent_slots() == [-1, -1]


def test_pages_that_the_block_has_no_room_for_are_appended_before_the_step(
    host: HostExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "EXTRA_PAGES", 0)
    Layout.of.cache_clear()
    try:
        host.executor.forward(decode_step([3, 1], [], pages=2))
        before, added = host.column(prepare.PAGES_BEFORE), host.column(prepare.PAGES_ADDED)
    finally:
        Layout.of.cache_clear()
    table = host.executor._slots.page_tables[0]
    assert table[[3, 1], :3].tolist() == [[300, 301, 0], [100, 101, 0]]
    assert before == [2, 2] and added == [0, 0]


def test_a_prompt_that_is_scored_gets_all_hidden_states_and_its_scores(host: HostExecutor) -> None:
    whole = make_batch([2], [0], [3], [5, 6, 7], [1], [0], [True], 0, [NewRow(2, SCORED, 0, 3, [])])
    host.executor.forward(whole)
    [scores] = host.executor.sample(whole).wait().prompt_logprobs or []
    assert [score.logprob for score in scores or []] == pytest.approx([-math.log(VOCAB)] * 2)
    host.executor.forward(decode_step([2], []))
    assert [all_states for _, all_states in host.steps] == [True, False]
