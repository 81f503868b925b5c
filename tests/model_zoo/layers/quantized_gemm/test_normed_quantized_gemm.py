"""Quantized GEMMs that add to the residual, and do their part of norms: interpreted, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import BUCKETS
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.quantization.quantized_weight import BITS
from tests.support.gemm.normed_gemm import check_add, check_norm
from tests.support.kernels.quantized_cases import interpreted_skinny_gemm, quantized

BF16 = torch.bfloat16
# By mma.sync, wgmma, warps with columns of their own, two warpgroups, and stacked column runs.
SIZES = [
    SkinnyQuantizedGemm(64, 256, 2, 4, x_stages=2, sync=True),
    SkinnyQuantizedGemm(64, 256, 2, 1, split_units=4, x_stages=2),
    SkinnyQuantizedGemm(32, 1024, 2, 3, x_stages=1, sync=True, apart=True),
    SkinnyQuantizedGemm(128, 256, 2, 3, x_stages=1),
    SkinnyQuantizedGemm(16, 1024, 2, 5, x_stages=1),
    SkinnyQuantizedGemm(32, 512, 2, 3, split_units=2, x_stages=1, sync=True),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_skinny_gemm():
        yield


def check(gemm: SkinnyQuantizedGemm, rows: int, packed: PackedWeight, exact: Tensor) -> None:
    assert gemm.norms(rows) and gemm.serves(rows, *packed.shape, packed)
    check_add(gemm, rows, packed)
    check_add(gemm, rows, packed, plus_one=True)
    check_norm(gemm, rows, packed, exact)


def weight_of(
    name: str, outputs: int, inputs: int, device: str = "cpu", *, permuted: bool = False
) -> tuple[PackedWeight, Tensor]:
    """-> (the weight as GEMMs take it, its numbers in float32)."""
    weight = quantized(name, outputs, inputs, device=device, scales=BF16, permuted=permuted)
    return pack(weight), weight.dequantize(torch.float32)


NAMES = ["int4 g128", "fp8 row", "fp8 block", "nvfp4"]
# All sizes and all kinds of weights with several rows, which one kernel computes with a single one;
# with a single one each size and each kind, but few of their pairs.
CASES = [
    pytest.param(rows, name, gemm, marks=pytest.mark.slow if rows == 1 and (i + j) % 4 != 1 else ())
    for rows in (1, 5)
    for i, name in enumerate(NAMES)
    for j, gemm in enumerate(SIZES)
]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("rows", "name", "gemm"), CASES, ids=str)
def test_sums_and_norms_are_right(rows: int, name: str, gemm: SkinnyQuantizedGemm):
    packed, exact = weight_of(name, 144, 1024)
    if not gemm.serves(rows, 144, 1024, packed):
        pytest.skip("of other weights")
    check(gemm, rows, packed, exact)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [13, 17, 32])
def test_more_rows_are_right(rows: int):
    gemm = SkinnyQuantizedGemm(64, 256, 2, 3, x_stages=1)
    check(gemm, rows, *weight_of("int4 g128", 200, 768))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["int4 g128", "fp8 row"])
def test_columns_past_the_end_count_for_nothing(name: str):
    check(SkinnyQuantizedGemm(64, 512, 2, 3, x_stages=1), 3, *weight_of(name, 144, 1152))


@pytest.mark.usefixtures("on_cpu")
def test_norms_of_permuted_columns_are_right():
    check(SIZES[0], 3, *weight_of("int4 g128", 144, 1024, permuted=True))


def test_norms_are_of_no_more_rows_than_a_kernel_has():
    assert SIZES[0].norms(32) and not SIZES[0].norms(33)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 g128", "int4 g32 zeros", "fp8 row", "fp8 block", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 17, 32])
def test_every_candidate_adds_and_normalizes(name: str, rows: int):
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    for outputs, inputs in ((4096, 12288), (1008, 1152)):
        packed, exact = weight_of(name, outputs, inputs, "cuda")
        bits = BITS[packed.kind]
        for gemm in skinny_candidates(132, bucket, outputs, inputs, bits):
            if gemm.serves(rows, outputs, inputs, packed):
                check(gemm, rows, packed, exact)
