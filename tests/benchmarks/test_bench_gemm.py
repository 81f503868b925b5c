"""The GEMM benchmark: its step computes what it says, and it chooses as the server does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gemm.bench_gemm import cublas, fastest
from benchmarks.gemm.bench_many_rows import calls_of, of_layer
from benchmarks.gemm.bench_sending import check, operands, subjects
from benchmarks.gemm.gemm_chain import MODELS, Chain, ModelSizes, random_weights
from model_zoo.layers.gemm.implementations import CublasGemm, SplitK

SIZES = ModelSizes(layers=2, hidden=32, qkv=48, mixed=32, inner=40, vocab=56)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_steps_small_kernels_and_gemms_are_those_of_a_model(device: str):
    weights = random_weights(SIZES, torch.float32, device)
    chain = Chain(SIZES, weights, rows=3)
    residual = torch.zeros_like(chain.first)
    delta = chain.first
    for layer in range(SIZES.layers):
        residual = residual + delta
        mixed = F.linear(norm(residual), weights["qkv"][layer])[:, : SIZES.mixed]
        residual = residual + F.linear(mixed, weights["o"][layer])
        gate, up = F.linear(norm(residual), weights["gate_up"][layer]).chunk(2, -1)
        delta = F.linear(F.silu(gate) * up, weights["down"][layer])
    expected = F.linear(norm(residual + delta), weights["lm_head"][0])
    torch.testing.assert_close(chain.run(cublas), expected, rtol=1e-3, atol=1e-3)


def test_the_bytes_of_a_step_are_those_of_all_weights():
    weights = random_weights(SIZES, torch.bfloat16, "cpu")
    assert SIZES.nbytes() == sum(weight.nbytes for layers in weights.values() for weight in layers)
    assert round(MODELS["qwen3-8b"].nbytes() / 1e9, 2) == 15.14


def test_the_fastest_way_is_cublas_unless_another_is_clearly_faster():
    other = SplitK(64, 128, 2)
    assert fastest({CublasGemm(): 10.0, other: 9.9}) == CublasGemm()
    assert fastest({CublasGemm(): 10.0, other: 9.7}) == other


def test_a_layer_takes_the_faster_of_both_swiglu_gemms():
    times = {"qkv": 1.0, "o": 2.0, "gate_up": 50.0, "unfused": 7.0, "swiglu": 6.0, "down": 4.0}
    assert of_layer(times, MODELS["qwen3-8b"]) == 13.0
    assert of_layer(times | {"swiglu": 9.0}, MODELS["qwen3-8b"]) == 14.0


def test_what_is_timed_of_many_rows_computes_what_a_layer_does():
    names = {name: [torch.randn(shape)] for name, shape in SIZES.shapes().items()}
    calls = calls_of(names, rows=5)
    for name, (weight,) in names.items():
        call, several, operations = calls[name]
        assert call(0).shape == (5, len(weight)) and several == 1
        assert operations == 2 * 5 * weight.numel()


@pytest.mark.gpu
def test_what_is_sent_is_what_cublas_computes():
    device = torch.device("cuda")
    check(operands(512, 4096, 2048, device, device), subjects([32]))
