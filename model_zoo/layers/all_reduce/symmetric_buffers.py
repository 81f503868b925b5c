"""SymmetricBuffers: memory of a rank that all ranks of a group write into, for the parts of a sum.

A rank's allocation has room for the rows of every other rank, in three buffers: the sums of
products use two by turns, and those of embeddings, with which steps begin, the third.  Peers write
there by plain stores over NVLink, at addresses that do not change: a CUDA graph may hold them.
-0.0 says that nothing has come: senders write 0.0 in its place, and the receiver restores it, so
that no signal is sent beside the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

TURNS = 2  # of sums of products
OF_EMBEDDINGS = TURNS  # the buffer of their sums
BUFFERS = TURNS + 1
RENDEZVOUS = timedelta(seconds=60)  # in which all ranks have come to it, or it has failed
# All programs of a launch that sends must be resident: each waits for its counterpart.  Of wider
# rows one fits on an SM.
PROGRAMS_PER_SM, NARROW = 2, 4096
ALIGNMENT = 16  # bytes of a row, which is written and read by so many

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class SymmetricBuffers:
    """What one rank knows of the allocations of all.

    memories   the allocations of all ranks as this process sees them, each [BUFFERS, world - 1,
               max_rows, size]: rows of the other ranks, in their order
    addresses  of the memories
    limit      [2] int32 on the device: microseconds that a program of a norm's kernel waits for
               other ranks, and polls of a GEMM's, which take longer, 0: for ever; and whether one
               has come to it
    programs   of a launch that sends, at most: the same on all ranks
    """

    memories: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    limit: Tensor
    rank: int
    programs: int

    @property
    def memory(self) -> Tensor:
        """This rank's own."""
        return self.memories[self.rank]

    @property
    def world(self) -> int:
        return len(self.memories)

    @property
    def max_rows(self) -> int:
        return self.memory.shape[2]

    @property
    def size(self) -> int:
        return self.memory.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def offsets(self, turn: int) -> tuple[int, int]:
        """Elements from an allocation to a buffer, which is that of a turn or OF_EMBEDDINGS, and
        from a rank's rows there to the next one's."""
        return turn * self.memory.stride(0), self.memory.stride(1)

    def rows_of(self, turn: int, sender: int, receiver: int) -> Tensor:
        """[max_rows, size] where the part of one rank comes to another."""
        assert sender != receiver
        return self.memories[receiver][turn, sender - (sender > receiver)]

    def clear(self) -> None:
        """Forget what has come, and wait for that; no rank may be within a call."""
        self.memory.fill_(-0.0)
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)

    def limit_waits(self, limit: int) -> None:
        """Let a program give up after so many microseconds, 0: never, from the next call on.

        What it returns then means nothing, and `gave_up` is True.  GEMMs, and all kernels that are
        interpreted, count polls.
        After such a call buffers have to be cleared: parts may have come later.
        """
        self.limit.copy_(torch.tensor([limit, 0], dtype=torch.int32))

    @property
    def gave_up(self) -> bool:
        """Whether a program has, since the limit was set; waits for the device."""
        return bool(self.limit[1])


@dataclass(frozen=True, slots=True)
class RankSum:
    """A sum over all ranks: where this rank's part of it goes, and where those of others come.

    turn  the number of the buffer: of products by turns, or OF_EMBEDDINGS
    """

    buffers: SymmetricBuffers
    turn: int

    def outgoing(self) -> tuple[Tensor, ...]:
        """[max_rows, size] in the memory of each other rank, for what this one sends."""
        buffers = self.buffers
        ranks = (rank for rank in range(buffers.world) if rank != buffers.rank)
        return tuple(buffers.rows_of(self.turn, buffers.rank, rank) for rank in ranks)

    def incoming(self) -> tuple[Tensor, int]:
        """[world - 1, max_rows, size] in this rank's memory, for what others send, and the elements
        from one rank's rows to the next one's."""
        memory = self.buffers.memory[self.turn]
        return memory, memory.stride(0)


