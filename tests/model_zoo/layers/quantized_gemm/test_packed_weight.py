"""The packed order of quantized weights."""

from __future__ import annotations

import pytest
import torch

from model_zoo.layers.quantized_gemm.packed_weight import (
    block_columns,
    byte_columns,
    pack_codes,
    unpack_codes,
)


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_codes_are_those_that_were_packed(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 3 * block_columns(bits)), dtype=torch.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (5, codes.shape[1] * bits // 32)
    assert torch.equal(unpack_codes(words, bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_threads_four_words_hold_its_columns_of_wgmmas_operand(bits: int) -> None:
    """Thread t reads columns 16 s + 2 t + {0, 1, 8, 9} of step s (PTX ISA, wgmma m64k16)."""
    block, pairs = block_columns(bits), 16 // bits
    for t in range(4):
        for step in range(block // 16):
            for offset in (0, 1, 8, 9):
                codes = torch.zeros(1, block, dtype=torch.uint8)
                codes[0, 16 * step + 2 * t + offset] = 1
                pair = 2 * step + offset // 8
                word, bit = 4 * t + pair // pairs, 16 * (offset % 2) + bits * (pair % pairs)
                words = pack_codes(codes, bits)
                assert words[0, word] == 1 << bit
                assert words.count_nonzero() == 1


def test_bytes_of_a_block_hold_each_column_once() -> None:
    columns = byte_columns(torch.device("cpu"))
    assert sorted(columns.tolist()) == list(range(64))
    codes = torch.randint(0, 256, (3, 64), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes, 8).view(torch.uint8), codes[:, columns])
