"""SkinnyFp8Gemm against float64: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.quantized_gemm.fp8.skinny import SkinnyFp8Gemm, skinny_fp8_candidates
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind
from model_zoo.quantization.quantized_weight import QuantizedWeight
from tests.support.kernels.quantized_cases import interpreted_fp8_gemm, quantized

BF16 = torch.bfloat16
KINDS: dict[ScaleKind, str] = {"row": "fp8 row", "block": "fp8 block"}
# (block_n, block_k, stages, programs, split_units, x_stages): split and whole tiles, stacked runs.
SIZES = [
    (64, 256, 2, 4, 1, 2),
    (64, 256, 3, 2, 2, 1),
    (32, 512, 2, 3, 2, 2),
    (16, 1024, 2, 5, 1, 1),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_fp8_gemm():
        yield


def numbers(device: str, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def exactly(x: QuantizedRows, weight: QuantizedWeight, columns: Tensor) -> Tensor:
    """The product of the codes' values in float64.  columns: the order of x's codes."""
    values = x.codes[: x.count].double()[:, columns]
    scales = x.scales[: x.count].double()
    if x.kind == "block":
        scales = scales.repeat_interleave(128, 1)[:, : values.shape[1]]
    return (values * scales) @ weight.dequantize(torch.float32).double().T


def order(columns: int) -> Tensor:
    """Where codes of x have each column: 16 u + 8 i + 2 t + e is byte 16 t + 4 u + 2 e + i."""
    byte = torch.arange(64).reshape(4, 4, 2, 2).permute(1, 3, 0, 2).reshape(64)
    return (torch.arange(columns // 64)[:, None] * 64 + byte).reshape(columns)


def check(gemm: SkinnyFp8Gemm, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """That the error is that of rounding once, and of the tensor cores' sums; and the same bits."""
    packed = pack(weight)
    codes = quantize_rows(x, gemm.kind)
    y = gemm.product(codes, packed, bias)
    exact = exactly(codes, weight, order(x.shape[1]).to(x.device))
    if bias is not None:
        exact = exact + bias.double()
    limit = 2 * (exact.to(BF16).double() - exact).norm() + 2e-3 * exact.norm()
    assert y.shape == exact.shape and y.dtype == BF16
    assert (y.double() - exact).norm() <= limit
    assert torch.equal(gemm.product(codes, packed, bias), y)
    assert torch.equal(gemm.run(x, packed, bias), y)
    assert int(workspace(x.device)[1].sum()) == 0


def check_gate(
    gemm: SkinnyFp8Gemm, x: Tensor, weight: QuantizedWeight, bias: Tensor | None
) -> None:
    """As `check`, of silu(gate) * up, whose error is that of both factors."""
    packed = pack(weight)
    codes = quantize_rows(x, gemm.kind)
    y = gemm.multiply(codes, packed, bias, "silu")
    exact = exactly(codes, weight, order(x.shape[1]).to(x.device))
    gates, ups = (exact if bias is None else exact + bias.double()).chunk(2, -1)
    exact = F.silu(gates) * ups
    limit = 2 * (exact.to(BF16).double() - exact).norm() + 4e-3 * exact.norm()
    assert y.shape == exact.shape and y.dtype == BF16
    assert (y.double() - exact).norm() <= limit
    assert torch.equal(gemm.multiply(x, packed, bias, "silu"), y)
    assert int(workspace(x.device)[1].sum()) == 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gated_products_by_scales_of_rows_and_of_blocks_are_right(
    kind: ScaleKind, sizes: tuple[int, int, int, int, int, int]
):
    """88 gates: the last tile has fewer, and one block of scales has gates and ups."""
    weight = quantized(KINDS[kind], 176, 1024)
    gemm = SkinnyFp8Gemm(kind, *sizes)
    check_gate(gemm, numbers("cpu", 3, 1024), weight, numbers("cpu", 176))
    check_gate(gemm, numbers("cpu", 8, 1024), weight, None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_by_scales_of_rows_and_of_blocks_are_right(
    kind: ScaleKind, sizes: tuple[int, int, int, int, int, int]
):
    gemm = SkinnyFp8Gemm(kind, *sizes)
    for rows in (1, 5, 8):
        weight = quantized(KINDS[kind], 176, 1024)
        check(gemm, numbers("cpu", rows, 1024), weight, numbers("cpu", 176))
        check(gemm, numbers("cpu", rows, 1024), weight, None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_columns_past_the_end_of_the_last_unit_are_not_added(kind: ScaleKind):
    weight = quantized(KINDS[kind], 96, 1536)
    for sizes in ((64, 1024, 2, 2, 2, 2), (32, 1024, 2, 3, 1, 1), (16, 2048, 2, 5, 1, 1)):
        check(SkinnyFp8Gemm(kind, *sizes), numbers("cpu", 3, 1536), weight, None)


@pytest.mark.usefixtures("on_cpu")
def test_no_rows_have_no_output():
    packed = pack(quantized("fp8 row", 64, 256))
    gemm = SkinnyFp8Gemm("row", 64, 256, 2, 1, x_stages=2)
    assert gemm.run(numbers("cpu", 0, 256), packed, None).shape == (0, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (24576, 4096), (1536, 512)])
def test_candidates_serve_the_shape_that_they_are_for(
    kind: ScaleKind, rows: int, shape: tuple[int, int]
):
    found = skinny_fp8_candidates(kind, 132, rows, *shape)
    assert any(gemm.block_n == 64 and gemm.split_units > 1 for gemm in found) or shape[1] <= 512
    assert all(gemm.block_k // gemm.fold % 128 == 0 for gemm in found)
    assert not any(gemm.serves(65, *shape) for gemm in found)
    weight = pack(quantized(KINDS[kind], 512, 512))
    assert all(gemm.gates(rows, weight) for gemm in found)


def test_lower_and_split_tiles_are_tried_where_whole_ones_of_64_rows_are_few():
    def tried(outputs: int) -> list[tuple[int, bool]]:
        found = skinny_fp8_candidates("row", 132, 8, outputs, 4096)
        return sorted((gemm.block_n, gemm.split_units == 1) for gemm in found)

    assert tried(24576) == [(64, False)]
    assert tried(6144) == [(32, False), (64, False)]
    assert tried(2048) == [(16, False), (32, False), (64, False), (64, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_is_right(kind: ScaleKind):
    for outputs, inputs in ((1008, 4096), (2048, 6144), (4096, 12288)):
        weight = quantized(KINDS[kind], outputs, inputs, device="cuda")
        bias = numbers("cuda", outputs)
        for rows in (1, 3, 8, 13, 17, 64):
            for gemm in skinny_fp8_candidates(kind, 132, rows, outputs, inputs):
                check(gemm, numbers("cuda", rows, inputs), weight, bias)
                if gemm.gates(rows, pack(weight)):
                    check_gate(gemm, numbers("cuda", rows, inputs), weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_cublas(kind: ScaleKind):
    packed: PackedWeight = pack(quantized(KINDS[kind], 6144, 4096, device="cuda"))
    for rows in (1, 8, 64):
        x = numbers("cuda", rows, 4096)
        expected = ScaledMM(kind).run(x, packed, None).double()
        for gemm in skinny_fp8_candidates(kind, 132, rows, 6144, 4096):
            y = gemm.run(x, packed, None).double()
            assert (y - expected).norm() <= 5e-3 * expected.norm()
