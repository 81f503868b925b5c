"""GEMMs of few rows that add up over ranks in their epilogue: interpreted, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import RankSum, SymmetricBuffers
from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, SkinnyGemm, workspace
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from tests.support.interpreter.gluon_interpreter import interpreted
from tests.support.parallel.group_of_buffers import deliver, group_of

BF16, EPS = torch.bfloat16, 1e-6
INPUTS = 512
# Whole and split tiles, and column runs that are stacked.
GEMMS = [
    SkinnyGemm(64, 128, 2, 4, 1, 2),
    SkinnyGemm(64, 64, 3, 3, 2, 1),
    SkinnyGemm(16, 512, 2, 4, 1, 1),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    modules = ("rings", "gate", "norm", "rank_sum", "stream_k", "skinny_gemm")
    with interpreted("_skinny_gemm", *(f"model_zoo.layers.gemm.hopper.{x}" for x in modules)):
        yield


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def norm_of(size: int, device: str) -> RMSNorm:
    norm = RMSNorm(size, EPS, BF16).to(device)
    norm.weight.copy_(numbers(device, size))
    return norm


class Products:
    """Of each rank: x W^T, which has come to all others when `call` is called."""

    def __init__(
        self, gemm: SkinnyGemm, rows: int, size: int, inputs: int, world: int, device: str
    ) -> None:
        self.gemm, self.ranks = gemm, group_of(world, max(rows, 4), size, BF16, device)
        self.operands = [
            (
                numbers(device, rows, inputs, seed=rank),
                numbers(device, size, inputs, seed=rank) / inputs**0.5,
            )
            for rank in range(world)
        ]
        self.parts = [gemm.run(x, weight, None) for x, weight in self.operands]
        self.residual = numbers(device, rows, size, seed=world)
        self.norm = norm_of(size, device)

    def call(self, rank: int, turn: int) -> tuple[Tensor, NormedRows]:
        residual, (x, weight) = self.residual.clone(), self.operands[rank]
        where = RankSum(self.ranks[rank], turn)
        return residual, self.gemm.add_to(residual, x, weight, None, self.norm, rank_sum=where)


def check(products: Products) -> None:
    """That residual, norm and what is sent are as the norm's kernel would have them."""
    ranks, parts = products.ranks, products.parts
    rows = len(parts[0])
    total = sum((part.float() for part in parts[1:]), parts[0].float())
    expected = (products.residual.float() + total).to(BF16)
    for turn in range(2):
        deliver(ranks, turn, [part + 0.0 for part in parts])
        for buffers in ranks:
            residual, normed = products.call(buffers.rank, turn)
            assert torch.equal(residual, expected) and normed.norm is products.norm
            weighted = residual.float() * products.norm.weight.float()
            assert torch.equal(normed.weighted, weighted.to(BF16))
            squares = residual.double().square().sum(1)
            torch.testing.assert_close(normed.squares.sum(0).double(), squares, rtol=1e-5, atol=0)
            assert_sent(buffers, ranks, turn, parts[buffers.rank])
            forgotten = buffers.memory[turn, :, :rows]
            assert bool((forgotten == 0).all()) and bool(torch.signbit(forgotten).all())
    assert int(workspace(parts[0].device)[1].sum()) == 0


def assert_sent(
    buffers: SymmetricBuffers, ranks: list[SymmetricBuffers], turn: int, part: Tensor
) -> None:
    """That the part came to the ranks after it, and those before it were sent it, too."""
    for other in ranks:
        if other.rank == buffers.rank:
            continue
        came = other.rows_of(turn, buffers.rank, other.rank)
        assert torch.equal(came[: len(part)], part)
        unset = came[len(part) :]
        assert bool((unset == 0).all()) and bool(torch.signbit(unset).all())
        if other.rank < buffers.rank:  # it has added what had been delivered
            came.fill_(-0.0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", GEMMS, ids=str)
@pytest.mark.parametrize(("rows", "world"), [(1, 2), (5, 2), (3, 3)])
def test_products_of_all_ranks_are_added_to_the_residual(gemm: SkinnyGemm, rows: int, world: int):
    check(Products(gemm, rows, 192, INPUTS, world, "cpu"))


@pytest.mark.usefixtures("on_cpu")
def test_negative_zeros_are_sent_as_zeros():
    gemm = SkinnyGemm(64, 128, 2, 2, 1, 2)
    ranks = group_of(2, 4, 64, BF16, "cpu")
    tiny = torch.full((64, 128), -1e-22, dtype=BF16)
    x = torch.full((2, 128), 1e-22, dtype=BF16)
    assert bool(torch.signbit(gemm.run(x, tiny, None)).all())
    deliver(ranks, 0, [torch.ones(2, 64, dtype=BF16)] * 2)
    residual = torch.zeros(2, 64, dtype=BF16)
    gemm.add_to(residual, x, tiny, None, norm_of(64, "cpu"), rank_sum=RankSum(ranks[0], 0))
    sent = ranks[1].rows_of(0, 0, 1)[:2]
    assert not sent.any() and not torch.signbit(sent).any()
    assert bool((residual == 1).all())


@pytest.mark.usefixtures("on_cpu")
def test_a_program_gives_up_where_nothing_comes():
    products = Products(GEMMS[0], 2, 128, INPUTS, 2, "cpu")
    products.ranks[0].limit_waits(3)
    products.call(0, 0)
    assert products.ranks[0].gave_up and not products.ranks[1].gave_up


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 17, 32])
def test_every_candidate_adds_over_ranks(rows: int):
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    for inputs in (2048, 6144):
        for gemm in gemm_candidates(132, (9, 0), bucket, 4096, inputs):
            if isinstance(gemm, SkinnyGemm) and gemm.adds_ranks(rows):
                check(Products(gemm, rows, 4096, inputs, 2, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_norms_kernel_on_one_rank_and_a_gemm_on_another_have_the_same_sum(rows: int):
    """What each sends is what the other waits for."""
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    gemm = next(x for x in gemm_candidates(132, (9, 0), bucket, 4096, 2048) if x.name[0] == "f")
    assert isinstance(gemm, SkinnyGemm)
    products = Products(gemm, rows, 4096, 2048, 2, "cuda")
    first, second = products.ranks
    streams = [torch.cuda.Stream() for _ in range(2)]
    residual = products.residual.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        weight = products.norm.weight
        all_reduce_add_rms_norm(first, 0, products.parts[0], residual, weight, EPS)
    with torch.cuda.stream(streams[1]):
        other, _ = products.call(second.rank, 0)
    torch.cuda.synchronize()
    assert torch.equal(residual, other)
