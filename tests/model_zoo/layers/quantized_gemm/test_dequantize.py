"""Dequantizing kernels against QuantizedWeight.dequantize, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import pack
from tests.support.kernels.quantized_cases import KINDS, quantized

BF16, FP16 = torch.bfloat16, torch.float16
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("permuted", [False, True])
def test_a_weight_has_the_bits_of_its_definition(
    device: str, dtype: torch.dtype, name: str, permuted: bool
):
    weight = quantized(name, 133, 640, device=device, permuted=permuted)
    out = torch.full((133, 640), torch.nan, dtype=dtype, device=device)
    dequantize_into(pack(weight), out)
    assert torch.equal(out, weight.dequantize(dtype))


@pytest.mark.parametrize("scales", [BF16, torch.float32])
def test_scales_may_have_another_type_than_the_weight(device: str, scales: torch.dtype):
    weight = quantized("int4 g32 zeros", 20, 128, device=device, scales=scales)
    out = torch.empty(20, 128, dtype=FP16, device=device)
    dequantize_into(pack(weight), out)
    assert torch.equal(out, weight.dequantize(FP16))


def test_groups_need_not_be_a_power_of_two(device: str):
    weight = quantized("int8 row", 20, 192, device=device)
    scales = weight.scales[:, :1] * torch.tensor([1.0, 0.5], device=device).half()
    weight = replace(weight, scales=scales, column_group=96)
    out = torch.empty(20, 192, dtype=FP16, device=device)
    dequantize_into(pack(weight), out)
    assert torch.equal(out, weight.dequantize(FP16))


def test_fp4_scales_of_an_unknown_kind_are_refused():
    weight = pack(replace(quantized("mxfp4", 8, 128), column_group=64))
    with pytest.raises(ValueError, match="groups of 64 columns have unknown scales"):
        dequantize_into(weight, torch.empty(8, 128, dtype=FP16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_large_weight_has_the_bits_of_its_definition(name: str):
    weight = quantized(name, 6144, 4096, device="cuda", scales=BF16)
    out = torch.empty(6144, 4096, dtype=BF16, device="cuda")
    dequantize_into(pack(weight), out)
    assert torch.equal(out, weight.dequantize(BF16))