class Rendezvous(Protocol):
    """How the ranks of a group come to write into each other's memory.

    max_bytes  of the parts of all other ranks in one buffer
    """

    max_bytes: int

    def problem(self) -> str:
        """Why they cannot; "": nothing is known of."""
        ...

    def allocate(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of this rank, in which nothing has come.  Raises RuntimeError."""
        ...

    def mapped(self, memory: Tensor) -> Sequence[Tensor]:
        """The allocations of all ranks as this process sees them; all ranks call it.

        Raises RuntimeError.
        """
        ...


class SymmetricMemory:
    """By torch's symmetric memory, between the GPUs of a host; rank r has the r-th that is visible.

    Raises RuntimeError where they cannot map each other's memory.
    """

    max_bytes = 128 << 20  # 8,192 rows of 8,192 numbers of 16 bits

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._mapped: list[object] = []  # what keeps the memory of other ranks mapped

    def problem(self) -> str:
        own = self._group.rank()
        for rank in range(self._group.size()):
            if rank != own and not torch.cuda.can_device_access_peer(own, rank):
                return f"GPU {own} cannot write into the memory of GPU {rank}"
        return ""

    def allocate(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(*shape, dtype=dtype, device=device).fill_(-0.0)
        torch.cuda.synchronize(device)
        return memory

    def mapped(self, memory: Tensor) -> Sequence[Tensor]:
        from torch.distributed import _symmetric_memory as symmetric_memory
        from torch.distributed import distributed_c10d

        # The group's own timeout covers the loading of weights: a rank that fails here is known of
        # sooner.
        store = distributed_c10d._get_process_group_store(self._group)
        while isinstance(store, distributed_c10d.PrefixStore):
            store = store.underlying_store
        before = store.timeout
        store.set_timeout(RENDEZVOUS)
        try:
            handle = symmetric_memory.rendezvous(memory, self._group.group_name)
        finally:
            store.set_timeout(before)
        self._mapped.append(handle)
        shape, dtype = memory.shape, memory.dtype
        return [
            memory if rank == self._group.rank() else handle.get_buffer(rank, shape, dtype)
            for rank in range(self._group.size())
        ]


def first_problem(texts: list[str]) -> str:
    """Of the rank that has one, with its number; "": none has."""
    found = (f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return next(found, "")


def rendezvous(
    group: ProcessGroup, max_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> SymmetricBuffers:
    """The buffers of this rank, through torch's symmetric memory; all ranks of `group` call it.

    Raises RuntimeError where the GPUs cannot map each other's memory.
    """
    import torch.distributed as dist

    how = SymmetricMemory(group)
    memory = how.allocate(buffer_shape(max_rows, size, group.size()), dtype, device)
    buffers = buffers_in(how.mapped(memory), group.rank())
    dist.barrier(group)
    return buffers


def buffers_in(memories: Sequence[Tensor], rank: int) -> SymmetricBuffers:
    """The buffers of a rank in the allocations of all, as this process sees them."""
    memory = memories[rank]
    size, device = memory.shape[-1], memory.device
    assert size * memory.dtype.itemsize % ALIGNMENT == 0 and memory.is_contiguous()
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in memories)
    return SymmetricBuffers(
        memories=tuple(memories),
        addresses=tuple(each.data_ptr() for each in memories),
        limit=torch.zeros(2, dtype=torch.int32, device=device),
        rank=rank,
        programs=_programs(device, size),
    )


def rows_of_buffers(tokens: int, size: int, dtype: torch.dtype, world: int, max_bytes: int) -> int:
    """Rows of buffers of at most max_bytes each, where steps have at most so many tokens."""
    row = max(1, world - 1) * size * dtype.itemsize
    return max(1, min(tokens, max_bytes // row))


def buffer_shape(max_rows: int, size: int, world: int) -> Shape:
    """Of the allocation of one rank."""
    return BUFFERS, world - 1, max_rows, size


def programs_per_sm(size: int) -> int:
    """For rows of so many numbers."""
    return PROGRAMS_PER_SM if size <= NARROW else 1


def _programs(device: torch.device, size: int) -> int:
    if device.type != "cuda":
        return 4
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return programs_per_sm(size) * sms
