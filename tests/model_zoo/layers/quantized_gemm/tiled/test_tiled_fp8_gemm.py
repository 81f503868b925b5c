"""TiledFp8Gemm against float64: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.tiled.gemm import TiledFp8Gemm
from model_zoo.layers.quantized_gemm.tiled.tile_rows import tile_rows
from model_zoo.layers.tiled_rows import TiledRows, TileOrder
from tests.support.kernels.quantized_cases import interpreted_tiled_gemm, quantized

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# (block_n, block_k, stages, programs, split_units, x_stages): split and whole tiles, stacked runs.
SIZES = [(64, 256, 2, 4, 1, 2), (64, 512, 2, 2, 2, 1), (32, 512, 2, 3, 2, 2)]
GATED = [(128, 256, 2, 4, 1, 2), (128, 256, 2, 2, 4, 1)]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_tiled_gemm():
        yield


def numbers(device: str, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def byte_of(columns: int) -> Tensor:
    """Where codes of x have each column: 16 u + 8 i + 2 t + e is byte 16 t + 4 u + 2 e + i."""
    n = torch.arange(columns)
    return n // 64 * 64 + n // 2 % 4 * 16 + n // 16 % 4 * 4 + n % 2 * 2 + n // 8 % 2


def tiled(x: Tensor, order: TileOrder) -> TiledRows:
    """x as a kernel quantizes it."""
    found = TiledRows.room_for((len(x), x.shape[1]), order, x.dtype, x.device)
    rows, columns = x.shape
    tiles = x.float().reshape(rows, columns // 64, 64)
    scale = tiles.abs().amax(2).clamp_min(1e-10) / 448
    codes = (tiles / scale[:, :, None]).to(FP8).reshape(rows, columns)
    found.codes[:, byte_of(columns).to(x.device)] = codes
    found.scales.fill_(math.nan)  # as memory that nobody has written may be
    height = found.scales.shape[1] // order.fold
    for block in range(columns // 64):
        run = block // order.steps
        row = run // order.fold * order.steps + block % order.steps
        found.scales[row, run % order.fold * height :][:rows] = scale[:, block]
    return found


def values(x: TiledRows) -> Tensor:
    """In float64."""
    rows, columns = x.codes.shape
    height = x.scales.shape[1] // x.order.fold
    scale = torch.empty(rows, columns // 64, dtype=torch.float64, device=x.codes.device)
    for block in range(columns // 64):
        run = block // x.order.steps
        row = run // x.order.fold * x.order.steps + block % x.order.steps
        scale[:, block] = x.scales[row, run % x.order.fold * height :][:rows].double()
    codes = x.codes.double()[:, byte_of(columns).to(x.codes.device)]
    return (codes.reshape(rows, -1, 64) * scale[:, :, None]).reshape(rows, columns)


def check(gemm: TiledFp8Gemm, device: str, rows: int, outputs: int, inputs: int) -> None:
    weight = quantized("fp8 row", outputs, inputs, device=device)
    x, bias = tiled(numbers(device, rows, inputs), gemm.order), numbers(device, outputs)
    exact = values(x) @ weight.dequantize(torch.float32).double().T + bias.double()
    y = gemm.multiply(x, pack(weight), bias)
    assert (y.double() - exact).norm() <= 2e-3 * exact.norm()
    assert torch.equal(gemm.multiply(x, pack(weight), bias), y)
    assert int(workspace(x.codes.device)[1].sum()) == 0


def check_codes(gemm: TiledFp8Gemm, device: str, rows: int, outputs: int, inputs: int) -> None:
    """That they differ from the exact output as codes of 4 bits of mantissa do."""
    weight = quantized("fp8 row", 2 * outputs, inputs, device=device)
    x, order = tiled(numbers(device, rows, inputs), gemm.order), TileOrder(2, 2)
    gates, ups = (values(x) @ weight.dequantize(torch.float32).double().T).chunk(2, 1)
    exact = F.silu(gates) * ups
    found = gemm.gated(x, pack(weight), None, "silu", order)
    largest = exact.reshape(rows, -1, 64).abs().amax(2).repeat_interleave(64, 1)
    off = (values(found) - exact).abs()
    assert (off <= exact.abs() / 14 + largest / 400).all()
    assert (off.norm() / exact.norm()) < 0.04


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.parametrize("size", SIZES)
def test_scales_of_64_columns_come_with_x(size: tuple[int, ...], rows: int):
    gemm = TiledFp8Gemm(*size)
    if gemm.fold * max(8, rows) <= 64:
        check(gemm, "cpu", rows, 160, 1024)


def check_norm(
    gemm: TiledFp8Gemm, following: TiledFp8Gemm, device: str, rows: int, hidden: int, inputs: int
) -> None:
    """That two GEMMs add to the residual and multiply the norm of the sum."""
    first = quantized("fp8 row", hidden, inputs, device=device)
    second = quantized("fp8 row", 128, hidden, device=device)
    x, residual = tiled(numbers(device, rows, inputs), gemm.order), numbers(device, rows, hidden)
    norm = RMSNorm(hidden, 1e-3, BF16).to(device)
    norm.weight.copy_(numbers(device, hidden).abs() + 0.5)
    total = residual.double() + values(x) @ first.dequantize(torch.float32).double().T
    normed = gemm.add_to(residual, x, pack(first), None, norm, following.order)
    assert (residual.double() - total).norm() <= 6e-3 * total.norm()
    rms = (total.square().mean(1, keepdim=True) + norm.eps).sqrt()
    weighted = total * norm.weight.double()
    assert (values(normed) - weighted).norm() <= 0.04 * weighted.norm()
    exact = values(normed) / rms @ second.dequantize(torch.float32).double().T
    y = following.multiply(normed, pack(second), None)
    assert (y.double() - exact).norm() <= 6e-3 * exact.norm()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("following", SIZES)
@pytest.mark.parametrize("size", [size for size in SIZES if size[0] == 64])
def test_norms_are_between_two_gemms(size: tuple[int, ...], following: tuple[int, ...], rows: int):
    check_norm(TiledFp8Gemm(*size), TiledFp8Gemm(*following), "cpu", rows, 1024, 1024)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("size", GATED)
def test_a_gated_output_is_stored_as_codes(size: tuple[int, ...], rows: int):
    check_codes(TiledFp8Gemm(*size), "cpu", rows, 256, 1024)


def test_what_would_read_scales_that_nobody_has_written_is_not_served():
    gemm = TiledFp8Gemm(64, 256, 2, 4, 1, 2)
    assert gemm.serves(5, 160, 1024)
    assert not gemm.serves(5, 160, 1088), "the last unit has columns past the end"
    assert not TiledFp8Gemm(64, 128, 2, 4, 1, 2).serves(5, 160, 1024), (
        "scales that TMA cannot place"
    )
    assert not TiledFp8Gemm(32, 64, 2, 4, 1, 2).serves(5, 160, 1024), "runs of 32 columns"
    with pytest.raises(AssertionError):
        TiledRows.room_for((5, 96), gemm.order, BF16, torch.device("cpu"))


@pytest.mark.parametrize("order", [TileOrder(1, 8), TileOrder(2, 4), TileOrder(2, 8)])
@pytest.mark.parametrize("shape", [(1, 64), (5, 1088), (16, 2048)])
def test_rows_are_quantized_by_64_columns(device: str, shape: tuple[int, int], order: TileOrder):
    x = numbers(device, *shape)
    found = tile_rows(x.to(torch.float16), order)
    off = (values(found) - x.double()).abs()
    largest = x.double().reshape(len(x), -1, 64).abs().amax(2).repeat_interleave(64, 1)
    wrong = off > x.double().abs() / 14 + largest / 400
    # The interpreter loses a carry from e4m3's mantissa to its exponent.
    assert wrong.double().mean() <= (0.08 if device == "cpu" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 11, 32])
def test_true_shapes(rows: int):
    for outputs, inputs, size in (
        (4096, 12_288, (64, 512, 5, 64, 24, 3)),
        (4096, 4096, (64, 512, 5, 64, 8, 3)),
        (6144, 4096, (64, 512, 5, 96, 8, 3)),
    ):
        check(TiledFp8Gemm(*size), "cuda", rows, outputs, inputs)
    if rows <= 16:
        check(TiledFp8Gemm(32, 1024, 5, 128, 12, 3), "cuda", rows, 4096, 12_288)
    following = TiledFp8Gemm(64, 512, 5, 96, 8, 3)
    check_norm(TiledFp8Gemm(64, 512, 5, 64, 8, 3), following, "cuda", rows, 4096, 4096)
    check_codes(TiledFp8Gemm(128, 256, 5, 96, 16, 3), "cuda", rows, 12_288, 4096)
