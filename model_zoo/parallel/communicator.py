"""Communicator: how the ranks that share a model add and gather tensors.

Layers call nothing else, so that another way to communicate is one more class here.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend, FusedSums, PartialSum
from model_zoo.layers.all_reduce.symmetric_buffers import RankSum


class Communicator(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """x [R, N] of each rank -> [R, size * N], those of rank 0 first."""
        ...

    def for_norm(self, part: Tensor, *, of_embeddings: bool = False) -> Addend:
        """The sum of parts [T, N] over all ranks, which the next norm may compute.

        of_embeddings: of those with which a step begins; not: of a product
        """
        ...

    def rank_sum(self, rows: int) -> RankSum | None:
        """The next sum of parts [rows, N], for a kernel that computes it; None: for_norm adds."""
        ...


class Alone:
    """Of a model that is on one device."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def for_norm(self, part: Tensor, *, of_embeddings: bool = False) -> Tensor:
        return part

    def rank_sum(self, rows: int) -> None:
        return None


class ProcessGroupCommunicator:
    """By a process group of torch.distributed: NCCL on GPUs, gloo on CPUs.

    in_order: sums do not depend on the size of the tensor, as --deterministic asks for.  The
    libraries choose their algorithm by it, and with more than two ranks the order of the sum.

    is_silent  ranks do not wait for each other, and results mean nothing: kernels are compiled
    fused      the sums that kernels of layers compute; None: the library computes all
    """

    is_silent = False
    fused: FusedSums | None = None

    def __init__(self, group: dist.ProcessGroup, *, in_order: bool = False) -> None:
        self._group, self._size = group, group.size()
        self.in_order = in_order
        self._gathers = in_order and self._size > 2

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def size(self) -> int:
        return self._size

    def for_norm(self, part: Tensor, *, of_embeddings: bool = False) -> Addend:
        where = None
        if self.fused is not None:
            where = self.fused.begin(len(part), of_embeddings=of_embeddings)
        return self.all_reduce(part) if where is None else PartialSum(where, part)

    def rank_sum(self, rows: int) -> RankSum | None:
        return None if self.fused is None else self.fused.begin(rows)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            self.fused.restart()
        if self.is_silent:
            return x
        if self._gathers:
            found = self._gather_all(x).float()
            total = found[0]
            for rank in range(1, self._size):
                total = total + found[rank]
            return total.to(x.dtype)
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if self.is_silent:
            return x.repeat(1, self._size)
        return self._gather_all(x).transpose(0, 1).reshape(len(x), -1)

    def _gather_all(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        x = x.contiguous()
        found = torch.empty(self._size, *x.shape, dtype=x.dtype, device=x.device)
        # PyTorch 2.13 has a new name for it.
        name = "all_gather_into_tensor"
        if hasattr(dist, "all_gather_single"):
            name = "all_gather_single"
        getattr(dist, name)(found.flatten(0, 1), x, group=self._group)
        return found
