"""The check of the fused all-reduce between two processes that share one GPU.

    python -m tests.support.parallel.two_processes

Memory is passed by CUDA's handles between processes, and the sums to compare with are those of
gloo.  Prints "right" if the check passes, "silent" if it finds parts that never come, and "wrong"
if it finds that one rank has computed something else.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from model_zoo.layers.all_reduce.self_check import self_check
from model_zoo.layers.all_reduce.symmetric_buffers import (
    buffer_shape,
    buffers_in,
)

WORLD, ROWS, SIZE, DTYPE = 2, 512, 4096, torch.bfloat16
SHORT = 300_000  # microseconds; the processes take turns on the GPU


def exchange(text: str) -> list[str]:
    found: list[Any] = [""] * WORLD
    dist.all_gather_object(found, text)
    return found


def all_reduce(x: Tensor) -> Tensor:
    on_cpu = x.cpu()
    dist.all_reduce(on_cpu)
    return on_cpu.to(x.device)


def mapped(memory: Tensor) -> list[Tensor]:
    """The allocations of all ranks, as this process sees them."""
    handles: list[Any] = [None] * WORLD
    dist.all_gather_object(handles, reduce_tensor(memory))
    rank = dist.get_rank()
    return [memory if r == rank else rebuild(*args) for r, (rebuild, args) in enumerate(handles)]


def check(rank: int, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    memory = torch.full(buffer_shape(ROWS, SIZE, WORLD), -0.0, dtype=DTYPE, device="cuda")
    memories = mapped(memory)
    buffers = buffers_in(memories, rank)
    problems = [self_check(buffers, all_reduce, exchange)]
    # Nothing comes: what this process takes for the other's memory is other memory of its own.
    other, own = torch.zeros_like(memory), torch.full_like(memory, -0.0)
    alone = buffers_in([own if r == rank else other for r in range(WORLD)], rank)
    problems.append(self_check(alone, all_reduce, exchange, limit=SHORT))
    # Rank 1 computes another norm.
    problems.append(self_check(buffers, all_reduce, exchange, plus_one=rank == 1))
    if rank == 0:
        right, silent, wrong = problems
        assert not right, right
        assert silent == "rank 0: the part of another rank has not come", silent
        assert wrong == "the ranks' results of the same sums differ", wrong
        print("right, silent, wrong")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(check, (f"{folder}/store",), nprocs=WORLD)


if __name__ == "__main__":
    main()
