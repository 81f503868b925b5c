"""Batch-invariant y = x W^T: a row's result depends on that row and W only, bitwise.

batch_invariant_gemm
  grid      (tiles of W's rows * tiles of x's rows)
  reads     W [N, K] and x [M, K] by tiles (TMA on Hopper), rows 16-byte aligned; bias [N] or None
  math      W tile [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_M], summed in float32 from the first
            column to the last in one chain for every tile size, without split-K.  W is the left
            operand in every configuration, as in hopper/skinny_gemm.py, which has the same order
            where it splits no tile
  writes    y [M, N], contiguous
  bound     compute: 2 * M * N * K floating-point operations
  checked   tests/model_zoo/layers/gemm/test_batch_invariant_gemm.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.softmax import dot

GROUP_M = 8  # adjacent tiles of x, which share W in the L2 cache


@triton.jit(do_not_specialize=["M"])
def _batch_invariant_gemm(
    w_tiles, x_tiles, BIAS, OUT, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    stripe = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    width = tl.minimum(tiles_m - stripe, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m_start = (stripe + within % width) * BLOCK_M
    n_start = within // width * BLOCK_N
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w, x = w_tiles.load([n_start, k]), x_tiles.load([m_start, k])
        acc = dot(w, tl.trans(x), acc, PRECISION)
    n = n_start + tl.arange(0, BLOCK_N)
    m = m_start + tl.arange(0, BLOCK_M)
    if BIAS is not None:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(acc.to(OUT.dtype.element_ty))
    at = OUT + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, y, mask=(m < M)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's tile and compile options, on which no result depends."""

    rows: int  # of x
    outputs: int  # rows of W
    columns: int  # of K per stage
    warps: int
    stages: int


SMALL = {rows: Tile(rows, 64, 128, 4, 4) for rows in (16, 32, 64)}
# Largest first; the first one whose grid fills the device is taken.
LARGE = (Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 4), SMALL[64])
FLOAT32 = Tile(64, 64, 32, 8, 2)  # float32: tensor cores would round it


@dataclass(frozen=True, slots=True)
class BatchInvariantGemm:
    """A GEMM of any number of rows."""

    name = "batch-invariant"

    programs: int  # SMs of the device

    def tile(self, rows: int, outputs: int, dtype: torch.dtype) -> Tile:
        if dtype == torch.float32:
            return FLOAT32
        for most, tile in SMALL.items():
            if rows <= most:
                return tile
        fitting = (
            tile
            for tile in LARGE
            if triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs) >= self.programs
        )
        return next(fitting, LARGE[-1])

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        (rows, inputs), outputs = x.shape, len(weight)
        assert x.stride(1) == weight.stride(1) == 1 and x.dtype == weight.dtype
        out = x.new_empty(rows, outputs)
        if rows == 0:
            return out
        tile = self.tile(rows, outputs, x.dtype)
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
        _batch_invariant_gemm[(programs,)](
            TensorDescriptor.from_tensor(weight, [tile.outputs, tile.columns]),
            TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
            bias, out, rows, outputs, inputs,
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.columns, GROUP_M=GROUP_M,
            STAGES=tile.stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tile.warps, **dependent_launch(x.device),
        )  # fmt: skip
        return out
