"""GEMMs of many rows and weights of 4 bits: interpreted, and on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm import bands
from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.quantized_gemm.packed_many_rows import (
    PARTED,
    TILE_ROWS,
    WIDTHS,
    PackedManyRowsGemm,
    multiplies,
)
from model_zoo.layers.quantized_gemm.packed_weight import pack
from tests.support.interpreter.gluon_interpreter import interpreted
from tests.support.kernels.quantized_cases import quantized

BF16, FP16 = torch.bfloat16, torch.float16
PROGRAMS = 2  # of the device that is interpreted
NARROW = PackedManyRowsGemm(64)
FORMATS = ("int4 g128", "int4 g64 zeros", "int4 g32 zeros", "int4 row", "nvfp4", "mxfp4")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a device of two processors, whose programs compute several tiles each."""
    monkeypatch.setattr(bands, "processors", lambda device: PROGRAMS)
    folder = "model_zoo.layers"
    modules = (
        f"{folder}.gemm.hopper.many_rows",
        f"{folder}.quantized_gemm.hopper.convert",
        f"{folder}.quantized_gemm.hopper.scales",
        f"{folder}.quantized_gemm.hopper.multiply",
        f"{folder}.quantized_gemm.hopper.packed_many_rows",
    )
    with interpreted("packed_many_rows", *modules):
        yield


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check(
    device: str, name: str, gemm: PackedManyRowsGemm, rows: int, outputs: int, inputs: int,
    dtype: torch.dtype = BF16, bias: bool = False, permuted: bool = False,
    scales: torch.dtype | None = None,
) -> None:  # fmt: skip
    """That the error is that of one rounding of the output, and of int4 by its scale; that the next
    product has the same bits, and that no part of a sum is left."""
    weight = quantized(
        name, outputs, inputs, device=device, scales=scales or dtype, permuted=permuted
    )
    x = numbers(device, dtype, rows, inputs)
    added = numbers(device, dtype, outputs) if bias else None
    tiles = -(-rows // gemm.width) * -(-outputs // TILE_ROWS) * gemm.parts
    assert device == "cuda" or tiles > PROGRAMS, "some programs have more than one"
    y = gemm.run(x, pack(weight), added)
    plain = weight.dequantize(torch.float32)
    grouped = weight.kind == "int4" and weight.column_group < inputs
    exact = x.double() @ (plain.to(dtype) if grouped else plain).double().T
    exact += 0 if added is None else added.double()
    assert y.shape == (rows, outputs) and y.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).norm()
    # Tensor cores add with fewer digits than float32 has.
    assert (y.double() - exact).norm() <= 1.05 * rounding + 2e-5 * exact.norm()
    assert torch.equal(gemm.run(x, pack(weight), added), y)
    assert int(workspace(x.device)[1].sum()) == 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantized_weight(name: str):
    check("cpu", name, NARROW, 100, 272, 640)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_of_every_width_have_all_rows_and_columns(width: int):
    gemm = PackedManyRowsGemm(width)
    check("cpu", "int4 g128", gemm, 2 * width + 8, 136, 384, bias=True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["int4 g64 zeros", "nvfp4"])
def test_parts_of_tiles_are_added(name: str):
    check("cpu", name, PackedManyRowsGemm(64, parts=4), 100, 272, 1920, bias=True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["int4 g64 zeros", "nvfp4"])
def test_products_in_float16(name: str):
    check("cpu", name, NARROW, 70, 144, 512, FP16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["int4 g128", "int4 g64 zeros"])
def test_scales_in_float16_are_not_rounded_to_bfloat16(name: str):
    check("cpu", name, NARROW, 70, 144, 512, BF16, scales=FP16)


@pytest.mark.usefixtures("on_cpu")
def test_columns_are_taken_in_the_order_of_the_weight():
    check("cpu", "int4 g128", NARROW, 70, 136, 512, permuted=True)


def test_no_rows_are_no_product():
    weight = pack(quantized("int4 g128", 128, 256, scales=BF16))
    assert NARROW.run(torch.empty(0, 256, dtype=BF16), weight, None).shape == (0, 128)


@pytest.mark.parametrize("name", [*FORMATS, "int8 g128 zeros", "fp8 row", "int4 row zeros"])
@pytest.mark.parametrize("scales", [BF16, FP16])
def test_other_kinds_and_scales_are_left_to_other_gemms(name: str, scales: torch.dtype):
    weight = pack(quantized(name, 128, 256, scales=scales))
    served = {dtype: multiplies(weight, dtype, 256) for dtype in (BF16, FP16)}
    # Scales of mxfp4 are out of the range of float16; those of int4 would have to be converted.
    refused = name == "mxfp4" or (name.startswith("int4 g") and scales == BF16)
    assert served == {BF16: name in FORMATS, FP16: name in FORMATS and not refused}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("width", WIDTHS)
def test_all_sizes_on_a_gpu(name: str, dtype: torch.dtype, width: int):
    if (name, dtype) == ("mxfp4", FP16):
        pytest.skip("scales are out of the range of float16")
    for outputs, inputs in ((1536, 2048), (512, 6144), (1096, 1408), (264, 128)):
        for rows in (1, 65, 256, 500, 1100):
            parts = 2 if rows == 500 and inputs > 128 and width <= PARTED else 1
            gemm = PackedManyRowsGemm(width, parts)
            bias, scales = rows == 65, FP16 if rows == 256 else dtype
            check("cuda", name, gemm, rows, outputs, inputs, dtype, bias, scales=scales)
