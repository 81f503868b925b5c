"""GEMMs by cuBLAS of quantized weights: in fp8, and dequantized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.quantized_gemm import fp8_gemm
from model_zoo.layers.quantized_gemm.fp8_gemm import (
    DequantizeThenCublas,
    ScaledMM,
    release_scratch,
    reserve_scratch,
    scratch,
)
from model_zoo.layers.quantized_gemm.packed_weight import byte_columns, pack
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import ScaleKind
from tests.support.kernels.quantized_cases import KINDS, quantized

BF16, FP16 = torch.bfloat16, torch.float16
WEIGHTS: dict[ScaleKind, str] = {"row": "fp8 row", "block": "fp8 block"}


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def rounded_to_fp8(x: Tensor, kind: ScaleKind) -> Tensor:
    """x [M, K] with the error of quantize_rows, float64."""
    found = quantize_rows(x, kind)
    blocks = found.codes.double().view(len(found.codes), -1, 64)
    codes = torch.empty_like(blocks).index_copy_(2, byte_columns(x.device), blocks)
    groups = found.scales.shape[1]
    wide = codes.view(len(codes), groups, -1) * found.scales.double()[:, :, None]
    return wide.view(len(codes), -1)[: len(x)]


@pytest.mark.parametrize("name", ["int4 g128", "nvfp4"])
def test_layers_share_one_scratch_buffer_of_the_largest(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    weights = [quantized(name, n, 256, device=device, permuted=True) for n in (24, 40)]
    packed = [pack(weight) for weight in weights]
    place, gemm = packed[0].device, DequantizeThenCublas()
    monkeypatch.setattr(fp8_gemm, "_largest", {})
    reserve_scratch(place, FP16, 41 * 256)
    x, bias = numbers(device, FP16, 3, 256), numbers(device, FP16, 40)
    for weight, one in zip(weights, packed, strict=True):
        expected = torch.nn.functional.linear(x, weight.dequantize(FP16), bias[: len(one.words)])
        assert torch.equal(gemm.run(x, one, bias[: len(one.words)]), expected)
        plain = scratch(place, FP16, 41 * 256)[: len(one.words) * 256].view(-1, 256)
        assert torch.equal(plain, weight.dequantize(FP16)), "the last one is in it"


def test_the_scratch_buffer_is_kept_for_a_gemm_that_needs_it_alone():
    place, others = torch.device("cpu"), [None, ScaledMM("row")]
    first = scratch(place, FP16, 64)
    release_scratch([*others, DequantizeThenCublas()])
    assert scratch(place, FP16, 64).data_ptr() == first.data_ptr()
    release_scratch(others)
    assert scratch(place, FP16, 64).data_ptr() != first.data_ptr()


def test_scaled_mm_reports_what_it_multiplies():
    rows, blocks = (pack(quantized(name, 256, 512)) for name in WEIGHTS.values())
    assert ScaledMM("row").multiplies(rows) and not ScaledMM("row").multiplies(blocks)
    assert ScaledMM("block").multiplies(blocks) and not ScaledMM("block").multiplies(rows)
    assert not ScaledMM("row").multiplies(replace(rows, permutation=torch.arange(512)))
    assert not ScaledMM("row").multiplies(pack(quantized("int8 row", 256, 512)))
    assert not ScaledMM("block").multiplies(pack(quantized("fp8 block", 256, 640)))
    assert not ScaledMM("row").serves(1, 40, 512), "cuBLAS takes multiples of 16 outputs"


@pytest.mark.gpu
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_fp8_products_have_the_error_of_quantized_activations_and_little_more(
    kind: ScaleKind, dtype: torch.dtype, fast_accum: bool
):
    gemm = ScaledMM(kind, fast_accum)
    for outputs, inputs in ((272, 512), (6144, 4096), (4096, 12288)):
        weight = quantized(WEIGHTS[kind], outputs, inputs, device="cuda")
        packed, bias = pack(weight), numbers("cuda", dtype, outputs)
        plain = weight.dequantize(torch.float32).double()
        for rows in (1, 3, 4, 16, 17, 64, 129, 1000):
            x = numbers("cuda", dtype, rows, inputs)
            exact = rounded_to_fp8(x, kind) @ plain.T
            for added in (None, bias):
                y = gemm.run(x, packed, added)
                right = exact if added is None else exact + added.double()
                assert y.shape == right.shape and y.dtype == dtype
                limit = 1e-2 if fast_accum else 5e-3
                assert (y.double() - right).norm() <= limit * right.norm(), (rows, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_dequantized_products_are_those_of_the_dequantized_weight(name: str):
    weight = quantized(name, 4096, 4096, device="cuda", scales=BF16)
    gemm = DequantizeThenCublas()
    x = numbers("cuda", BF16, 200, 4096)
    expected = torch.nn.functional.linear(x, weight.dequantize(BF16))
    assert torch.equal(gemm.run(x, pack(weight), None), expected)


@pytest.mark.gpu
def test_a_captured_chain_of_layers_with_one_scratch_buffer_gives_the_same_bits():
    """Each dequantizes only after the product before it has read the buffer."""
    weights = [pack(quantized("int4 g128", 1024, 1024, device="cuda")) for _ in range(2)]
    weights = [weights[0], replace(weights[1], scales=weights[1].scales * -0.5)] * 4
    gemm = DequantizeThenCublas()
    first = numbers("cuda", FP16, 128, 1024) / 64

    def chain() -> Tensor:
        x = first
        for weight in weights:
            x = gemm.run(x, weight, None) / 32
        return x

    expected = chain()  # which allocates the buffer before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(10):
        graph.replay()
        assert torch.equal(out, expected)
