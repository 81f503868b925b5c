"""ConvertingFp8Gemm against float64: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.skinny_fp8 import ConvertingFp8Gemm, converting_fp8_candidates
from model_zoo.layers.quantized_rows import ScaleKind
from model_zoo.quantization.quantized_weight import QuantizedWeight
from tests.support.kernels.quantized_cases import interpreted_fp8_gemm, quantized

BF16 = torch.bfloat16
EPS = 1e-6
KINDS: dict[ScaleKind, str] = {"row": "fp8 row", "block": "fp8 block"}
# (block_n, block_k, stages, programs, split_units, x_stages, code_stages): split and whole tiles,
# stacked runs.
SIZES = [
    (64, 256, 2, 4, 1, 2, 1),
    (64, 256, 3, 2, 2, 1, 2),
    (32, 512, 2, 3, 2, 2, 2),
    (16, 1024, 2, 5, 1, 1, 1),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_fp8_gemm():
        yield


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, and one element that is much larger than the others."""
    generator = torch.Generator(device).manual_seed(sum(shape) + seed)
    x = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 2:
        x *= torch.arange(1, shape[0] + 1, device=device)[:, None]
        x[:, shape[1] // 3] *= 50
    return x.to(BF16)


def quantized_units(gemm: ConvertingFp8Gemm, x: Tensor) -> Tensor:
    """What x is after it has been rounded to codes by the kernel's units, in float64."""
    run = gemm.block_k // gemm.fold
    padded = F.pad(x.float(), (0, -x.shape[1] % run)).reshape(len(x), -1, run)
    largest = padded.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    codes = (padded * (1.0 / largest * 448.0)).to(torch.float8_e4m3fn)
    values = codes.double() * (largest / 448.0).double()
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def close(y: Tensor, exact: Tensor, share: float) -> bool:
    """Whether y is exact but for one rounding and such a share of its norm."""
    limit = 2 * (exact.to(BF16).double() - exact).norm() + share * exact.norm()
    return bool((y.double() - exact).norm() <= limit)


def check(gemm: ConvertingFp8Gemm, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    packed, dense = pack(weight), weight.dequantize(torch.float32).double()
    exact = quantized_units(gemm, x) @ dense.T
    if bias is not None:
        exact = exact + bias.double()
    y = gemm.run(x, packed, bias)
    assert y.shape == exact.shape and y.dtype == BF16
    assert close(y, exact, 2e-3)
    assert torch.equal(gemm.run(x, packed, bias), y)
    if gemm.gates(len(x), packed):
        gates, ups = exact.chunk(2, -1)
        assert close(gemm.multiply(x, packed, bias, "silu"), F.silu(gates) * ups, 4e-3)
    assert int(workspace(x.device)[1].sum()) == 0


def check_norms(gemm: ConvertingFp8Gemm, x: Tensor, weight: QuantizedWeight) -> None:
    packed, dense = pack(weight), weight.dequantize(torch.float32).double()
    squares = torch.stack([part.sum(1) for part in x.float().square().tensor_split(37, 1)])
    factors = torch.rsqrt(x.double().square().mean(1) + EPS)[:, None]
    weighted = x * numbers(str(x.device), x.shape[1])
    exact = quantized_units(gemm, weighted) * factors @ dense.T
    ones = RMSNorm(x.shape[1], EPS, BF16)  # whose weight has been multiplied
    normed = NormedRows(weighted, squares, ones)
    assert close(gemm.multiply(normed, packed, None, None), exact, 2e-3)
    norm = RMSNorm(weight.shape[0], EPS, BF16).to(x.device)
    norm.weight.copy_(numbers(str(x.device), weight.shape[0]))
    residual = numbers(str(x.device), len(x), weight.shape[0], seed=1)
    expected = residual + gemm.run(x, packed, None)
    normed = gemm.add_to(residual, x, packed, None, norm)
    assert torch.equal(residual, expected)
    assert torch.equal(normed.weighted, residual * norm.weight)
    sums = residual.double().square().sum(1)
    torch.testing.assert_close(normed.squares.sum(0).double(), sums, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_products_of_rows_that_the_kernel_quantizes_are_right(
    kind: ScaleKind, sizes: tuple[int, ...], rows: int
):
    """176 outputs: the last tile has fewer."""
    gemm, weight = ConvertingFp8Gemm(kind, *sizes), quantized(KINDS[kind], 176, 1024)
    check(gemm, numbers("cpu", rows, 1024), weight, numbers("cpu", 176))
    check_norms(gemm, numbers("cpu", rows, 1024), weight)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_columns_past_the_end_of_the_last_unit_are_not_added(kind: ScaleKind):
    weight = quantized(KINDS[kind], 96, 1536)
    for sizes in ((64, 1024, 2, 2, 2, 2), (32, 1024, 2, 3, 1, 1), (16, 2048, 2, 5, 1, 1)):
        check(ConvertingFp8Gemm(kind, *sizes), numbers("cpu", 3, 1536), weight, None)


@pytest.mark.usefixtures("on_cpu")
def test_rows_of_zeros_and_no_rows_have_such_products():
    packed = pack(quantized("fp8 row", 64, 256))
    gemm = ConvertingFp8Gemm("row", 64, 256, 2, 1, x_stages=2)
    assert gemm.run(torch.zeros(2, 256, dtype=BF16), packed, None).eq(0).all()
    assert gemm.run(numbers("cpu", 0, 256), packed, None).shape == (0, 64)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (24576, 4096), (1536, 512)])
def test_candidates_have_room_for_what_they_compute(rows: int, shape: tuple[int, int]):
    found = converting_fp8_candidates("row", 132, rows, *shape)
    weight = pack(quantized("fp8 row", 512, 512))
    assert found and all(gemm.gates(rows, weight) for gemm in found)
    assert all(gemm.code_stages <= gemm.stages for gemm in found)
    assert not any(gemm.serves(17, *shape) for gemm in found)
    assert not converting_fp8_candidates("row", 132, 17, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_is_right(kind: ScaleKind):
    for outputs, inputs in ((1008, 4096), (2048, 6144), (4096, 12288), (24576, 4096)):
        weight = quantized(KINDS[kind], outputs, inputs, device="cuda")
        bias = numbers("cuda", outputs)
        for rows in (1, 3, 8, 13, 16):
            for gemm in converting_fp8_candidates(kind, 132, rows, outputs, inputs):
                check(gemm, numbers("cuda", rows, inputs), weight, bias)
                check_norms(gemm, numbers("cuda", rows, inputs), weight)
