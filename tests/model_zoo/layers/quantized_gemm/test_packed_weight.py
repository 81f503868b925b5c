"""The packed order of quantized weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_zoo.layers.quantized_gemm.packed_weight import (
    E5M3_BIAS,
    block_columns,
    byte_columns,
    pack,
    pack_codes,
    unpack_codes,
)
from model_zoo.quantization.quantized_weight import BITS, CodeKind
from tests.support.kernels.quantized_cases import quantized


@pytest.mark.parametrize("kind", ["int4", "int8", "fp4", "fp8"])
def test_unpacked_codes_are_those_that_were_packed(kind: CodeKind) -> None:
    bits = BITS[kind]
    codes = torch.randint(0, 1 << bits, (5, 3 * block_columns(bits)), dtype=torch.uint8)
    words = pack_codes(codes, kind)
    assert words.shape == (5, codes.shape[1] * bits // 32)
    assert torch.equal(unpack_codes(words, kind), codes)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_threads_four_words_hold_its_columns_of_wgmmas_operand(kind: CodeKind) -> None:
    """Thread t reads columns 16 s + 2 t + {0, 1, 8, 9} of step s (PTX ISA, wgmma m64k16)."""
    bits = BITS[kind]
    block, pairs = block_columns(bits), 16 // bits
    zeros = pack_codes(torch.zeros(1, block, dtype=torch.uint8), kind)  # int8's are not 0
    for t in range(4):
        for step in range(block // 16):
            for offset in (0, 1, 8, 9):
                codes = torch.zeros(1, block, dtype=torch.uint8)
                codes[0, 16 * step + 2 * t + offset] = 1
                pair = 2 * step + offset // 8
                word, bit = 4 * t + pair // pairs, 16 * (offset % 2) + bits * (pair % pairs)
                words = pack_codes(codes, kind) ^ zeros
                assert words[0, word] == 1 << bit
                assert words.count_nonzero() == 1


def test_fp4_codes_are_in_the_words_that_int4_codes_would_be_in() -> None:
    for column in range(128):
        codes = torch.zeros(1, 128, dtype=torch.uint8)
        codes[0, column] = 15
        places = [pack_codes(codes, kind)[0].nonzero().flatten() for kind in ("int4", "fp4")]
        assert len(places[0]) == 1 and torch.equal(*places)


def test_scales_of_a_row_and_128_columns_lie_together() -> None:
    weight = quantized("int4 g32 zeros", 7, 384)
    packed = pack(weight)
    assert packed.zeros is not None and weight.zeros is not None
    assert packed.scales.shape == packed.zeros.shape == (3, 7, 4)
    for n, group in ((0, 0), (6, 11), (3, 5)):
        assert packed.scales[group // 4, n, group % 4] == weight.scales[n, group]
        assert packed.zeros[group // 4, n, group % 4] == weight.zeros[n, group]
    for name in ("int4 g128", "int8 row"):
        weight = quantized(name, 7, 384)
        assert torch.equal(pack(weight).scales, weight.scales.t())


def test_scales_of_16_columns_have_the_same_value_with_a_larger_exponent() -> None:
    """Every e4m3 number that is neither negative nor NaN."""
    weight = replace(
        quantized("nvfp4", 1, 16 * 128),
        scales=torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(2)[None, :128],
    )
    codes = pack(weight).scales.flatten().int()
    values = (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - E5M3_BIAS)
    values[codes == 0] = 0
    assert torch.equal(values, weight.scales.float().flatten())


def test_codes_whose_scale_is_zero_become_zero() -> None:
    weight = quantized("nvfp4", 3, 128)
    scales = weight.scales.float()
    scales[1, 2] = 0
    weight = replace(weight, scales=scales.to(torch.float8_e4m3fn))
    codes = unpack_codes(pack(weight).words, "fp4")
    assert not codes[1, 32:48].any()
    codes[1, 32:48] = weight.codes[1, 32:48]
    assert torch.equal(codes, weight.codes)


@pytest.mark.parametrize("scale", [-1.0, float("nan")])
def test_negative_scales_of_16_columns_are_refused(scale: float) -> None:
    weight = quantized("nvfp4", 3, 128)
    scales = weight.scales.float()
    scales[1, 2] = scale
    with pytest.raises(ValueError, match="negative or not a number"):
        pack(replace(weight, scales=scales.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("code", [148, 255])
def test_scales_of_32_columns_beyond_the_kernels_range_are_refused(code: int) -> None:
    weight = quantized("mxfp4", 3, 128)
    codes = weight.scales.view(torch.uint8).clone()
    codes[1, 2] = 147
    pack(replace(weight, scales=codes.view(torch.float8_e8m0fnu)))
    codes[1, 2] = code
    with pytest.raises(ValueError, match="above 2"):
        pack(replace(weight, scales=codes.view(torch.float8_e8m0fnu)))


def test_bytes_of_a_block_hold_each_column_once() -> None:
    columns = byte_columns(torch.device("cpu"))
    assert sorted(columns.tolist()) == list(range(64))
    codes = torch.randint(0, 256, (3, 64), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes, "fp8").view(torch.uint8), codes[:, columns])


def test_bytes_of_int8_are_the_numbers_that_tensor_cores_take():
    values = torch.randint(-128, 128, (3, 128), dtype=torch.int8)
    words = pack_codes((values.int() + 128).to(torch.uint8), "int8")
    blocks = values.view(3, -1, 64)[:, :, byte_columns(words.device)]
    assert torch.equal(words.view(torch.int8), blocks.view(3, -1))
