"""Activations as codes of 8 bits and scales; alone, after a norm or after SwiGLU.

quantize_rows, add_rms_norm_quantize, silu_mul_quantize
  grid      (rows, runs of columns): one run where a sum or a scale needs the whole row
  reads     x [M, K], or gates and ups [M, 2 K], bf16 or fp16, rows at any stride; before a norm or
            SwiGLU they may be UnscaledRows
  writes    codes [rows, K] e4m3 or int8 in the order of a PackedWeight's 8-bit words, and float32
            scales: one per row [rows, 1], or one per 128 columns [rows, K / 128] with strides (1,
            rows), as torch._scaled_mm takes them; with zero points int32 [rows].  rows is M rounded
            up; rows beyond M are zeros
  math      scale = max |x| / 448 (OCP e4m3's largest) or / 127; codes round x / scale.  With a zero
            point: scale = (max(x, 0) - min(x, 0)) / 255, zero = -128 - min(x, 0) / scale, and codes
            round x / scale + zero.  The norm and SwiGLU round as add_rms_norm and silu_mul do, so
            that fused and separate codes are the same
  launch    dependents are launched at once; before the wait it reads the norm's weight, and
            columns' scales: of silu_mul_quantize those of the first part
  bound     memory: 3 * M * K bytes; 7 with a norm, 5 with SwiGLU
  checked   tests/model_zoo/layers/quantized_gemm/test_quantize_rows.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.kernels.add_rms_norm import norm_warps, residual_sum, rms_norm
from model_zoo.layers.kernels.silu_mul import gate_mul, load_both
from model_zoo.layers.quantized_rows import (
    GROUP,
    QuantizedRows,
    ScaleKind,
    UnscaledRows,
    parts_of,
)

# Rows are rounded up to a multiple of this: cuBLAS reads a column of block scales by 16 bytes, and
# has no product of a single row with fast accumulation and a bias.
ROW_MULTIPLE: dict[ScaleKind, int] = {"row": 16, "block": 4, "int8": 16, "int8 zeros": 16}
LARGEST = tl.constexpr(448.0)
LARGEST_INT8 = tl.constexpr(127.0)
# 1.5 * 2^23: added to a small number it rounds to an integer, whose bits are then the last ones.
ROUND = tl.constexpr(12582912.0)
LEAST = tl.constexpr(1e-10)  # in place of a largest value of 0
RUN = 1024  # columns of a program, where scales allow it
PART = 4096  # columns of a row that silu_mul_quantize loads at once, where a program has all of it


@triton.jit
def _integers(values, ZEROS, row):
    """values [1, K] -> (int8 codes, scale [1])."""
    if ZEROS is not None:
        least = tl.minimum(tl.min(values, 1), 0.0)
        span = tl.maximum(tl.maximum(tl.max(values, 1), 0.0) - least, LEAST)
        inverse = 1.0 / span * (2 * LARGEST_INT8 + 1)
        zero = (-LARGEST_INT8 - 1 - least * inverse + ROUND) - ROUND
        tl.store(ZEROS + row + tl.arange(0, 1), zero.to(tl.int32))
        scaled = values * inverse[:, None] + zero[:, None]
        scale = span / (2 * LARGEST_INT8 + 1)
    else:
        largest = tl.maximum(tl.max(tl.abs(values), 1), LEAST)
        scaled = values * (1.0 / largest * LARGEST_INT8)[:, None]
        scale = largest / LARGEST_INT8
    clamped = tl.minimum(tl.maximum(scaled, -LARGEST_INT8 - 1), LARGEST_INT8)
    return (clamped + ROUND).to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def _store_codes(codes, CODES, row, start, K, BLOCK: tl.constexpr):
    """Codes of BLOCK columns of a row from `start` on, in the order of packed blocks."""
    # Column 16 u + 8 i + 2 t + e of a block is byte 16 t + 4 u + 2 e + i.
    blocks = codes.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 1, 4, 2)
    # In two dimensions: the compiler would give a thread 16 values, not 8, of any other tensor of
    # the store's shape, and so add the squares of a norm in another order than add_rms_norm.
    byte = start + 64 * tl.arange(0, BLOCK // 64)[:, None] + tl.arange(0, 64)
    tl.store(CODES + row * K + byte, blocks.reshape(BLOCK // 64, 64), mask=byte < K)


@triton.jit
def write_codes(
    x, CODES, SCALES, ZEROS, row, rows, start, K, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """x [BLOCK], columns start.. of a row, 0 beyond K; GROUP: columns of a scale, 0 for the row."""
    GROUPS: tl.constexpr = BLOCK // GROUP if GROUP else 1
    values = x.to(tl.float32).reshape(GROUPS, BLOCK // GROUPS)
    if CODES.dtype.element_ty == tl.int8:
        codes, scale = _integers(values, ZEROS, row)
    else:
        largest = tl.maximum(tl.max(tl.abs(values), 1), LEAST)
        # Rounding takes nothing past the largest code.
        codes = (values * (1.0 / largest * LARGEST)[:, None]).to(tl.float8e4nv)
        scale = largest / LARGEST
    group = start // (BLOCK // GROUPS) + tl.arange(0, GROUPS)
    tl.store(SCALES + group * rows + row, scale, mask=group * (BLOCK // GROUPS) < K)
    _store_codes(codes, CODES, row, start, K, BLOCK)


@triton.jit(do_not_specialize=["M", "rows"])
def _quantize_rows(
    X, CODES, SCALES, ZEROS, M, rows, x_row, K, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    if DEPENDENT:
        start_successor_and_wait()
    x = tl.load(X + row * x_row + column, mask=(column < K) & (row < M), other=0.0)
    write_codes(x, CODES, SCALES, ZEROS, row, rows, start, K, BLOCK, GROUP)


@triton.jit(do_not_specialize=["M", "rows"])
def _add_rms_norm_quantize(
    X, ROW_SCALES, COLUMN_SCALES, RESIDUAL, WEIGHT, POST_WEIGHT, CODES, SCALES, ZEROS, eps, M, rows,
    x_row, residual_row, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PLUS_ONE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (column < K) & (row < M)
    weight = tl.load(WEIGHT + column, mask=column < K, other=0.0).to(tl.float32)
    post_weight = None
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + column, mask=column < K, other=0.0).to(tl.float32)
    of_columns = None
    if COLUMN_SCALES is not None:
        of_columns = tl.load(COLUMN_SCALES + column, mask=column < K, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    total = residual_sum(
        X, ROW_SCALES, of_columns, RESIDUAL, post_weight, eps, row, x_row, residual_row, column,
        mask, K, PLUS_ONE,
    )  # fmt: skip
    x = rms_norm(total, weight, eps, K, PLUS_ONE)
    write_codes(x, CODES, SCALES, ZEROS, row, rows, 0, K, BLOCK, GROUP)


@triton.jit(do_not_specialize=["M", "rows"])
def _silu_mul_quantize(
    GATE_UP, ROW_SCALES, COLUMN_SCALES, CODES, SCALES, ZEROS, M, rows, x_row, K,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """PARTS: of BLOCK columns each, of a row whose fp8 codes have one scale."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    found = ()
    for i in tl.static_range(PARTS):
        column = start + i * BLOCK + tl.arange(0, BLOCK)
        mask = (column < K) & (row < M)
        gate, up = load_both(
            GATE_UP, ROW_SCALES, COLUMN_SCALES, row, x_row, column, mask, K, DEPENDENT and i == 0
        )
        found = found + (gate_mul(gate, up, GELU),)  # noqa: RUF005
    if PARTS == 1:
        write_codes(found[0], CODES, SCALES, ZEROS, row, rows, start, K, BLOCK, GROUP)
    else:
        largest = LEAST
        for i in tl.static_range(PARTS):
            largest = tl.maximum(largest, tl.max(tl.abs(found[i].to(tl.float32)), 0))
        inverse = 1.0 / largest * LARGEST
        for i in tl.static_range(PARTS):
            codes = (found[i].to(tl.float32) * inverse).to(tl.float8e4nv)
            _store_codes(codes, CODES, row, start + i * BLOCK, K, BLOCK)
        tl.store(SCALES + row, largest / LARGEST)


