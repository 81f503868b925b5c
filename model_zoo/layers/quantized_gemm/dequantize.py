"""dequantize_into: a PackedWeight as bfloat16 or float16, for a GEMM of many rows.

dequantize
  grid      (tiles of BLOCK_N rows, tiles of BLOCK_K columns)
  reads     words, scales, zeros, row scales and the permutation of a PackedWeight.  None depends on
            a preceding kernel, but the output does: with dependent launch only the stores wait
  writes    the weight [N, K]; with a permutation each column at its place in x
  math      float32 in the order of QuantizedWeight.dequantize, one rounding: the same bits
  bound     memory: N * K * (bits / 8 + 2) bytes
  checked   tests/model_zoo/layers/quantized_gemm/test_dequantize.py
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.quantized_gemm.decode import decoding, load_weight
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight


@triton.jit
def _dequantize(
    WORDS, SCALES, ZEROS, ROW_SCALES, PERMUTATION, OUT, N, K, scale_row, scale_column,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, RUN: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    values = load_weight(
        WORDS, SCALES, ZEROS, n, start, N, K, scale_row, scale_column, KIND, SCALE, UNIT, BLOCK_K,
        RUN, ROW_GROUP, COLUMN_GROUP, True,
    )  # fmt: skip
    if ROW_SCALES is not None:
        values *= tl.load(ROW_SCALES + n, mask=n < N, other=0.0)[:, None]
    column = start + tl.arange(0, BLOCK_K)
    real = (n < N)[:, None] & (column < K)[None, :]
    if PERMUTATION is not None:
        column = tl.load(PERMUTATION + column, mask=column < K, other=0)
    if DEPENDENT:
        wait_for_launcher()
    at = OUT + n.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(at, values.to(OUT.dtype.element_ty), mask=real)


def dequantize_into(weight: PackedWeight, out: Tensor) -> None:
    """out [N, K] bfloat16 or float16, contiguous: the weight."""
    rows, columns = weight.shape
    assert out.shape == (rows, columns) and out.is_contiguous()
    scales = decoding(weight)
    _dequantize[(triton.cdiv(rows, BLOCK_N), triton.cdiv(columns, BLOCK_K))](
        weight.words, scales.scales, weight.zeros, weight.row_scales, weight.permutation, out,
        rows, columns, scales.scale_row, scales.scale_column, KIND=weight.kind, SCALE=scales.kind,
        UNIT=scales.unit, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, RUN=scales.run_of(BLOCK_K),
        ROW_GROUP=weight.row_group, COLUMN_GROUP=weight.column_group, num_warps=WARPS,
        **dependent_launch(out.device),
    )  # fmt: skip


BLOCK_N, BLOCK_K, WARPS = 16, 256, 4
