"""Products that are written where the caller says, as parts of a sum over ranks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.batch_invariant_kernel import BatchInvariantGemm
from model_zoo.layers.gemm.candidates import candidates
from model_zoo.layers.gemm.implementations import CublasGemm, LinearGemm, SplitK
from model_zoo.layers.linear import Linear
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import ExpertTiles, ProductTile
from model_zoo.layers.quantized_gemm.candidates import quantized_candidates
from model_zoo.layers.quantized_gemm.dequant_gemm import (
    DequantizeInRegisters,
    DequantizeInRegistersUnsplit,
)
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizeThenCublas
from model_zoo.layers.quantized_gemm.int8.cpu import OneDnnInt8
from model_zoo.layers.quantized_gemm.int8.gemm import Int8Gemm, Int8GemmByRows
from model_zoo.layers.quantized_gemm.packed_parameters import PackedParameters
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.quantization.weight_scheme import WeightScheme
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401
from tests.support.kernels.expert_cases import make_experts, routing, scheme_of
from tests.support.kernels.quantized_cases import quantized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTPUTS, INPUTS = 48, 256
TILES = ExpertTiles.of(16, ProductTile(16, 64), ProductTile(32, 64))
UNTOUCHED = 7.0


def check(run: Callable[[Tensor | None], Tensor]) -> None:
    """The product is the same, there and nowhere else."""
    expected = run(None)
    rows, outputs = expected.shape
    memory = torch.full(
        (rows + 2, outputs), UNTOUCHED, dtype=expected.dtype, device=expected.device
    )
    place = memory[1:-1]
    found = run(place)
    assert found.data_ptr() == place.data_ptr() and found.shape == place.shape
    if place.device.type == "cpu":
        assert torch.equal(place, expected)
    # cuBLAS may choose by an address.
    torch.testing.assert_close(place, expected, rtol=2**-6, atol=0.1)
    assert (memory[0] == UNTOUCHED).all() and (memory[-1] == UNTOUCHED).all()


def check_gemm(gemm: LinearGemm, x: Tensor, weight: Tensor | PackedWeight) -> None:
    for bias in (None, torch.randn(weight.shape[0], device=x.device).to(x.dtype)):
        check(lambda out, bias=bias: gemm.run(x, weight, bias, out))


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def packed(name: str, scheme: WeightScheme, device: str) -> PackedWeight:
    parameters = PackedParameters(scheme, OUTPUTS, INPUTS).to(device)
    parameters.store(0, quantized(name, OUTPUTS, INPUTS, device=device))
    return parameters.weight


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("gemm", "dtype"),
    [
        (CublasGemm(), FP32),
        (CublasGemm(rows=8), FP32),
        (SplitK(32, 64, 2), FP16),
        (BatchInvariantGemm(4), FP16),
    ],
    ids=str,
)
def test_gemms_of_plain_weights(device: str, gemm: LinearGemm, dtype: torch.dtype, rows: int):
    check_gemm(gemm, numbers(device, dtype, rows, INPUTS), numbers(device, dtype, OUTPUTS, INPUTS))


@pytest.mark.parametrize(
    "gemm",
    [
        DequantizeInRegisters(16, 32, 128),
        DequantizeInRegisters(16, 32, 128, parts=2),
        DequantizeInRegistersUnsplit(),
        DequantizeThenCublas(),
    ],
    ids=str,
)
def test_gemms_of_quantized_weights(device: str, gemm: LinearGemm):
    name = "int4 g32 zeros"
    scheme = scheme_of(name)(None, INPUTS)
    assert scheme is not None
    check_gemm(gemm, numbers(device, FP16, 5, INPUTS), packed(name, scheme, device))


@pytest.mark.parametrize(
    "gemm", [Int8Gemm("int8", 16, 32, 128, parts=2), Int8GemmByRows("int8")], ids=str
)
def test_gemms_of_int8_activations(device: str, gemm: Int8Gemm | Int8GemmByRows):
    check_gemm(gemm, numbers(device, FP16, 5, INPUTS), packed("int8 row", W8A8, device))


W8A8 = WeightScheme(
    kind="int8", row_group=1, column_group=INPUTS, scale_dtype=FP16, activation_bits=8
)


def test_the_packed_products_of_a_cpu_are_copied_there():
    linear = Linear(INPUTS, OUTPUTS, bias=True, dtype=FP32)
    assert linear.bias is not None
    for parameter in (linear.weight, linear.bias):
        parameter.copy_(numbers("cpu", FP32, *parameter.shape))
    x = numbers("cpu", FP32, 19, INPUTS)
    check(lambda out: linear.product(x, out))
    linear.prepare()
    check(lambda out: linear.product(x, out))
    weight = packed("int8 row", W8A8, "cpu")
    check_gemm(OneDnnInt8.of(weight), x, weight)


def experts_of(device: str, dtype: torch.dtype, own: tuple[int, int] | None) -> Experts:
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 128, "inner": 64}
    return make_experts(**sizes, dtype=dtype, device=device, own=own)


@pytest.mark.parametrize("own", [None, (0, 2)])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_sums_of_experts(device: str, tokens: int, own: tuple[int, int] | None):
    experts = experts_of(device, FP16, own)
    x, shared = numbers(device, FP16, 2, tokens, 128)
    ids, weights = routing("balanced", tokens, experts)
    for other in (None, shared):
        check(
            lambda out, other=other: run_experts(
                experts, x, ids, weights, other, None, TILES, out=out
            )
        )


def test_sums_of_experts_without_kernels():
    experts = experts_of("cpu", FP32, None)
    ids, weights = routing("balanced", 5, experts)
    x = numbers("cpu", FP32, 5, 128)
    check(lambda out: experts(x, ids, weights, out=out))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("name", [None, "int4 g128", "nvfp4", "fp8 row", "fp8 block", "int8 row"])
def test_all_that_is_tried_on_this_gpu(name: str | None, rows: int):
    """Where the product's rows are not those of the codes of x, it is copied."""
    cuda, outputs, inputs = torch.device("cuda", 0), 1024, 2048
    x = numbers("cuda", BF16, rows, inputs)
    if name is None:
        plain = numbers("cuda", BF16, outputs, inputs)
        for gemm in candidates(cuda, min(rows, 64), outputs, inputs):
            check_gemm(gemm, x[:64], plain)
        return
    scheme = scheme_of(name, BF16)(None, inputs)
    assert scheme is not None
    eight = name in ("fp8 row", "fp8 block", "int8 row")
    scheme = replace(scheme, activation_bits=8 if eight else 16)
    parameters = PackedParameters(scheme, outputs, inputs).to(cuda)
    parameters.store(0, quantized(name, outputs, inputs, device="cuda", scales=BF16))
    weight = parameters.weight
    bucket = next(size for size in (1, 8, 16, 64, 128) if rows <= size)
    for gemm in quantized_candidates(cuda, BF16, bucket, outputs, inputs, scheme):
        check_gemm(gemm, x, weight)