def quantize_rows(x: Tensor, kind: ScaleKind) -> QuantizedRows:
    """x [M, K], rows at any stride; K a multiple of 64, of 128 for kind "block"."""
    count, columns = x.shape
    out = room_for(x, count, columns, kind)
    if count:
        block, runs = _runs(columns, kind)
        _quantize_rows[(len(out.codes), runs)](
            x, out.codes, out.scales, out.zeros, count, len(out.codes), x.stride(0), columns,
            BLOCK=block, GROUP=group_of(kind), num_warps=norm_warps(block),
            **dependent_launch(x.device),
        )  # fmt: skip
    return out


def add_rms_norm_quantize(
    y: Tensor | UnscaledRows | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: ScaleKind,
    *,
    post_weight: Tensor | None = None,
    plus_one: bool = False,
) -> QuantizedRows:
    """residual += y; the codes of rms_norm(residual) * weight.

    y, residual: [M, K] of one type, rows at any stride; y None: residual already is the sum
    weight:      [K]
    post_weight, plus_one: as in add_rms_norm
    """
    x, row_scales, column_scales = (None, None, None) if y is None else parts_of(y)
    count, columns = residual.shape
    assert weight.shape == (columns,) and weight.stride(0) == residual.stride(1) == 1
    assert x is None or (x.shape == residual.shape and x.stride(1) == 1)
    assert post_weight is None or (post_weight.shape == (columns,) and post_weight.stride(0) == 1)
    out = room_for(residual, count, columns, kind)
    assert row_scales is None or len(row_scales) >= len(out.codes)
    if count:
        block = triton.next_power_of_2(columns)
        _add_rms_norm_quantize[(len(out.codes),)](
            x, row_scales, column_scales, residual, weight, post_weight, out.codes, out.scales,
            out.zeros, eps, count, len(out.codes), 0 if x is None else x.stride(0),
            residual.stride(0), K=columns, BLOCK=block, GROUP=group_of(kind), PLUS_ONE=plus_one,
            num_warps=norm_warps(block, norms=1 if post_weight is None else 2),
            **dependent_launch(residual.device),
        )  # fmt: skip
    return out


