"""A step whose decode rows have several tokens is a step like any other to the model."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import StepLaunch
from runtime.messages import SamplingParams
from runtime.scheduler.batch import Batch, NewRow, make_batch
from tests.support.engine.device_engine import device_engine, sizes
from tests.support.interpreter.unused_lanes import UNUSED_LANES

pytestmark = UNUSED_LANES
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2]]
DRAFTS = [[11, 12, 13, 14], [21, 22, 23, 24]]


def step(starts: list[int], tokens: list[list[int]], *, begin: bool = False) -> Batch:
    """Two rows, each in a page of its own, which they get at the beginning."""
    params = SamplingParams(max_tokens=1, temperature=0)
    return make_batch(
        slots=[0, 1],
        starts=starts,
        q_lens=[len(row) for row in tokens],
        tokens=[token for row in tokens for token in row],
        num_new_pages=[1, 1] if begin else [0, 0],
        new_pages=[2, 5] if begin else [],
        sample=[False, False],
        decode_rows=0 if begin else 2,
        new_rows=[NewRow(slot, params, 0, 30, []) for slot in (0, 1)] if begin else [],
    )


def logits(
    checkpoint: Path, device: torch.device, steps: list[tuple[Batch, Bucket]]
) -> torch.Tensor:
    """Of both rows' last tokens, after the prompts and then these steps."""
    resolved = sizes(slots=4, budget=32, pages=8, page_size=16, max_len=64, prefix_cache=False)
    _, runner = device_engine(checkpoint, device, resolved, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    for batch, bucket in [(step([0, 0], PROMPTS, begin=True), Bucket(16, 4, False)), *steps]:
        runner.run(StepLaunch(batch, bucket, graph=False, all_hidden_states=False))
    assert runner._outputs is not None
    return runner._outputs.logits[:2].cpu()


def test_drafts_in_one_step_give_the_logits_of_one_token_a_step(
    checkpoint: Path, device: torch.device
) -> None:
    starts = [len(prompt) for prompt in PROMPTS]
    together = step(starts, DRAFTS)
    single = [
        (step([start + i for start in starts], [[row[i]] for row in DRAFTS]), Bucket(2, 2, True))
        for i in range(4)
    ]
    expected = logits(checkpoint, device, single)
    assert expected.isfinite().all()
    # Padded by a row as decode rows are, and as a part of a mixed step.
    for bucket in (Bucket(8, 2, True), Bucket(12, 3, True), Bucket(16, 4, False)):
        found = logits(checkpoint, device, [(together, bucket)])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
