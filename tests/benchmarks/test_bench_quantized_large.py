"""The benchmark of quantized GEMMs: its weights, and that its subjects compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gemm.bench_quantized_large import FORMATS, random_weight, subjects_of
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight

OUTPUTS, INPUTS = 32, 512


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    dequantize_into(weight, out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_normal_numbers_of_the_size_of_a_models(device: str, name: str):
    weight = random_weight(name, OUTPUTS, INPUTS, device)
    plain = dequantized(weight, torch.float16).float() * INPUTS**0.5
    assert weight.shape == (OUTPUTS, INPUTS)
    assert abs(plain.std().item() - 1) < 0.05 and abs(plain.mean().item()) < 0.05
    assert plain.unique().numel() > 10


@pytest.mark.gpu
def test_every_subject_computes_the_same_product_of_its_weights():
    weights = {name: [random_weight(name, 256, INPUTS, "cuda")] for name in FORMATS}
    x = torch.randn(64, INPUTS, device="cuda").bfloat16()
    plain = [torch.randn(256, INPUTS, device="cuda").bfloat16()]
    subjects = subjects_of(plain, weights, x)
    for title, (call, several) in subjects.items():
        format = next(
            (name for name in FORMATS if title.split()[-1] == name.split()[0]),
            "fp8 row" if title.startswith("row") else "fp8 block",
        )
        weight = plain[0] if title == "cublas" else dequantized(weights[format][0], x.dtype)
        expected = x.float() @ weight.float().T
        found = call(0)
        assert isinstance(found, torch.Tensor) and several == 1
        assert (found.float() - expected).norm() < 0.05 * expected.norm(), title
