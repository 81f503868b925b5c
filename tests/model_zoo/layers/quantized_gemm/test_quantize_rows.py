"""Activations as fp8 and int8: codes and scales, and the fused forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_zoo.layers.kernels.add_rms_norm import add_rms_norm, norm_of_sum
from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from model_zoo.layers.quantized_gemm import quantize_rows as module
from model_zoo.layers.quantized_gemm.packed_weight import byte_columns
from model_zoo.layers.quantized_gemm.quantize_rows import (
    add_rms_norm_quantize,
    quantize_rows,
    silu_mul_quantize,
)
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind

BF16, FP16 = torch.bfloat16, torch.float16
# The interpreter cuts bfloat16 off where a GPU rounds.
KINDS: tuple[ScaleKind, ...] = ("row", "block", "int8", "int8 zeros")
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16]


def rows_of(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Rows of very different size, one of them zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.arange(-2, shape[0] - 2)[:, None]
    x[-1] = 0
    return x.to(dtype).to(device)


def in_order_of_columns(codes: Tensor) -> Tensor:
    """The bits of codes [rows, K]."""
    columns = byte_columns(codes.device)
    blocks = codes.view(torch.uint8).view(len(codes), -1, 64)
    return torch.empty_like(blocks).index_copy_(2, columns, blocks).view(len(codes), -1)


def check(found: QuantizedRows, x: Tensor, kind: ScaleKind) -> None:
    """Against the definition in float32."""
    count, columns = x.shape
    assert found.count == count and found.kind == kind and found.dtype == x.dtype
    if kind in ("int8", "int8 zeros"):
        check_integers(found, x)
        return
    grouped = x.float().view(count, -1, 128 if kind == "block" else columns)
    scales = grouped.abs().amax(2).clamp(min=1e-10) / 448
    torch.testing.assert_close(found.scales[:count], scales, rtol=1e-6, atol=0)
    expected = (grouped / scales[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    bits = expected.view(torch.uint8).view(count, columns).int()
    codes = in_order_of_columns(found.codes)[:count].int()
    if x.device.type == "cpu":  # the interpreter loses a carry from the mantissa to the exponent
        carried = (bits & 7) == 0
        bits, codes = bits[~carried], codes[~carried]
        assert len(bits) > 0.8 * carried.numel() * (x != 0).any(1).float().mean()
    assert (bits - codes).abs().max() <= 1
    # The kernel multiplies by the inverse of the scale: numbers between two codes may differ.
    assert (bits == codes).float().mean() > 0.99
    assert not in_order_of_columns(found.codes)[count:].any()


def check_integers(found: QuantizedRows, x: Tensor) -> None:
    count, wide = len(x), x.float()
    least = torch.zeros(count, device=x.device)
    if found.zeros is None:
        scales = wide.abs().amax(1).clamp(min=1e-10) / 127
    else:
        least = wide.amin(1).clamp(max=0)
        scales = (wide.amax(1).clamp(min=0) - least).clamp(min=1e-10) / 255
    torch.testing.assert_close(found.scales[:count, 0], scales, rtol=1e-6, atol=0)
    zeros = least
    if found.zeros is not None:
        assert found.zeros.dtype == torch.int32 and found.scales.shape == (len(found.codes), 1)
        zeros = (-128 - least / scales).round()
        assert (found.zeros[:count] - zeros).abs().max() <= 1
        zeros = found.zeros[:count].float()
    expected = (wide / scales[:, None]).round() + zeros[:, None]
    codes = in_order_of_columns(found.codes).view(torch.int8)[:count]
    off = (codes - expected.clamp(-128, 127)).abs()
    assert off.max() <= 1 and (off == 0).float().mean() > 0.99
    back = (codes - zeros[:, None]) * scales[:, None]
    assert ((back - wide).abs() <= 0.51 * scales[:, None]).all(), "within half a step"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 256), (5, 384), (6, 1536)])
def test_codes_are_those_of_the_definition(
    device: str, dtype: torch.dtype, kind: ScaleKind, shape: tuple[int, int]
):
    x = rows_of(device, dtype, shape[0] + 1, shape[1])[: shape[0]]
    check(quantize_rows(x, kind), x, kind)


def test_scales_lie_as_scaled_mm_takes_them(device: str):
    x = rows_of(device, FP16, 5, 512)
    rows, blocks = quantize_rows(x, "row"), quantize_rows(x, "block")
    assert rows.codes.shape == (16, 512) and blocks.codes.shape == (8, 512)
    assert rows.scales.shape == (16, 1) and rows.scales.is_contiguous()
    assert blocks.scales.shape == (8, 4) and blocks.scales.stride() == (1, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_lie_apart_and_zeros_stay_zeros(device: str, kind: ScaleKind):
    wide = rows_of(device, FP16, 4, 512)
    found = quantize_rows(wide[:, :256], kind)
    check(found, wide[:, :256], kind)
    codes, zero = found.codes[3], 0 if found.zeros is None else found.zeros[3]
    assert bool((codes.float() == zero).all()) and found.scales.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_norm_has_the_codes_of_a_separate_one(
    device: str, dtype: torch.dtype, kind: ScaleKind
):
    x, residual = rows_of(device, dtype, 5, 384), rows_of(device, dtype, 5, 384).flip(0)
    weight = rows_of(device, dtype, 3, 384)[0] * 20 + 1
    separate, fused = (x.clone(), residual.clone()), residual.clone()
    add_rms_norm(*separate, weight, 1e-6)
    expected = quantize_rows(separate[0], kind)
    found = add_rms_norm_quantize(x, fused, weight, 1e-6, kind)
    assert torch.equal(fused, separate[1])
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    again = add_rms_norm_quantize(None, fused, weight, 1e-6, kind)
    alone = quantize_rows(norm_of_sum(fused, weight, 1e-6), kind)
    assert torch.equal(again.codes.view(torch.uint8), alone.codes.view(torch.uint8))


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_norm_has_gemmas_options(device: str, dtype: torch.dtype, plus_one: bool):
    x, residual = rows_of(device, dtype, 5, 384), rows_of(device, dtype, 5, 384).flip(0)
    weight, post_weight = (rows_of(device, dtype, 3, 384 + 64 * i)[0, :384] * 20 for i in range(2))
    separate, fused = (x.clone(), residual.clone()), residual.clone()
    options = {"post_weight": post_weight, "plus_one": plus_one}
    add_rms_norm(*separate, weight, 1e-6, **options)
    expected = quantize_rows(separate[0], "row")
    found = add_rms_norm_quantize(x, fused, weight, 1e-6, "row", **options)
    assert torch.equal(fused, separate[1])
    codes = [one.codes[:5].view(torch.uint8) for one in (found, expected)]
    assert torch.equal(*codes)
    plain = add_rms_norm_quantize(x, residual.clone(), weight, 1e-6, "row")
    assert not torch.equal(codes[0], plain.codes[:5].view(torch.uint8))


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, for a gate of -100
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_swiglu_has_the_codes_of_a_separate_one(
    device: str, dtype: torch.dtype, kind: ScaleKind, gelu: bool
):
    gate_up = rows_of(device, dtype, 5, 2 * 1280)
    expected = quantize_rows(gelu_tanh_mul(gate_up) if gelu else silu_mul(gate_up), kind)
    found = silu_mul_quantize(gate_up, kind, gelu=gelu)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_error(device: str, kind: ScaleKind):
    none = torch.empty(0, 256, dtype=FP16, device=device)
    assert quantize_rows(none, kind).codes.shape == (0, 256)
    assert silu_mul_quantize(none, kind).codes.shape == (0, 128)
    assert add_rms_norm_quantize(None, none, none.new_ones(256), 1e-6, kind).count == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [4096, 12288])
def test_many_rows_have_the_codes_of_the_definition(kind: ScaleKind, columns: int):
    x = torch.randn(1001, columns, device="cuda").to(BF16)
    check(quantize_rows(x, kind), x, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1024, 4096, 5120, 12288])
def test_fused_codes_of_wide_rows_are_those_of_separate_kernels(kind: ScaleKind, columns: int):
    """Whose sums are shared by many threads: by the same ones in both kernels."""
    x, residual = (torch.randn(257, columns, device="cuda").to(BF16) for _ in range(2))
    weight = torch.randn(columns, device="cuda").to(BF16)
    gate_up = torch.randn(257, 2 * columns, device="cuda").to(BF16)
    separate, fused = (x.clone(), residual.clone()), residual.clone()
    add_rms_norm(*separate, weight, 1e-6)
    pairs = [
        (add_rms_norm_quantize(x, fused, weight, 1e-6, kind), quantize_rows(separate[0], kind)),
        (silu_mul_quantize(gate_up, kind), quantize_rows(silu_mul(gate_up), kind)),
    ]
    assert torch.equal(fused, separate[1])
    for found, expected in pairs:
        codes = [one.codes[:257].view(torch.uint8) for one in (found, expected)]
        assert torch.equal(*codes)
        assert torch.equal(found.scales[:257], expected.scales[:257])


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, for a gate of -100
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [64, 128, 256])
def test_a_row_in_parts_has_the_codes_of_a_whole_one(
    device: str, dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch
):
    """320 columns: of the last part some are past the end, but for those of 64."""
    gate_up = rows_of(device, dtype, 5, 640)
    expected = silu_mul_quantize(gate_up, "row")
    monkeypatch.setattr(module, "PART", part)
    found = silu_mul_quantize(gate_up, "row")
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
