"""Layers of two processes that share one GPU, whose GEMMs add up over ranks, or send.

    python -m tests.support.parallel.two_processes_of_layers

Memory is passed by CUDA's handles between processes, and the sums to compare with are those of
gloo.  Prints what is chosen, and "equal" if the sums of all ways are those of gloo, and the same on
both ranks.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from model_zoo.layers.all_reduce.choose_layer_sums import OtherRanks, choose_layer_sums
from model_zoo.layers.all_reduce.partial_sum import FusedSums, PartialSum
from model_zoo.layers.all_reduce.symmetric_buffers import buffer_shape, buffers_in
from model_zoo.layers.gemm.candidates import candidates
from model_zoo.layers.gemm.implementations import BUCKETS, SkinnyGemm
from model_zoo.layers.linear import Linear
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.layers.row_parallel import NEVER, RowParallelLinear
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.parallel.communicator import ProcessGroupCommunicator
from tests.support.parallel.two_processes import DTYPE, WORLD, all_reduce, exchange, mapped

ROWS, SIZE, HEADS, INNER = 2048, 4096, 2048, 1024
EPS = 1e-6


class ByGloo(ProcessGroupCommunicator):
    def all_reduce(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            self.fused.restart()
        return all_reduce(x)


class Layers(nn.Module):
    """The output projection of attention, a norm, an MLP, a norm and the next layer's queries."""

    def __init__(self, communicator: ProcessGroupCommunicator) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "dtype": DTYPE}
        row = options | {"communicator": communicator, "parts": {"row": SIZE}}
        row |= {"scheme": None, "cuts": {}}
        gate_up = SwigluLinear(SIZE, INNER, **options)
        self.out = RowParallelLinear(HEADS, SIZE, **row)
        self.mlp = SwigluMLP(gate_up, RowParallelLinear(INNER, SIZE, **row))
        self.norms = nn.ModuleList([RMSNorm(SIZE, EPS, DTYPE) for _ in range(2)])
        self.qkv = Linear(SIZE, 3072, **options)
        self.out.precedes(self.norms[0], self.mlp)  # type: ignore[arg-type]
        self.mlp.down.precedes(self.norms[1], self.qkv)  # type: ignore[arg-type]

    def use(self, up_to: int, sends_from: int) -> None:
        for layer in (self.out, self.mlp.down):
            assert isinstance(layer, RowParallelLinear)
            layer.adds_up_to, layer.sends_from = up_to, sends_from

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, list[str]]:
        """-> queries, the residual, and what GEMMs have done of the two sums."""
        first, second = self.norms
        added, residual = self.out.add(x, residual)
        did = [done_in_gemm(added)]
        normed, residual = first.add(added, residual, consumer=self.mlp)  # type: ignore[operator]
        added, residual = self.mlp.add(normed, residual)
        did.append(done_in_gemm(added))
        normed, residual = second.add(added, residual, consumer=self.qkv)  # type: ignore[operator]
        return self.qkv(normed), residual, did


def done_in_gemm(added: object) -> str:
    if isinstance(added, NormedRows):
        return "added"
    return "sent" if isinstance(added, PartialSum) and added.is_sent else ""


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(DTYPE)


def layers_of(rank: int, communicator: ProcessGroupCommunicator) -> Layers:
    with torch.device("cuda"):
        model = Layers(communicator)
    for index, layer in enumerate(each for each in model.modules() if isinstance(each, Linear)):
        column = not isinstance(layer, RowParallelLinear)
        weight = numbers(10 * index + (0 if column else rank), layer.outputs, layer.inputs)
        layer.weight.copy_(weight / layer.inputs**0.5)
        gemms = {rows: candidates(weight.device, rows, *weight.shape) for rows in BUCKETS}
        layer.use_gemms({
            rows: next(gemm for gemm in found if isinstance(gemm, SkinnyGemm))
            for rows, found in gemms.items()
        })  # fmt: skip
    for norm in model.norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator("cuda").manual_seed(3))
    return model


def most(number: int) -> list[int]:
    return [max(int(text) for text in exchange(str(number)))]


def compare(model: Layers, communicator: ProcessGroupCommunicator, sums: FusedSums) -> None:
    """All ways, one after the other, with those of gloo."""
    for rows in (1, 8, 17, 32, 64, 1024, 2048, 1, 1024):
        x, residual = numbers(100 + dist.get_rank(), rows, HEADS), numbers(99, rows, SIZE)
        communicator.fused = None
        model.use(0, NEVER)
        queries, expected, _ = model(x, residual.clone())
        communicator.fused = sums
        for up_to, sends_from in ((0, NEVER), (64, 1024)):
            model.use(up_to, sends_from)
            found, total, did = model(x, residual.clone())
            torch.cuda.synchronize()
            added = rows <= min(up_to, 32)
            assert did == 2 * ["added" if added else "sent" if rows >= sends_from else ""]
            assert not sums.buffers.gave_up, f"{rows} rows: nothing has come"
            digest = total.view(torch.int16).sum(dtype=torch.int64)
            assert len(set(exchange(str(int(digest))))) == 1, f"{rows} rows: ranks differ"
            for name, one, other in (("sum", total, expected), ("queries", found, queries)):
                error = (one.float() - other.float()).norm() / other.float().norm()
                assert error < 0.01, f"{rows} rows, {name}: {error}"


def check(rank: int, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None
    communicator = ByGloo(group)
    memory = torch.full(buffer_shape(ROWS, SIZE, WORLD), -0.0, dtype=DTYPE, device="cuda")
    buffers = buffers_in(mapped(memory), rank)
    with torch.inference_mode():
        model, sums = layers_of(rank, communicator), FusedSums(buffers)
        communicator.fused = sums
        problem = choose_layer_sums(model, sums, OtherRanks(all_reduce, exchange, most))
        assert not problem, problem
        down = model.mlp.down
        assert isinstance(down, RowParallelLinear)
        chosen = f"{model.out.adds_up_to} {model.out.sends_from} {down.adds_up_to}"
        assert len(set(exchange(chosen))) == 1
        compare(model, communicator, sums)
    if rank == 0:
        print("chosen", chosen)
        print("equal")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(check, (f"{folder}/store",), nprocs=WORLD)


if __name__ == "__main__":
    main()
