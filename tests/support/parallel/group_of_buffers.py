"""Buffers of all ranks of a group in one process, where one rank after the other is called."""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.symmetric_buffers import (
    SymmetricBuffers,
    buffer_shape,
    buffers_in,
)


def group_of(
    world: int, max_rows: int, size: int, dtype: torch.dtype, device: str
) -> list[SymmetricBuffers]:
    """All ranks of a group, in one address space."""
    shape = buffer_shape(max_rows, size, world)
    memories = [torch.full(shape, -0.0, dtype=dtype, device=device) for _ in range(world)]
    return [buffers_in(memories, rank) for rank in range(world)]


def random_parts(ranks: list[SymmetricBuffers], rows: int) -> list[Tensor]:
    return [
        torch.randn(rows, each.size, device=each.memory.device).to(each.dtype) for each in ranks
    ]


def deliver(ranks: list[SymmetricBuffers], turn: int, parts: list[Tensor]) -> None:
    """Every part has come to all ranks, so that one after the other can be called."""
    for buffers in ranks:
        for sender, part in enumerate(parts):
            if sender != buffers.rank:
                buffers.rows_of(turn, sender, buffers.rank)[: len(part)].copy_(part)