def silu_mul_quantize(
    both: Tensor | UnscaledRows, kind: ScaleKind, *, gelu: bool = False
) -> QuantizedRows:
    """The codes of silu(gate) * up of gates and ups [M, 2 K], rows at any stride.

    gelu: of gelu(gate) * up, by tanh
    """
    gate_up, row_scales, column_scales = parts_of(both)
    count, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = room_for(gate_up, count, columns, kind)
    assert row_scales is None or len(row_scales) >= len(out.codes)
    if count:
        block, runs = _runs(columns, kind)
        warps, parts = norm_warps(block), 1
        if kind == "row" and block > PART:  # fewer registers, and none for columns past the end
            block, parts = PART, triton.cdiv(columns, PART)
        _silu_mul_quantize[(len(out.codes), runs)](
            gate_up, row_scales, column_scales, out.codes, out.scales, out.zeros, count,
            len(out.codes), gate_up.stride(0), columns, BLOCK=block, PARTS=parts,
            GROUP=group_of(kind), GELU=gelu, num_warps=warps,
            **dependent_launch(gate_up.device),
        )  # fmt: skip
    return out


def room_for(x: Tensor, count: int, columns: int, kind: ScaleKind) -> QuantizedRows:
    """Uninitialized codes and scales of x."""
    assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(1) == 1
    assert columns % (GROUP if kind == "block" else 64) == 0
    multiple = ROW_MULTIPLE[kind]
    rows = -(-count // multiple) * multiple
    dtype = torch.int8 if kind in ("int8", "int8 zeros") else torch.float8_e4m3fn
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if kind == "block":
        scales = torch.empty(columns // GROUP, rows, dtype=torch.float32, device=x.device).t()
    else:
        scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    zeros = None
    if kind == "int8 zeros":
        zeros = torch.empty(rows, dtype=torch.int32, device=x.device)
    return QuantizedRows(
        codes=codes, scales=scales, kind=kind, count=count, dtype=x.dtype, zeros=zeros
    )


def _runs(columns: int, kind: ScaleKind) -> tuple[int, int]:
    """-> (columns of a program, programs of a row)."""
    block = triton.next_power_of_2(columns)
    if kind == "block":
        block = min(RUN, block)
    return block, triton.cdiv(columns, block)


def group_of(kind: ScaleKind) -> int:
    return GROUP if kind == "block" else 0
