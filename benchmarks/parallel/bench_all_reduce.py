"""Times the all-reduce with residual sum and norm between the GPUs of a host.

    python -m benchmarks.parallel.bench_all_reduce [--ranks 2] [--rows 1,8,32] [--size 4096]

For each number of rows, microseconds a call in a CUDA graph, as the slowest rank sees them:

  fused      all_reduce_add_rms_norm
  nccl       NCCL's all-reduce, then add_rms_norm
  one_shot   torch's symmetric memory, one_shot_all_reduce, then add_rms_norm
  two_shot   the same with two_shot_all_reduce_
  norm       add_rms_norm alone: what of the others is no communication
  copy       of a part within this GPU, in place of a GEMM that sends it
  sent       that, and all_reduce_add_rms_norm of a part that has been sent

A graph has CALLS calls, one after the other as the layers of a model.  --check compares the results
with those of NCCL first.  If $OUT is set, all_reduce.json is written there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import SymmetricBuffers, rendezvous
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm

ROWS = (1, 8, 32, 128, 512, 2048, 4096, 8192)
CALLS, RUNS, REPLAYS = 40, 7, 20  # calls of a graph, timings, replays of a timing
DTYPE, EPS = torch.bfloat16, 1e-6
Call = Callable[[int], object]


def graphed_us(call: Call) -> float:
    """Microseconds a call: the median of RUNS; all ranks start each together."""
    for index in range(2):
        call(index)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    graph.replay()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / REPLAYS / CALLS * 1e6)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def calls_of(buffers: SymmetricBuffers, rows: int, symmetric: Tensor) -> dict[str, Call]:
    """What is timed.  symmetric: [rows, size] that torch's operations can sum."""
    size, device = buffers.size, symmetric.device
    residual, x = (torch.randn(rows, size, dtype=DTYPE, device=device) for _ in range(2))
    part, weight = x.clone(), torch.ones(size, dtype=DTYPE, device=device)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops.symm_mem

    def nccl(index: int) -> None:
        dist.all_reduce(x)
        add_rms_norm(x, residual, weight, EPS)

    def one_shot(index: int) -> None:
        total = ops.one_shot_all_reduce(symmetric, "sum", name)
        add_rms_norm(total, residual, weight, EPS)

    def two_shot(index: int) -> None:
        ops.two_shot_all_reduce_(symmetric, "sum", name)
        add_rms_norm(symmetric, residual, weight, EPS)

    came = [buffers.memory[turn, :, :rows] for turn in range(2)]

    def copy(index: int) -> None:
        came[index % 2].copy_(x.expand_as(came[0]))

    def sent(index: int) -> None:
        copy(index)
        all_reduce_add_rms_norm(buffers, index % 2, part, residual, weight, EPS, is_sent=True)

    return {
        "fused": lambda index: all_reduce_add_rms_norm(
            buffers, index % 2, part, residual, weight, EPS
        ),
        "nccl": nccl,
        "one_shot": one_shot,
        "two_shot": two_shot,
        "norm": lambda index: add_rms_norm(x, residual, weight, EPS),
        "copy": copy,
        "sent": sent,  # the last: it leaves memory in which nothing has come
    }


def check(buffers: SymmetricBuffers, rows: int) -> None:
    """Both turns against NCCL's sum in float32."""
    weight = torch.ones(buffers.size, dtype=DTYPE, device="cuda")
    for turn in range(2):
        part = torch.randn(rows, buffers.size, dtype=DTYPE, device="cuda")
        summed, residual = part.float(), torch.zeros_like(part)
        dist.all_reduce(summed)
        all_reduce_add_rms_norm(buffers, turn, part, residual, weight, EPS)
        torch.testing.assert_close(residual, summed.to(DTYPE))


def measure(rank: int, arguments: argparse.Namespace, store: str) -> None:
    # Without NVLink multicast, which few hosts allow.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=arguments.ranks,
        device_id=device,
    )
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    size, found = arguments.size, []
    buffers = rendezvous(group, max(arguments.rows), size, DTYPE, device)
    for rows in arguments.rows:
        if arguments.check:
            check(buffers, rows)
        symmetric = symmetric_memory.empty(rows, size, dtype=DTYPE, device=device).normal_()
        symmetric_memory.rendezvous(symmetric, group.group_name)
        times = {
            name: graphed_us(call) for name, call in calls_of(buffers, rows, symmetric).items()
        }
        found.append({"rows": rows, "size": size, "ranks": arguments.ranks, **times})
        if rank == 0:
            columns = "  ".join(f"{name} {us:6.1f}" for name, us in times.items())
            print(f"{rows:5} x {size}  {columns}  us", flush=True)
    if rank == 0 and (out := os.environ.get("OUT")):
        Path(out, "all_reduce.json").write_text("\n".join(map(json.dumps, found)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=ROWS)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    if count < arguments.ranks:
        parser.error(f"--ranks {arguments.ranks}: this host has {count} GPUs")
    print(torch.cuda.get_device_name(), "x", arguments.ranks, "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (arguments, f"{folder}/store"), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
