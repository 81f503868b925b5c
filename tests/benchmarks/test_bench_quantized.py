"""The benchmark of quantized GEMMs of few rows: its weights, its subjects and its table."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.gemm.bench_quantized import (
    GEMMS,
    KINDS,
    Timed,
    compile_all,
    gemms_of,
    random_weight,
    summary,
)
from model_zoo.layers.gemm.implementations import CublasGemm
from model_zoo.layers.quantized_gemm.dequant_gemm import DequantizeInRegisters
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm


def dequantized(weight: PackedWeight) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=torch.float16, device=weight.device)
    dequantize_into(weight, out)
    return out


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_numbers_of_the_size_of_a_models(device: str, name: str):
    weight = random_weight(name, 32, 512, device)
    plain = dequantized(weight).float()
    assert weight.shape == (32, 512) and plain.unique().numel() > 10
    assert 1e-4 < plain.std().item() < 1


def test_the_table_has_the_fastest_of_each_gemm():
    found = [
        Timed("nvfp4", "qkv", 8, SkinnyQuantizedGemm.name, "a", 9.0, 0.5),
        Timed("nvfp4", "qkv", 8, SkinnyQuantizedGemm.name, "b", 7.5, 0.61),
        Timed("nvfp4", "qkv", 8, DequantizeInRegisters.name, "c", 12.25, 0.3),
        Timed("bf16", "qkv", 8, CublasGemm.name, "", 20.0, 0.9),
    ]
    head, line = summary(found).splitlines()
    assert re.split("  +", head.strip()) == GEMMS
    values = ["nvfp4", "qkv", "8", "7.5", "(61%)", "12.2", "(30%)", "20.0", "(90%)"]
    assert line.split() == values


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_every_subject_computes_the_product_of_its_weight(name: str):
    weight = random_weight(name, 256, 512)
    compile_all({"a layer": (256, 512)}, [name], (8, 128))
    for rows in (8, 128):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        expected = x.float() @ dequantized(weight).float().T
        names: set[str] = set()
        for gemm in gemms_of(x.device, name, (256, 512), rows):
            names.add(gemm.name)
            found = gemm.run(x, weight, None).float()
            assert (found - expected).norm() < 0.05 * expected.norm(), gemm
        assert names >= {SkinnyQuantizedGemm.name, DequantizeInRegisters.name}
