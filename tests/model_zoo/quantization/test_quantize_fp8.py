"""Unquantized weights become fp8 with a scale for each row."""

from __future__ import annotations

import pytest
import torch

from model_zoo.quantization import quantize
from model_zoo.quantization.quantize import quantize_fp8


def test_a_weight_keeps_all_but_a_sixteenth_of_each_value() -> None:
    """Three bits of mantissa: the error is at most 2^-4 of a value that is not subnormal."""
    torch.manual_seed(0)
    weight = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    found = quantize_fp8(weight.bfloat16())
    exact = weight.bfloat16().double()
    error = (found.dequantize(torch.float32).double() - exact).abs()
    step = exact.abs().amax(1, keepdim=True) / 448 * 2**-9  # of the subnormal values
    assert (error <= exact.abs() / 16 + step).all()


def test_scales_are_bfloat16_numbers_and_no_value_is_cut_off() -> None:
    torch.manual_seed(1)
    weight = torch.randn(500, 64) * torch.logspace(-30, 30, 500)[:, None]
    found = quantize_fp8(weight)
    assert torch.equal(found.scales.bfloat16().float(), found.scales)
    largest = weight.abs().amax(1, keepdim=True) / found.scales
    assert (largest <= 448).all() and (largest >= 448 / (1 + 2**-7)).all()


def test_the_largest_value_of_a_row_is_kept_but_for_the_rounding_of_its_scale() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.5], [0.25, 0.125, 0.0]], dtype=torch.bfloat16)
    found = quantize_fp8(weight).dequantize(torch.float32)
    largest = found[:, [0, 1]][[1, 0], [0, 1]]
    torch.testing.assert_close(largest, torch.tensor([0.25, -3.0]), rtol=2**-7, atol=0)


def test_rows_of_zeros_and_of_the_smallest_numbers_have_no_nan() -> None:
    weight = torch.zeros(3, 8, dtype=torch.bfloat16)
    weight[1, 3] = torch.finfo(torch.bfloat16).smallest_normal / 64
    weight[2, 0] = torch.finfo(torch.bfloat16).max
    found = quantize_fp8(weight)
    assert found.scales.isfinite().all() and (found.scales > 0).all()
    values = found.dequantize(torch.float32)
    assert values.isfinite().all()
    assert not values[0].any()


def test_pieces_of_a_large_weight_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 16, dtype=torch.bfloat16)
    whole = quantize_fp8(weight)
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 5 * 16)
    parts = quantize_fp8(weight)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)
