"""UnscaledRows: kernels that multiply the scales of what they read, and layers that leave them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write
from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM, UnscaledMM
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.quantize_rows import (
    add_rms_norm_quantize,
    quantize_rows,
    silu_mul_quantize,
)
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind, UnscaledGemm, UnscaledRows
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.parallel.shard import Shard
from tests.support.kernels.quantized_cases import quantized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16]
KINDS: tuple[ScaleKind, ...] = ("row", "block", "int8", "int8 zeros")


def unscaled(
    device: str, dtype: torch.dtype, rows: int, columns: int, scales: torch.dtype = FP32
) -> UnscaledRows:
    """With more row scales than rows, as of rows that are padded for a GEMM."""
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randn(rows, columns, generator=generator) * 500
    of_rows = torch.rand(16, 1, generator=generator) * 0.02 + 1e-3
    of_columns = torch.rand(columns, generator=generator) * 0.1 + 0.05
    return UnscaledRows(
        values.to(dtype).to(device), of_rows.to(device), of_columns.to(scales).to(device)
    )


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def check_codes(found: QuantizedRows, expected: QuantizedRows) -> None:
    count = expected.count
    codes = [each.codes[:count].view(torch.uint8) for each in (found, expected)]
    assert found.count == count and torch.equal(*codes)
    assert torch.equal(found.scales[:count], expected.scales[:count])


def test_scales_are_multiplied_in_float32_and_the_output_is_rounded_once():
    y = unscaled("cpu", FP16, 3, 8)
    expected = y.values.double() * y.row_scales[:3].double() * y.column_scales.double()
    torch.testing.assert_close(y.scaled().double(), expected, rtol=2**-11 * 1.01, atol=0)
    assert y.scaled().dtype == FP16 and len(y) == 3


@pytest.mark.parametrize("scales", [FP32, BF16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_unscaled_gates_and_ups_are_those_of_scaled_ones(
    device: str, dtype: torch.dtype, scales: torch.dtype
):
    both = unscaled(device, dtype, 5, 2 * 384, scales)
    assert torch.equal(silu_mul(both), silu_mul(both.scaled()))
    assert torch.equal(gelu_tanh_mul(both, block=256), gelu_tanh_mul(both.scaled(), block=256))
    half = replace(both, row_scales=both.row_scales / 2)
    assert not torch.equal(silu_mul(both), silu_mul(half))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_unscaled_gates_and_ups_are_those_of_scaled_ones(
    device: str, dtype: torch.dtype, kind: ScaleKind
):
    both = unscaled(device, dtype, 5, 2 * 384)
    for gelu in (False, True):
        expected = silu_mul_quantize(both.scaled(), kind, gelu=gelu)
        check_codes(silu_mul_quantize(both, kind, gelu=gelu), expected)


@pytest.mark.parametrize("options", [{}, {"plus_one": True}], ids=["", "plus_one"])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_adds_what_unscaled_rows_would_be(
    device: str, dtype: torch.dtype, post: bool, options: dict[str, bool]
):
    y, residual = unscaled(device, dtype, 5, 384), numbers(device, dtype, 5, 384)
    weight = numbers(device, dtype, 384)
    given = options | ({"post_weight": weight.flip(0)} if post else {})
    scaled, total = y.scaled(), residual.clone()
    expected = add_rms_norm(scaled, total, weight, 1e-6, **given)
    assert expected.data_ptr() == scaled.data_ptr(), "it is in the memory of y"
    for kind in ("row", "int8"):
        added = residual.clone()
        codes = add_rms_norm_quantize(y, added, weight, 1e-6, kind, **given)
        check_codes(codes, quantize_rows(expected, kind))
        assert torch.equal(added, total)
    added = residual.clone()
    assert torch.equal(add_rms_norm(y, added, weight, 1e-6, **given), expected)
    assert torch.equal(added, total)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rotated", [0, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_keys_and_values_are_those_of_a_scaled_projection(
    device: str, dtype: torch.dtype, rotated: int, gated: bool
):
    """Without rope and norms queries are scaled all the same."""
    heads, kv_heads, size, tokens = 4, 2, 64, 5
    columns = (heads * (1 + gated) + 2 * kv_heads) * size
    y = unscaled(device, dtype, tokens, columns)
    weights = {}
    if rotated:
        weights = {"q_weight": numbers(device, dtype, size), "eps": 1e-6}
        weights |= {"k_weight": weights["q_weight"].flip(0)}
        weights |= {"cos_sin": numbers(device, dtype, tokens, rotated)}
    slots = torch.tensor([3, 17, -1, 0, 30], device=device)

    def prepared(projected: Tensor | UnscaledRows) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (torch.zeros(2, kv_heads, 16, size, dtype=dtype, device=device) for _ in range(2))
        queries = qk_norm_rope_write(projected, k, v, slots, heads=heads, gated=gated, **weights)  # pyright: ignore[reportArgumentType]
        return queries.clone(), k, v

    expected = prepared(y.scaled())
    for found, scaled in zip(prepared(y), expected, strict=True):
        assert torch.equal(found, scaled) and found.any()


class Halving(UnscaledGemm):
    """x W^T as half of it, and a scale of 2."""

    kind: ScaleKind = "row"
    name = "halving"

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        return self.unscaled(x, weight).scaled()

    def unscaled(self, x: Tensor | QuantizedRows, weight: Tensor) -> UnscaledRows:
        assert isinstance(x, Tensor)
        twos = torch.full((len(x), 1), 2.0, device=x.device)
        return UnscaledRows(x @ weight.T / 2, twos, torch.ones(len(weight), device=x.device))


def test_a_layer_leaves_scales_only_to_a_norm_and_to_what_asks_for_unscaled_rows():
    linear = LinearFactory(FP32).row(16, {"down": 24}, bias=False)
    linear.weight.normal_()
    x = numbers("cpu", FP32, 3, 16)
    expected = x @ linear.weight.T
    linear.use_gemms({}, Halving())
    torch.testing.assert_close(linear(x), expected)
    for found in (linear.for_norm(x), linear.unscaled(x), linear.add(x, torch.ones(3, 24))[0]):
        assert isinstance(found, UnscaledRows)
        torch.testing.assert_close(found.scaled(), expected)
    linear.may_leave_scales = False
    assert isinstance(linear.for_norm(x), Tensor)
    linear.use_gemms({}, None)
    assert torch.equal(linear.unscaled(x), linear(x)), "cuBLAS, or PyTorch's product"


def test_scales_are_not_left_where_a_bias_is_added():
    linear = LinearFactory(FP32).row(16, {"down": 24}, bias=True)
    assert linear.bias is not None
    linear.bias.fill_(100.0)
    linear.use_gemms({}, Halving())
    with pytest.raises(AssertionError):  # the GEMM adds none
        linear.unscaled(numbers("cpu", FP32, 3, 16))


def test_a_layer_norm_scales_what_it_adds():
    norm = LayerNorm(48, 1e-5, FP16)
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    y, residual = unscaled("cpu", FP16, 3, 48), numbers("cpu", FP16, 3, 48)
    for found, expected in zip(norm.add(y, residual), norm.add(y.scaled(), residual), strict=True):
        assert torch.equal(found, expected)


def test_kernels_that_write_codes_refuse_scales_of_too_few_rows(device: str):
    y = unscaled(device, FP16, 5, 256)
    few = replace(y, row_scales=y.row_scales[:5])
    with pytest.raises(AssertionError):
        silu_mul_quantize(few, "row")
    with pytest.raises(AssertionError):
        add_rms_norm_quantize(few, y.values.clone(), y.values[0], 1e-6, "row")


def test_layers_may_leave_scales_where_a_norm_or_an_activation_follows():
    linears = LinearFactory(BF16)
    assert linears.row(128, {"o_proj": 64}, bias=False).may_leave_scales
    assert not linears.row(128, {"shared.down": 64}, bias=False, summed=False).may_leave_scales
    assert linears.swiglu(128, 64, "gate", "up", bias=False).may_leave_scales
    assert not linears.column(128, {"in_proj": 64}, bias=False).may_leave_scales
    two = LinearFactory(BF16, shard=Shard(0, 2))
    assert not two.row(128, {"o_proj": 64}, bias=False).may_leave_scales, "ranks add outputs"


def test_a_norm_and_an_activation_take_unscaled_rows(device: str):
    down = Linear(32, 48, bias=False, dtype=FP16).to(device)
    norm = RMSNorm(48, 1e-6, FP16).to(device)
    norm.weight.normal_()
    y, residual = unscaled(device, FP16, 3, 48), numbers(device, FP16, 3, 48)
    total = residual + y.scaled()
    found, added = norm.add(y, residual.clone(), consumer=down)
    assert torch.equal(added, total)
    torch.testing.assert_close(found, norm(total), rtol=2e-3, atol=2e-3)
    gate_up = SwigluLinear(48, 32, bias=False, dtype=FP16).to(device)
    gate_up.weight.normal_()
    x = numbers(device, FP16, 3, 48)
    expected = gate_up.swiglu(x)
    gate_up.use_gemms({}, Halving())
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(gate_up.swiglu(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 33, 128, 200])
@pytest.mark.parametrize("shape", [(256, 512), (4096, 12288)], ids=str)
def test_products_without_scales_are_those_of_scaled_mm(rows: int, shape: tuple[int, int]):
    weight = pack(quantized("fp8 row", *shape, device="cuda"))
    x = quantize_rows(numbers("cuda", BF16, rows, shape[1]), "row")
    found = UnscaledMM().unscaled(x, weight)
    expected = ScaledMM("row", fast_accum=True).product(x, weight, None)
    assert found.values.dtype == BF16 and len(found) == rows
    error = (found.scaled().double() - expected.double()).norm()
    assert error <= 2**-8 * expected.double().norm(), "rounded twice"
    assert torch.equal(UnscaledMM().product(x, weight, None), found.scaled())
