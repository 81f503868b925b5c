"""The order of codes in the words and bytes of each format: golden values and random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.quantization.config import StoredFormat
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.registry import read
from model_zoo.quantization.readers.unpacking import unpack_nibbles, unpack_words
from tests.support.examples import examples
from tests.support.quantization import stored_linears as stored
from tests.support.quantization.stored_files import NAME, assert_reads

GPTQ = StoredFormat(name="gptq", bits=4, strategy="channel")
AWQ = StoredFormat(name="awq", bits=4, strategy="channel", symmetric=False)


def int32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def gptq(word: int) -> QuantizedWeight:
    """A weight [1, 8] of one word."""
    tensors = {
        "qweight": torch.tensor([[int32(word)]], dtype=torch.int32),
        "scales": torch.ones(1, 1),
    }
    return read(tensors, GPTQ, (1, 8), NAME)


def test_gptq_counts_rows_from_the_lowest_bits() -> None:
    assert gptq(0xFEDCBA98).codes.tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]


def test_awq_takes_columns_in_the_order_0_4_1_5_2_6_3_7() -> None:
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.tensor([[int32(0xFEDCBA98)]], dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    weight = read(tensors, AWQ, (8, 1), NAME)
    assert weight.codes.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert weight.zeros is not None
    assert weight.zeros.flatten().tolist() == [8, 12, 9, 13, 10, 14, 11, 15]


def test_fp4_has_the_even_column_at_the_low_bits() -> None:
    assert unpack_nibbles(torch.tensor([0x21, 0xF3], dtype=torch.uint8)).tolist() == [1, 2, 3, 15]


def test_an_mxfp4_byte_of_127_is_a_scale_of_one() -> None:
    tensors = {
        "weight_packed": torch.tensor([[0x72] + [0] * 15], dtype=torch.uint8),
        "weight_scale": torch.tensor([[127]], dtype=torch.uint8),
    }
    scheme = StoredFormat(name="mxfp4-pack-quantized", bits=4, strategy="group", group=32)
    weight = read(tensors, scheme, (1, 32), NAME).dequantize(torch.float32)
    assert weight[0, :3].tolist() == [1.0, 6.0, 0.0]


@pytest.mark.parametrize(("offset", "zero"), [(1, 8), (0, 7)])
def test_version_1_of_gptq_stores_one_less_than_the_zero_point(offset: int, zero: int) -> None:
    scheme = StoredFormat(
        name="gptq", bits=4, strategy="channel", symmetric=False, zero_offset=offset
    )
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[0x77777777]], dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    assert read(tensors, scheme, (8, 8), NAME).dequantize(torch.float32).unique() == -zero


def test_a_zero_point_of_0_wraps_around_in_version_1_of_gptq() -> None:
    scheme = StoredFormat(name="gptq", bits=4, strategy="channel", symmetric=False, zero_offset=1)
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[-1]], dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    assert not read(tensors, scheme, (8, 8), NAME).dequantize(torch.float32).any()


def test_symmetric_gptq_ignores_the_zero_points_of_the_file(tmp_path: Path) -> None:
    linear = stored.gptq(np.random.default_rng(0), 16, 64)
    linear.tensors["qzeros"].fill_(0x12345678)
    assert_reads(tmp_path, linear)


def test_g_idx_of_zeros_without_act_order_means_groups_in_order(tmp_path: Path) -> None:
    linear = stored.gptq(np.random.default_rng(0), 16, 64)
    linear.tensors["g_idx"].zero_()
    assert assert_reads(tmp_path, linear).permutation is None


def test_act_order_keeps_the_order_within_a_group(tmp_path: Path) -> None:
    weight = assert_reads(tmp_path, stored.gptq(np.random.default_rng(0), 16, 64, act_order=True))
    assert weight.permutation is not None
    for group in weight.permutation.view(2, 32):
        assert torch.equal(group, group.sort().values)


def test_a_tensors_scale_becomes_one_for_each_row(tmp_path: Path) -> None:
    linear = stored.fp8(np.random.default_rng(0), 24, 64, strategy="tensor", scale_shape=())
    weight = assert_reads(tmp_path, linear)
    assert weight.scales.shape == (24, 1)
    assert weight.scales.unique().numel() == 1


def test_scales_of_int8_keep_the_dtype_of_the_file(tmp_path: Path) -> None:
    weight = assert_reads(tmp_path, stored.int_quantized(np.random.default_rng(0), 24, 64))
    assert weight.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("writer", ["modelopt", "compressed-tensors"])
def test_the_second_scale_of_nvfp4_is_one_for_each_row(tmp_path: Path, writer: str) -> None:
    linear = stored.nvfp4(np.random.default_rng(0), 24, 64, writer=writer)
    weight = assert_reads(tmp_path, linear)
    assert weight.row_scales is not None and weight.row_scales.shape == (24,)
    assert weight.scales.dtype == torch.float8_e4m3fn, "the scales keep the dtype of the file"


@examples(100)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 5),
    words=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_words_hold_the_codes_that_were_packed(bits: int, rows: int, words: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, words * 32 // bits))
    packed = torch.from_numpy(stored.pack(codes, bits))
    assert unpack_words(packed, bits).tolist() == codes.tolist()


@examples(40)
@given(
    kind=st.sampled_from(["awq", "gptq", "pack-quantized"]),
    rows=st.integers(1, 6).map(lambda count: 8 * count),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    symmetric=st.booleans(),
    bits=st.sampled_from([4, 8]),
)
def test_any_shape_of_integers_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str, rows: int, groups: int, seed: int, symmetric: bool, bits: int,
) -> None:  # fmt: skip
    random = np.random.default_rng(seed)
    options = {"symmetric": symmetric} if kind == "awq" else {"symmetric": symmetric, "bits": bits}
    make = {"awq": stored.awq, "gptq": stored.gptq, "pack-quantized": stored.pack_quantized}[kind]
    linear = make(random, rows, 32 * groups, **options)
    assert_reads(tmp_path_factory.mktemp("linear"), linear)
