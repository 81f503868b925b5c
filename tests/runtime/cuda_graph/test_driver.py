"""What a step copies arrives, on whatever device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.cuda_graph.buffers import RING, OutputRing
from runtime.cuda_graph.driver import CudaEvent, CudaStream


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_results_that_wait_in_the_ring_are_those_of_their_own_steps(device: torch.device) -> None:
    results = OutputRing(9, device)
    tokens, usable = results.outputs(7)
    arrivals = []
    for step in range(RING):
        tokens.copy_(torch.arange(7, dtype=torch.int32) + 100 * step)
        usable.fill_(step % 2)
        arrivals.append(results.fetch(7))
    for step, arrival in enumerate(arrivals):
        arrival.wait()
        assert arrival.tokens.tolist() == [100 * step + row for row in range(7)]
        assert arrival.usable.tolist() == [step % 2] * 7


@pytest.mark.gpu
def test_copies_go_both_ways_in_the_order_of_the_calls() -> None:
    device = torch.device("cuda")
    queue = CudaStream(device)
    there = torch.zeros(1000, dtype=torch.int32, device=device)
    host, back = (torch.zeros(1000, dtype=torch.int32, pin_memory=True) for _ in range(2))
    mark = CudaEvent(queue)
    for step in range(5):
        host.numpy()[:] = np.arange(1000) + step
        queue.to_device(there.data_ptr(), host.data_ptr(), 4000)
        there.mul_(2)
        queue.to_host(back.data_ptr(), there.data_ptr(), 4000)
        mark.set()
        mark.wait()
        assert back.tolist() == [2 * (number + step) for number in range(1000)]


@pytest.mark.gpu
def test_what_the_driver_refuses_is_raised() -> None:
    queue = CudaStream(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="could not copy to the device: error"):
        queue.to_device(0, 0, 4)
