"""Two ranks on two GPUs, through torch's symmetric memory, in graphs that are replayed.

    python -m tests.support.parallel.two_gpus REPLAYS

Prints "equal" if both ranks had the same bits, and those of NCCL's sum within a rounding, after
every replay.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import TURNS, rendezvous

SIZE, DTYPE, EPS = 4096, torch.bfloat16, 1e-6
ROWS = (1, 8, 32, 128, 512, 2048)


def start(rank: int, world: int, store: str) -> torch.device:
    """This process's GPU, and the group of all; without NVLink multicast, which few hosts allow."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device
    )
    return device


def check(rank: int, world: int, store: str, replays: int) -> None:
    device = start(rank, world, store)
    group = dist.group.WORLD
    assert group is not None
    buffers = rendezvous(group, max(ROWS), SIZE, DTYPE, device)
    weight = torch.ones(SIZE, dtype=DTYPE, device=device)
    for rows in ROWS:
        generator = torch.Generator(device).manual_seed(rank)
        parts = torch.randn(TURNS, rows, SIZE, dtype=DTYPE, device=device, generator=generator)
        residual = torch.zeros(rows, SIZE, dtype=DTYPE, device=device)
        outs = []

        def step(parts=parts, residual=residual, rows=rows, outs=outs) -> None:
            for turn in range(TURNS):
                part = parts[turn]
                outs[turn:] = [all_reduce_add_rms_norm(buffers, turn, part, residual, weight, EPS)]

        step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(replays):
            residual.zero_()
            graph.replay()
            summed = parts.float()
            dist.all_reduce(summed)
            expected = torch.zeros_like(residual)
            for each in summed:
                expected = (expected.float() + each).to(DTYPE)
            assert torch.equal(residual, expected), f"{rows} rows: not the sum"
            mine = torch.stack([residual, *outs])
            first = mine.clone()
            dist.broadcast(first, 0)
            assert torch.equal(mine, first), f"{rows} rows: ranks differ"
    dist.barrier()
    dist.destroy_process_group()


def main(replays: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(check, (2, f"{folder}/store", replays), nprocs=2)
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
