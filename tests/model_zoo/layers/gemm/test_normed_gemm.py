"""GEMMs that add to the residual, and do their part of norms: interpreted, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, SkinnyGemm, workspace
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from tests.support.interpreter.gluon_interpreter import interpreted

BF16 = torch.bfloat16
EPS = 1e-6
# Whole and split tiles, column runs that are stacked, and the last unit past the end.
SIZES = [
    SkinnyGemm(64, 128, 2, 5, 1, 2),
    SkinnyGemm(64, 64, 3, 3, 2, 1),
    SkinnyGemm(32, 256, 2, 3, 1, 2),
    SkinnyGemm(16, 512, 2, 4, 1, 1),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    modules = ("rings", "gate", "norm", "stream_k", "skinny_gemm")
    with interpreted("_skinny_gemm", *(f"model_zoo.layers.gemm.hopper.{x}" for x in modules)):
        yield


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def norm_of(size: int, device: str, *, plus_one: bool = False) -> RMSNorm:
    norm = RMSNorm(size, EPS, BF16, plus_one=plus_one).to(device)
    norm.weight.copy_(numbers(device, size))
    return norm


def check_add(
    gemm: SkinnyGemm, rows: int, outputs: int, inputs: int, device: str, *, plus_one: bool = False
) -> None:
    x, weight = numbers(device, rows, inputs), numbers(device, outputs, inputs) / inputs**0.5
    norm = norm_of(outputs, device, plus_one=plus_one)
    for bias in (None, numbers(device, outputs)):
        residual = numbers(device, rows, outputs, seed=1)
        product = gemm.run(x, weight, bias)
        expected = residual + product
        normed = gemm.add_to(residual, x, weight, bias, norm)
        assert torch.equal(residual, expected) and normed.norm is norm
        of_weight = residual.float() * (norm.weight.float() + plus_one)
        assert torch.equal(normed.weighted, of_weight.to(BF16))
        sums = residual.double().square().sum(1)
        torch.testing.assert_close(normed.squares.sum(0).double(), sums, rtol=1e-5, atol=0)
    assert int(workspace(x.device)[1].sum()) == 0


def check_norm(
    gemm: SkinnyGemm, rows: int, outputs: int, inputs: int, device: str, tiles: int = 37
) -> None:
    """That the product is that of the exact norm, up to one rounding of x and one of y."""
    sizes = torch.logspace(0, 4, rows, base=2, dtype=BF16, device=device)[:, None]
    residual, weight = numbers(device, rows, inputs) * sizes, numbers(device, outputs, inputs)
    weight /= inputs**0.5
    norm_weight = numbers(device, inputs)
    squares = residual.float().square()
    sums = torch.stack([part.sum(1) for part in squares.tensor_split(tiles, 1)])
    factors = torch.rsqrt(residual.double().square().mean(1) + EPS)[:, None]
    normed = NormedRows(residual * norm_weight, sums, norm_of(inputs, device))
    exact = normed.weighted.double() * factors @ weight.double().T
    bias = numbers(device, outputs)
    for added in (None, bias):
        y = gemm.multiply(normed, weight, added, None)
        total = exact if added is None else exact + added.double()
        limit = 2 * (total.to(BF16).double() - total).norm() + 1e-5 * total.norm()
        assert (y.double() - total).norm() <= limit
    if gemm.gates(rows, weight) and outputs % 2 == 0:
        gates, ups = (exact + bias.double()).chunk(2, -1)
        exact = F.silu(gates) * ups
        y = gemm.multiply(normed, weight, bias, "silu")
        limit = 2 * (exact.to(BF16).double() - exact).norm() + 1e-4 * exact.norm()
        assert (y.double() - exact).norm() <= limit


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_product_is_added_to_the_residual_and_its_squares_are_summed(gemm: SkinnyGemm, rows: int):
    check_add(gemm, rows, 148, 1024, "cpu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_product_is_that_of_the_norm_of_the_residual(gemm: SkinnyGemm, rows: int):
    check_norm(gemm, rows, 148, 1024, "cpu")


@pytest.mark.usefixtures("on_cpu")
def test_columns_past_the_end_count_for_nothing():
    check_norm(SkinnyGemm(64, 128, 2, 5, 1, 2), 3, 64, 200, "cpu")
    check_norm(SkinnyGemm(32, 256, 2, 3, 1, 2), 3, 64, 520, "cpu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("rows", "tiles"), [(13, 1), (33, 300), (64, 70)])
def test_more_rows_and_more_tiles_of_squares_than_are_loaded_at_once(rows: int, tiles: int):
    gemm = SkinnyGemm(64, 128, 2, 3, 1, 1)
    check_norm(gemm, rows, 150, 600, "cpu", tiles)
    check_add(gemm, rows, 151, 200, "cpu")


@pytest.mark.usefixtures("on_cpu")
def test_a_norm_may_multiply_by_its_weight_plus_one():
    check_add(SIZES[0], 5, 64, 256, "cpu", plus_one=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 17, 33, 64])
def test_every_candidate_adds_and_normalizes(rows: int):
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    for outputs, inputs in ((4096, 12288), (6144, 4096), (24576, 4096), (1008, 520)):
        for gemm in gemm_candidates(132, (9, 0), bucket, outputs, inputs):
            if isinstance(gemm, SkinnyGemm):
                check_add(gemm, rows, outputs, inputs, "cuda")
                check_add(gemm, rows, outputs, inputs, "cuda", plus_one=True)
                check_norm(gemm, rows, outputs, inputs, "cuda")
