"""Sums over ranks whose order is that of the ranks, as --deterministic asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model_zoo.parallel.communicator import ProcessGroupCommunicator


class ThreeRanks:
    """What the communicator asks of a process group of three."""

    def size(self) -> int:
        return 3


class GatheredCommunicator(ProcessGroupCommunicator):
    """One whose other ranks have given tensors; nothing is sent."""

    def __init__(self, others: list[Tensor]) -> None:
        group: Any = ThreeRanks()
        super().__init__(group, in_order=True)
        self._others = others

    def _gather_all(self, x: Tensor) -> Tensor:
        return torch.stack([x, *self._others])


def test_sums_in_order_begin_with_rank_0_whatever_the_number_of_rows():
    others = [torch.tensor([[1.0], [1.0]]), torch.tensor([[-1e8], [3.0]])]
    x = torch.tensor([[1e8], [2.0]])
    summed = GatheredCommunicator(others).all_reduce(x)
    assert summed.tolist() == [[0.0], [6.0]]  # (1e8 + 1) - 1e8 in float32, and not 1
    one = GatheredCommunicator([other[:1] for other in others]).all_reduce(x[:1])
    assert torch.equal(one, summed[:1])


def test_sums_in_order_of_16_bits_are_rounded_once():
    values = [torch.full((1, 4), value, dtype=torch.bfloat16) for value in (1.0, 2**-8, 2**-8)]
    found = GatheredCommunicator(values[1:]).all_reduce(values[0])
    assert found.dtype == torch.bfloat16 and found.tolist() == [[1.0 + 2**-7] * 4]
