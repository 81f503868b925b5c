"""Memory of two processes that both read and write: files that each has mapped."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.symmetric_buffers import Shape

RANKS = 2


class MappedMemory:
    """As SymmetricMemory of GPUs.  folder: the same for all ranks"""

    max_bytes = 8 * 64 * 4  # few rows of the tiny models, so that prompts have more

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._allocated = folder, rank, 0

    def problem(self) -> str:
        return ""

    def allocate(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._allocated += 1
        path = self._path(self._rank)
        path.write_bytes(bytes(prod(shape) * dtype.itemsize))
        return self._map(path, prod(shape), dtype).view(shape).fill_(-0.0)

    def mapped(self, memory: Tensor) -> Sequence[Tensor]:
        return [
            memory
            if rank == self._rank
            else self._map(self._path(rank), memory.numel(), memory.dtype).view(memory.shape)
            for rank in range(RANKS)
        ]

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._allocated}.{rank}"

    def _map(self, path: Path, count: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)
