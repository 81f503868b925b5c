"""SymmetricBuffers: memory that every rank of a group can read, for the parts of a sum.

A rank's allocation holds two buffers, which calls use in turns, and a pad of signals.  Peers read
it by plain loads over NVLink, at addresses that do not change: a CUDA graph may hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

TURNS = 2
# Words of the pad that a rank writes into another's: a word for each program.
MAX_PROGRAMS = 1024
ALIGNMENT = 256  # bytes, of each part and of the pad
RENDEZVOUS = timedelta(seconds=60)  # in which all ranks have come to it, or it has failed
# All programs of a launch must be resident: each waits for its counterpart.  Of wider rows, and
# with two norms, one fits on an SM.
PROGRAMS_PER_SM, NARROW = 2, 4096


@dataclass(frozen=True, kw_only=True)
class SymmetricBuffers:
    """What one rank knows of the allocations of all.

    memory     its own allocation, uint8
    addresses  [world] int64 on the device: where this process sees each rank's buffers
    pads       [world] int64: and each rank's pad
    epochs     [MAX_PROGRAMS + 2] int32: calls in which a program has taken part; then the limit of
               a wait for other ranks, 0 for none, and whether a wait has come to it
    programs   of a launch, at most: the same on all ranks
    """

    memory: Tensor
    addresses: Tensor
    pads: Tensor
    epochs: Tensor
    rank: int
    world: int
    max_rows: int
    size: int
    dtype: torch.dtype
    programs: int

    @property
    def turn_elements(self) -> int:
        """From the buffer of turn 0 to that of turn 1."""
        return _turn_bytes(self.max_rows, self.size, self.dtype) // self.dtype.itemsize

    def part(self, turn: int, rows: int) -> Tensor:
        """[rows, size] where this rank's part of the sum is to be written."""
        assert 0 <= rows <= self.max_rows
        start = turn * self.turn_elements * self.dtype.itemsize
        count = rows * self.size * self.dtype.itemsize
        return self.memory[start : start + count].view(self.dtype).view(rows, self.size)

    def limit_waits(self, limit: int) -> None:
        """Let a program give up after so many microseconds, 0: never, from the next call on.

        What it returns then means nothing, and `gave_up` is True.  Interpreted kernels count polls.
        """
        self.epochs[MAX_PROGRAMS:] = torch.tensor([limit, 0], dtype=torch.int32)

    @property
    def gave_up(self) -> bool:
        """Whether a program has, since the limit was set; waits for the device."""
        return bool(self.epochs[MAX_PROGRAMS + 1])


class Rendezvous(Protocol):
    """How the ranks of a group come to read each other's memory.

    max_bytes  of one buffer
    """

    max_bytes: int

    def problem(self) -> str:
        """Why they cannot; "": nothing is known of."""
        ...

    def allocate(self, count: int, device: torch.device) -> Tensor:
        """So many bytes of this rank, zeros.  Raises RuntimeError."""
        ...

    def addresses(self, memory: Tensor) -> Sequence[int]:
        """Where this process sees the allocation of each rank; all ranks call it.

        Raises RuntimeError.
        """
        ...


class SymmetricMemory:
    """By torch's symmetric memory, between the GPUs of a host; rank r has the r-th that is visible.

    Raises RuntimeError where they cannot map each other's memory.
    """

    max_bytes = 32 << 20  # larger sums take hundreds of microseconds either way

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._mapped: list[object] = []  # what keeps the memory of other ranks mapped

    def problem(self) -> str:
        own = self._group.rank()
        for rank in range(self._group.size()):
            if rank != own and not torch.cuda.can_device_access_peer(own, rank):
                return f"GPU {own} cannot read the memory of GPU {rank}"
        return ""

    def allocate(self, count: int, device: torch.device) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(count, dtype=torch.uint8, device=device)
        memory.zero_()  # no signal has been given
        torch.cuda.synchronize(device)
        return memory

    def addresses(self, memory: Tensor) -> Sequence[int]:
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
        return handle.buffer_ptrs


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
    memory = how.allocate(allocation_bytes(max_rows, size, dtype, group.size()), device)
    buffers = buffers_at(memory, how.addresses(memory), group.rank(), max_rows, size, dtype)
    dist.barrier(group)
    return buffers


def in_one_process(
    addresses: Sequence[Tensor], rank: int, max_rows: int, size: int, dtype: torch.dtype
) -> SymmetricBuffers:
    """The buffers of one rank of several that share an address space.

    addresses  the allocations of all ranks: allocation_bytes of uint8 each, zeros
    """
    pointers = [memory.data_ptr() for memory in addresses]
    return buffers_at(addresses[rank], pointers, rank, max_rows, size, dtype)


def buffers_at(
    memory: Tensor,
    pointers: Sequence[int],
    rank: int,
    max_rows: int,
    size: int,
    dtype: torch.dtype,
) -> SymmetricBuffers:
    """The buffers of a rank, in `memory`, where this process sees those of all at `pointers`."""
    assert size * dtype.itemsize % 16 == 0, "rows are read by 16 bytes"
    assert all(pointer % 16 == 0 for pointer in pointers)
    device, parts = memory.device, TURNS * _turn_bytes(max_rows, size, dtype)
    return SymmetricBuffers(
        memory=memory,
        addresses=torch.tensor(pointers, dtype=torch.int64, device=device),
        pads=torch.tensor([each + parts for each in pointers], dtype=torch.int64, device=device),
        epochs=torch.zeros(MAX_PROGRAMS + 2, dtype=torch.int32, device=device),
        rank=rank,
        world=len(pointers),
        max_rows=max_rows,
        size=size,
        dtype=dtype,
        programs=_programs(device, size),
    )


def rows_of_buffers(tokens: int, size: int, dtype: torch.dtype, max_bytes: int) -> int:
    """Rows of buffers of at most max_bytes each, where steps have at most so many tokens."""
    return max(1, min(tokens, max_bytes // (size * dtype.itemsize)))


def allocation_bytes(max_rows: int, size: int, dtype: torch.dtype, world: int) -> int:
    """Of one rank: its buffers, and a pad of a word for each rank and program."""
    return TURNS * _turn_bytes(max_rows, size, dtype) + world * MAX_PROGRAMS * 4


def _turn_bytes(max_rows: int, size: int, dtype: torch.dtype) -> int:
    return -(-max_rows * size * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _programs(device: torch.device, size: int) -> int:
    if device.type != "cuda":
        return 4
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_PROGRAMS, (PROGRAMS_PER_SM if size <= NARROW else 1) * sms)
