"""GEMMs with few rows: the kernels against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import (
    CublasGemm,
    GemmImpl,
    SkinnyGemm,
    SplitK,
    workspace,
)

ROWS = (1, 2, 7, 8, 13, 16, 32, 33, 64)
SHAPES = ((64, 128), (200, 72), (333, 520), (6144, 4096), (4096, 12288))
SKINNY_CONFIGS = [
    SkinnyGemm(64, 256, 3, 132),
    SkinnyGemm(64, 256, 3, 132, split_units=2, x_stages=2),
    SkinnyGemm(128, 64, 6, 100),
    SkinnyGemm(32, 256, 4, 7),
    SkinnyGemm(16, 512, 4, 132),
]
SPLITS = [SplitK(32, 64, 1), SplitK(64, 128, 2), SplitK(16, 128, 4)]


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check(gemm: GemmImpl, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """That the error is at most twice that of the same maths in float32, rounded once."""
    y = gemm.run(x, weight, bias)
    exact, single = x.double() @ weight.double().T, x.float() @ weight.float().T
    if bias is not None:
        exact, single = exact + bias.double(), single + bias.float()
    limit = 2 * (single.to(x.dtype).double() - exact).norm() + 1e-9
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert (y.double() - exact).norm() <= limit
    return y


def parts_that_were_left(device: str) -> int:
    return int(
        workspace(torch.device(device, 0) if device == "cuda" else torch.device(device))[1].sum()
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gemm", [SplitK(32, 32, 1), SplitK(32, 32, 3), SplitK(16, 16, 4)])
@pytest.mark.parametrize("shape", [(1, 40, 72), (5, 33, 136), (17, 16, 96), (33, 20, 136)])
def test_split_k_partials_of_a_gemm_add_up_to_it(
    device: str, gemm: SplitK, shape: tuple[int, int, int], bias: bool
):
    rows, outputs, inputs = shape
    x = numbers(device, torch.float16, rows, inputs)
    weight = numbers(device, torch.float16, outputs, inputs)
    y = check(gemm, x, weight, numbers(device, torch.float16, outputs) if bias else None)
    if not bias:
        assert torch.equal(gemm.run(x, weight, None), y), "the same bits at each run"
    assert parts_that_were_left(device) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gemm", [*SKINNY_CONFIGS, *SPLITS, CublasGemm(rows=8)], ids=str)
def test_products_are_as_exact_as_float32_sums_allow(gemm: GemmImpl, dtype: torch.dtype):
    for outputs, inputs in SHAPES:
        weight = numbers("cuda", dtype, outputs, inputs)
        bias = numbers("cuda", dtype, outputs)
        for rows in ROWS:
            if gemm.serves(rows, outputs, inputs):
                x = numbers("cuda", dtype, rows, inputs)
                check(gemm, x, weight, bias)
                y = check(gemm, x, weight, None)
                assert all(torch.equal(gemm.run(x, weight, None), y) for _ in range(3))
    assert parts_that_were_left("cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", [*SKINNY_CONFIGS, *SPLITS], ids=str)
def test_a_row_has_the_same_result_among_any_others(gemm: GemmImpl):
    """A GEMM's order of summation depends on the weights' shape alone."""
    served = [rows for rows in ROWS if gemm.serves(rows, 1024, 4096)]
    x = numbers("cuda", torch.bfloat16, max(served), 4096)
    weight = numbers("cuda", torch.bfloat16, 1024, 4096)
    whole = gemm.run(x, weight, None)
    for rows in served:
        assert torch.equal(gemm.run(x[:rows], weight, None), whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", [*SKINNY_CONFIGS, *SPLITS], ids=str)
def test_a_captured_chain_of_gemms_gives_the_same_bits_at_each_replay(gemm: GemmImpl):
    """Each GEMM reads what the one before wrote, while its own weights are on their way."""
    weights = [numbers("cuda", torch.bfloat16, 1024, 1024) / math.sqrt(1024) for _ in range(8)]
    first = numbers("cuda", torch.bfloat16, 8, 1024)

    def chain() -> Tensor:
        x = first
        for weight in weights:
            x = gemm.run(x, weight, None)
        return x

    expected = first.double()
    for weight in weights:
        expected = (expected @ weight.double().T).to(torch.bfloat16).double()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    results: list[Tensor] = []
    for _ in range(20):
        graph.replay()
        results.append(out.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0].double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("gemm", "shape", "serves"),
    [
        (CublasGemm(), (500, 64, 7), True),
        (CublasGemm(rows=8), (1, 64, 64), True),
        (CublasGemm(rows=8), (8, 64, 64), False),
        (SplitK(64, 128, 4), (65, 64, 4096), False),
        (SplitK(64, 128, 4), (1, 64, 384), False),  # fewer blocks than parts
        (SplitK(64, 128, 1), (64, 151936, 4096), True),
        (SplitK(64, 128, 2), (64, 151936, 4096), False),  # the parts need too much room
        (SkinnyGemm(64, 128, 4, 132), (64, 151936, 4096), True),
        (SkinnyGemm(64, 128, 4, 132), (1, 64, 100), False),  # rows that are not 16-byte aligned
        (SkinnyGemm(64, 128, 4, 132, split_units=3), (1, 64, 512), False),
        (SkinnyGemm(16, 512, 4, 132), (32, 64, 512), True),
        (SkinnyGemm(16, 512, 4, 132), (33, 64, 512), False),  # its tile would be too wide
    ],
)
def test_a_gemm_reports_what_it_serves(gemm: GemmImpl, shape: tuple[int, int, int], serves: bool):
    assert gemm.serves(*shape) == serves


def test_padded_rows_are_cut_off_again():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    y = CublasGemm(rows=4).run(x, weight, None)
    assert y.shape == (3, 5)
    torch.testing.assert_close(y, x @ weight.T)
