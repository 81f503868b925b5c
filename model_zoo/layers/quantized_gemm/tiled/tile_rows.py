"""x in 16 bits -> TiledRows, in plain Triton: what no GEMM before TiledFp8Gemm has quantized.

tile_rows
  grid      (M, runs of BLOCK columns)
  reads     x [M, K] bf16 or fp16, rows at any stride
  writes    codes [M, K] e4m3 in the order of packed 8-bit blocks, and float32 scales of 1 x 64
            columns as gemm/hopper/codes.py has them
  launch    dependents are launched at once; it reads nothing before the wait
  bound     memory: 3 * M * K bytes
  checked   tests/model_zoo/layers/quantized_gemm/tiled/test_tiled_fp8_gemm.py
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.tiled_rows import TiledRows, TileOrder

LARGEST, LEAST = tl.constexpr(448.0), tl.constexpr(1e-10)
BLOCK = 1024  # columns of a program


@triton.jit
def _tile_rows(
    X, CODES, SCALES, K, x_row, height, FOLD: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    if DEPENDENT:
        start_successor_and_wait()
    x = tl.load(X + row.to(tl.int64) * x_row + column, mask=column < K, other=0.0)
    values = x.to(tl.float32).reshape(BLOCK // 64, 64)
    largest = tl.maximum(tl.max(tl.abs(values), 1), LEAST)
    codes = (values * (1.0 / largest * LARGEST)[:, None]).to(tl.float8e4nv)
    block = start // 64 + tl.arange(0, BLOCK // 64)
    run = block // STEPS
    scale_row = run // FOLD * STEPS + block % STEPS
    at = SCALES + (scale_row * FOLD + run % FOLD) * height + row
    tl.store(at, largest / LARGEST, mask=block * 64 < K)
    # Column 16 u + 8 i + 2 t + e of a block is byte 16 t + 4 u + 2 e + i.
    blocks = codes.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 1, 4, 2)
    byte = start + 64 * tl.arange(0, BLOCK // 64)[:, None] + tl.arange(0, 64)
    stored = blocks.reshape(BLOCK // 64, 64)
    tl.store(CODES + row.to(tl.int64) * K + byte, stored, mask=byte < K)


def tile_rows(x: Tensor, order: TileOrder) -> TiledRows:
    """x [M, K], K a multiple of 64, for a GEMM with that order."""
    rows, columns = x.shape
    assert columns % 64 == 0 and x.stride(1) == 1
    out = TiledRows.room_for((rows, columns), order, x.dtype, x.device)
    if rows:
        _tile_rows[(rows, triton.cdiv(columns, BLOCK))](
            x, out.codes, out.scales, columns, x.stride(0), out.scales.shape[1] // order.fold,
            FOLD=order.fold, STEPS=order.steps, BLOCK=BLOCK, num_warps=4,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out
