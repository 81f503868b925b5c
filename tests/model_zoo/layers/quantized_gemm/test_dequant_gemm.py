"""GEMMs that dequantize their weights on the way, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.quantized_gemm.dequant_gemm import (
    LARGE,
    SMALL,
    DequantizeInRegisters,
    DequantizeInRegistersUnsplit,
    dequant_gemms,
    tile_of,
)
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.quantization.quantized_weight import QuantizedWeight
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401
from tests.support.kernels.quantized_cases import KINDS, quantized

BF16, FP16 = torch.bfloat16, torch.float16
CUDA = torch.device("cuda", 0)
CORNERS = {"int4 g32 zeros", "int8 row", "nvfp4", "fp8 block"}
EACH_KIND = [
    name if name in CORNERS else pytest.param(name, marks=pytest.mark.slow) for name in KINDS
]
WHOLE, SPLIT = DequantizeInRegisters(16, 32, 128), DequantizeInRegisters(32, 16, 128, parts=3)


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check(
    gemm: DequantizeInRegisters | DequantizeInRegistersUnsplit,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
) -> Tensor:
    """That the error is at most twice that of float32 sums of weights rounded to x's type."""
    y = gemm.run(x, pack(weight), bias)
    exact = x.double() @ weight.dequantize(torch.float32).double().T
    single = x.float() @ weight.dequantize(x.dtype).float().T
    if bias is not None:
        exact, single = exact + bias.double(), single + bias.float()
    limit = 2 * (single.to(x.dtype).double() - exact).norm() + 1e-9
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert (y.double() - exact).norm() <= limit
    return y


@pytest.mark.parametrize("name", EACH_KIND)
@pytest.mark.parametrize("gemm", [WHOLE, SPLIT], ids=str)
def test_products_of_every_kind_are_as_exact_as_float32_sums_allow(
    device: str, gemm: DequantizeInRegisters, name: str
):
    weight = quantized(name, 77, 640, device=device)
    x = numbers(device, FP16, 5, 640)
    check(gemm, x, weight, numbers(device, FP16, 77))
    y = check(gemm, x, weight, None)
    assert torch.equal(gemm.run(x, pack(weight), None), y), "the same bits at each run"
    assert int(workspace(x.device)[1].sum()) == 0


@pytest.mark.parametrize("rows", [1, 17, 40])
def test_rows_and_columns_need_not_fill_a_tile(device: str, rows: int):
    weight = quantized("int8 g128 zeros", 45, 192, device=device)
    check(DequantizeInRegisters(16, 32, 128), numbers(device, FP16, rows, 192), weight, None)


def test_more_tiles_of_rows_than_a_stripe_has_are_all_computed(device: str):
    weight = quantized("int4 g128", 40, 128, device=device)
    check(DequantizeInRegisters(16, 16, 128), numbers(device, FP16, 9 * 16 + 3, 128), weight, None)


def test_act_order_multiplies_each_column_of_x_by_its_weights(device: str):
    weight = quantized("int4 g32 zeros", 33, 256, device=device, permuted=True)
    check(DequantizeInRegisters(16, 16, 128, parts=2), numbers(device, FP16, 3, 256), weight, None)


def test_no_rows_are_no_error(device: str):
    weight = pack(quantized("mxfp4", 33, 256, device=device))
    assert tile_of(torch.device(device), 0).run(
        numbers(device, FP16, 0, 256), weight, None
    ).shape == (0, 33)


def test_a_gemm_reports_what_it_serves():
    split, high = DequantizeInRegisters(16, 64, 128, parts=4), DequantizeInRegisters(64, 64, 128, 2)
    assert split.serves(1, 64, 512) and not split.serves(1, 64, 384), "fewer steps than parts"
    assert high.serves(64, 4096, 4096)
    assert not high.serves(64, 151936, 4096), "parts need the room"


@pytest.mark.parametrize("rows", [1, 64, 65, 5000])
def test_candidates_serve_and_split_few_rows_of_few_tiles(rows: int):
    candidates = dequant_gemms(torch.device("cpu"), 132, rows, 4096, 12288)
    assert candidates[0].parts == 1
    assert any(gemm.parts > 1 for gemm in candidates) == (rows <= 64)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("name", ["int4 g128", "nvfp4"])
def test_a_row_has_the_same_bits_alone_and_among_others(device: str, name: str):
    weight = pack(quantized(name, 40, 256, device=device))
    x, gemm = numbers(device, FP16, 140, 256), DequantizeInRegistersUnsplit()
    whole = gemm.run(x, weight, None)
    for rows in (1, 20, 70):
        assert torch.equal(gemm.run(x[:rows], weight, None), whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_large_products_are_right_and_batch_invariant(name: str, dtype: torch.dtype):
    weight = quantized(name, 6144, 4096, device="cuda", scales=dtype)
    packed, x = pack(weight), numbers("cuda", dtype, 1000, 4096)
    gemm = DequantizeInRegistersUnsplit()
    whole = check(gemm, x, weight, None)
    for rows in (1, 2, 16, 17, 33, 64, 65, 100, 128, 129, 300):
        assert torch.equal(gemm.run(x[:rows], packed, None), whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_every_candidate_is_right(name: str):
    weight = quantized(name, 1000, 4096, device="cuda", scales=BF16)
    for rows in (1, 5, 16, 33, 64, 100, 300):
        for gemm in {*dequant_gemms(CUDA, 132, rows, 1000, 4096), *(SMALL | LARGE).values()}:
            if gemm.serves(rows, 1000, 4096):
                check(gemm, numbers("cuda", BF16, rows, 4096), weight, None)
    assert int(workspace(CUDA)[1].sum()) == 0
