"""Int8Gemm against sums of 64-bit integers: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.quantized_gemm.int8.cpu import OneDnnInt8, packs_of
from model_zoo.layers.quantized_gemm.int8.gemm import (
    Int8Gemm,
    Int8GemmByRows,
    activation_kind,
    int8_gemms,
)
from model_zoo.layers.quantized_gemm.packed_parameters import PackedParameters
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, unpack_codes
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind
from model_zoo.quantization.weight_scheme import WeightScheme
from tests.support.kernels.quantized_cases import quantized
from tests.support.quantization.rounded_activations import rounded_to_integers

BF16, FP16 = torch.bfloat16, torch.float16
KINDS: tuple[ScaleKind, ...] = ("int8", "int8 zeros")
CPU = torch.device("cpu")


def scheme(columns: int, kind: ScaleKind = "int8") -> WeightScheme:
    return WeightScheme(
        kind="int8", row_group=1, column_group=columns, scale_dtype=FP16, activation_bits=8,
        activation_zeros=kind == "int8 zeros",
    )  # fmt: skip


def weight_of(rows: int, columns: int, kind: ScaleKind, device: str) -> PackedWeight:
    parameters = PackedParameters(scheme(columns, kind), rows, columns).to(device)
    parameters.store(0, quantized("int8 row", rows, columns, device=device))
    return parameters.weight


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Mostly positive, as what follows an activation function is."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, device=device)
    return torch.nn.functional.gelu(4 * x).to(dtype)


def exact(x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """float64: the product of the codes in int64, and then the scales."""
    codes = weight.words.view(torch.int8).cpu().long()
    zeros = torch.zeros(1).long() if x.zeros is None else x.zeros.cpu().long()[:, None]
    sums = ((x.codes.cpu().long() - zeros) @ codes.T)[: x.count].double()
    scaled = sums * x.scales[: x.count].cpu().double() * weight.scales.cpu().double()
    return scaled if bias is None else scaled + bias.cpu().double()


def check(
    gemm: Int8Gemm | Int8GemmByRows, x: Tensor, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """That each number is the exact one after float32 operations and one rounding."""
    y = gemm.run(x, weight, bias)
    right = exact(quantize_rows(x, gemm.kind), weight, bias)
    assert y.shape == right.shape and y.dtype == x.dtype
    # The interpreter cuts bfloat16 off where a GPU rounds.
    step = torch.finfo(x.dtype).eps * (1.01 if y.device.type == "cpu" else 0.505)
    large = right.abs() if bias is None else right.abs() + 4e-3 * bias.cpu().double().abs()
    off = (y.cpu().double() - right).abs()
    assert bool((off <= step * large + 1e-6).all()), float((off / large.clamp_min(1e-9)).max())
    assert int(workspace(x.device)[1].sum()) == 0
    return y


WHOLE, SPLIT = Int8Gemm("int8", 16, 32, 64), Int8Gemm("int8", 32, 16, 128, parts=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gemm", [WHOLE, SPLIT], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_are_the_exact_sums_scaled_in_float32(
    device: str, gemm: Int8Gemm, kind: ScaleKind, rows: int
):
    gemm, weight = replace(gemm, kind=kind), weight_of(77, 640, kind, device)
    x, bias = numbers(device, FP16, rows, 640), numbers(device, FP16, 77)
    check(gemm, x, weight, bias)
    check(gemm, x, weight, None)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_parts_change_no_bit(device: str, kind: ScaleKind):
    weight, x = weight_of(48, 512, kind, device), numbers(device, FP16, 20, 512)
    products = [
        Int8Gemm(kind, *sizes).run(x, weight, None)
        for sizes in ((16, 16, 64), (32, 16, 128, 4), (16, 64, 256, 2))
    ]
    alone = Int8Gemm(kind, 16, 32, 128, 2).run(x[3:4], weight, None)
    assert all(torch.equal(product, products[0]) for product in products)
    assert torch.equal(alone, products[0][3:4])


def test_largest_numbers_of_many_columns_do_not_overflow(device: str):
    """-128 * 127 of each column, less the zero point -128 times the sum of weights of -128."""
    columns = 4096
    weight = weight_of(16, columns, "int8 zeros", device)
    weight.words.fill_(-0x7F7F7F80)
    assert weight.sums is not None
    weight.sums.fill_(-128 * columns)
    x = torch.full((1, columns), 3.0, dtype=FP16, device=device)
    rows = quantize_rows(x, "int8 zeros")
    assert rows.zeros is not None and int(rows.zeros[0]) == -128
    assert int(rows.codes[0].min()) == 127
    y = Int8Gemm("int8 zeros", 16, 16, 128).product(
        replace(rows, scales=rows.scales / 4096), weight, None
    )
    expected = -128.0 * 3 / 4096 * columns * weight.scales[0].double()
    torch.testing.assert_close(y[0].double(), expected, rtol=1e-3, atol=0)


def test_more_tiles_of_rows_than_a_stripe_has_are_all_computed(device: str):
    weight = weight_of(40, 128, "int8", device)
    check(Int8Gemm("int8", 16, 16, 128), numbers(device, FP16, 9 * 16 + 3, 128), weight, None)


def test_tiles_by_tma_are_the_same(device: str):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    weight = weight_of(72, 256, "int8", device)
    check(Int8Gemm("int8", 32, 64, 128, tma=True), numbers(device, FP16, 37, 256), weight, None)


def test_no_rows_are_no_error(device: str):
    weight = weight_of(40, 128, "int8", device)
    none = numbers(device, FP16, 0, 128)
    assert Int8GemmByRows("int8").run(none, weight, None).shape == (0, 40)


def test_sums_of_weights_are_stored_part_by_part():
    weight = quantized("int8 row", 24, 128)
    parameters = PackedParameters(scheme(128, "int8 zeros"), 24, 128)
    for first, last in ((0, 8), (8, 24)):
        parameters.store(first, weight.rows(first, last))
    packed = parameters.weight
    expected = unpack_codes(packed.words, "int8").int().sum(1) - 128 * 128
    assert packed.sums is not None and torch.equal(packed.sums, expected.int())
    parameters.fill_randomly()
    assert torch.equal(packed.sums, packed.words.view(torch.int8).int().sum(1).int())


def test_only_weights_of_w8a8_are_multiplied_by_integers():
    assert activation_kind(scheme(512)) == "int8"
    assert activation_kind(scheme(512, "int8 zeros")) == "int8 zeros"
    assert activation_kind(replace(scheme(512), activation_bits=16)) is None
    assert activation_kind(replace(scheme(512), kind="fp8")) is None
    assert activation_kind(replace(scheme(1 << 17), column_group=1 << 17)) is None, "sums overflow"


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (24576, 4096), (1536, 384)])
@pytest.mark.parametrize("rows", [1, 8, 64, 65, 512, 8192])
def test_candidates_serve_and_split_only_where_tiles_are_few(rows: int, shape: tuple[int, int]):
    candidates = int8_gemms(CPU, "int8", rows, *shape)
    assert candidates and all(gemm.serves(rows, *shape) for gemm in candidates)
    assert candidates[0].parts == 1 or rows * shape[0] < 132 * 128 * 128


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (1160, 640)])
def test_every_candidate_is_exact_and_has_the_same_bits(
    shape: tuple[int, int], dtype: torch.dtype, kind: ScaleKind
):
    weight, bias = weight_of(*shape, kind, "cuda"), numbers("cuda", dtype, shape[0])
    x = numbers("cuda", dtype, 1300, shape[1])
    whole = Int8GemmByRows(kind).run(x, weight, bias)
    for rows in (1, 8, 17, 64, 65, 130, 512, 1300):
        for gemm in int8_gemms(weight.device, kind, rows, *shape):
            assert torch.equal(gemm.run(x[:rows], weight, bias), whole[:rows]), (rows, gemm)
    check(Int8GemmByRows(kind), x[:40], weight, bias)


@pytest.mark.gpu
def test_a_captured_chain_of_products_gives_the_same_bits():
    weight = weight_of(1024, 1024, "int8 zeros", "cuda")
    first, gemm = numbers("cuda", BF16, 48, 1024), Int8Gemm("int8 zeros", 64, 64, 128, parts=4)

    def chain() -> Tensor:
        x = first
        for _ in range(8):
            x = gemm.run(x, weight, None) / 64
        return x

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.skipif(packs_of(CPU, torch.float32) is False, reason="needs a CPU with VNNI")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_onednn_multiplies_the_same_integers(kind: ScaleKind, dtype: torch.dtype):
    weight, plain = weight_of(77, 640, kind, "cpu"), quantized("int8 row", 77, 640)
    bias = numbers("cpu", dtype, 77)
    gemm = OneDnnInt8.of(weight)
    assert gemm.run(numbers("cpu", dtype, 0, 640), weight, bias).shape == (0, 77)
    for rows in (1, 5, 40):
        x = numbers("cpu", dtype, rows, 640)
        codes = rounded_to_integers(x.float(), kind == "int8 zeros")
        right = codes.double() @ plain.dequantize(torch.float32).double().T + bias.double()
        y = gemm.run(x, weight, bias)
        assert y.shape == right.shape and y.dtype == dtype
        limit = 1e-4 if dtype == torch.float32 else 3e-3
        assert (y.double() - right).norm() <= limit * right.norm()
