"""What a step copies arrives, on whatever device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.buffers import RING, StepBuffers
from runtime.cuda_graph.driver import CudaEvent, CudaStream
from runtime.sampling.state import SamplerState
from runtime.scheduler.batch import make_batch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("rows", [1, 7, 9])
def test_outputs_that_wait_in_the_ring_are_those_of_their_own_steps(
    device: torch.device, rows: int
) -> None:
    """Each where its block says, whatever the number of rows of the steps between."""
    buckets = {rows: Bucket(rows, rows, True) for rows in (rows, 9)}
    buffers = StepBuffers([buckets[9]], device)
    sampler = SamplerState(9, 5, device)
    ended, none = [], np.zeros(0, dtype=np.int64)
    for step in range(2 * RING + 1):  # each place gets steps of both sizes
        number = rows if step % 3 else 9
        buffers.send(buckets[number], make_batch(), none, none, [], sampler)
        place = int(buffers.layout(buckets[number]).output(buffers.block))
        tokens, usable = buffers.outputs(number)
        assert tokens.shape == usable.shape == (RING, number)
        tokens[place] = torch.arange(number, dtype=torch.int32) + 100 * step
        usable[place] = step % 2
        ended.append((step, number, buffers.end(number)))
        if len(ended) == RING:
            first, number, outputs = ended.pop(0)
            outputs.wait()
            assert outputs.tokens.tolist() == [100 * first + row for row in range(number)]
            assert outputs.usable.tolist() == [first % 2] * number


@pytest.mark.gpu
def test_copies_and_events_are_in_the_order_of_the_calls() -> None:
    device = torch.device("cuda")
    queue = CudaStream(device)
    there = torch.zeros(1000, dtype=torch.int32, device=device)
    host = torch.zeros(1000, dtype=torch.int32, pin_memory=True)
    began, ended = CudaEvent(queue), CudaEvent(queue)
    for step in range(5):
        host.numpy()[:] = np.arange(1000) + step
        began.record()
        queue.to_device(there.data_ptr(), host.data_ptr(), 4000)
        there.mul_(2)
        torch.cuda._sleep(10_000_000)
        ended.record()
        assert not ended.query(), "the device sleeps for five milliseconds"
        ended.synchronize()
        assert ended.query() and 0.1 < began.elapsed_time(ended) < 100
        assert there.tolist() == [2 * (number + step) for number in range(1000)]


@pytest.mark.gpu
def test_what_the_driver_refuses_is_raised() -> None:
    queue = CudaStream(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="could not copy to the device: error"):
        queue.to_device(0, 0, 4)
