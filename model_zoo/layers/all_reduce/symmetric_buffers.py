"""SymmetricBuffers: memory that every rank of a group can read, for the parts of a sum.

A rank's allocation holds two buffers, which calls use in turns, and a pad of signals.  Peers read
it by plain loads over NVLink, at addresses that do not change: a CUDA graph may hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

TURNS = 2
# Words of the pad that a rank writes into another's: a word for each program.
MAX_PROGRAMS = 1024
ALIGNMENT = 256  # bytes, of each part and of the pad
PROGRAMS_PER_SM = 2  # all of which must be resident: each waits for its counterpart


@dataclass(frozen=True, kw_only=True)
class SymmetricBuffers:
    """What one rank knows of the allocations of all.

    memory     its own allocation, uint8
    addresses  [world] int64 on the device: where this process sees each rank's buffers
    pads       [world] int64: and each rank's pad
    epochs     [MAX_PROGRAMS] int32: calls in which a program has taken part
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


def rendezvous(
    group: ProcessGroup, max_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> SymmetricBuffers:
    """The buffers of this rank, through torch's symmetric memory; all ranks of `group` call it.

    Raises RuntimeError where the GPUs cannot map each other's memory.
    """
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(
        allocation_bytes(max_rows, size, dtype, group.size()), dtype=torch.uint8, device=device
    )
    handle = symmetric_memory.rendezvous(memory, group.group_name)
    memory.zero_()  # no signal has been given
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return _buffers(memory, handle.buffer_ptrs, group.rank(), max_rows, size, dtype)


def in_one_process(
    addresses: Sequence[Tensor], rank: int, max_rows: int, size: int, dtype: torch.dtype
) -> SymmetricBuffers:
    """The buffers of one rank of several that share an address space.

    addresses  the allocations of all ranks: allocation_bytes of uint8 each, zeros
    """
    pointers = [memory.data_ptr() for memory in addresses]
    return _buffers(addresses[rank], pointers, rank, max_rows, size, dtype)


def _buffers(
    memory: Tensor,
    pointers: Sequence[int],
    rank: int,
    max_rows: int,
    size: int,
    dtype: torch.dtype,
) -> SymmetricBuffers:
    assert size * dtype.itemsize % 16 == 0, "rows are read by 16 bytes"
    assert all(pointer % 16 == 0 for pointer in pointers)
    device, parts = memory.device, TURNS * _turn_bytes(max_rows, size, dtype)
    return SymmetricBuffers(
        memory=memory,
        addresses=torch.tensor(pointers, dtype=torch.int64, device=device),
        pads=torch.tensor([each + parts for each in pointers], dtype=torch.int64, device=device),
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        rank=rank,
        world=len(pointers),
        max_rows=max_rows,
        size=size,
        dtype=dtype,
        programs=_programs(device),
    )


def allocation_bytes(max_rows: int, size: int, dtype: torch.dtype, world: int) -> int:
    """Of one rank: its buffers, and a pad of a word for each rank and program."""
    return TURNS * _turn_bytes(max_rows, size, dtype) + world * MAX_PROGRAMS * 4


def _turn_bytes(max_rows: int, size: int, dtype: torch.dtype) -> int:
    return -(-max_rows * size * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_PROGRAMS, PROGRAMS_PER_SM * sms)
