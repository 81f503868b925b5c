"""y = x W^T + b of a PackedWeight in plain Triton: weights are dequantized on their way to tl.dot.

dequant_gemm
  grid      (tiles of W's rows * tiles of x's rows, parts of K)
  reads     words, scales and zeros of W [N, K], x [M, K] with rows 16-byte aligned, bias [N] or
            None.  A weight depends on no preceding kernel
  math      W tile [BLOCK_N, BLOCK_K] in registers, as its words' order has it for this operand,
            times x^T [BLOCK_K, BLOCK_M]; float32 sums.  Weights are those of
            QuantizedWeight.dequantize in x's type, but a factor of a whole row, which multiplies
            the sum.  Partial sums of split-K go to a workspace; the last program to arrive adds
            them in the order of the columns: deterministic
  writes    y [M, N], contiguous
  bound     memory for few rows: N * K * bits / 8 bytes; else instructions that dequantize, which
            every BLOCK_M rows of x repeat: for many rows on Hopper DequantizeThenCublas is faster
  checked   tests/model_zoo/layers/quantized_gemm/test_dequant_gemm.py against float64, interpreted
            and on a GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from attention.common.softmax import dot
from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    TILES,
    workspace,
)
from model_zoo.layers.gemm.split_k import _is_last_to_arrive
from model_zoo.layers.quantized_gemm.decode import decoding, load_weight, scale_is_per_row
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight

GROUP_M = 8  # adjacent tiles of x, which share W in the L2 cache


@triton.jit
def _scale_of_rows(SCALES, ROW_SCALES, n, N, UNIT: tl.constexpr, PER_ROW: tl.constexpr):
    """-> [BLOCK_N] float32: what multiplies the sums of whole rows."""
    factor = tl.full(n.shape, 1.0, tl.float32)
    if PER_ROW:
        factor = tl.load(SCALES + n, mask=n < N, other=0.0).to(tl.float32) * UNIT
    if ROW_SCALES is not None:
        factor *= tl.load(ROW_SCALES + n, mask=n < N, other=0.0)
    return factor


@triton.jit(do_not_specialize=["M", "per_part"])
def _dequant_gemm(
    WORDS, SCALES, ZEROS, ROW_SCALES, X, BIAS, PARTS, ARRIVED, OUT, M, N, K, scale_row,
    scale_column, per_part, KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    RUN: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    part, parts = tl.program_id(1), tl.num_programs(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    stripe = tile // (GROUP_M * tiles_n) * GROUP_M
    width = tl.minimum(tiles_m - stripe, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (stripe + within % width) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // width * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    x_rows = X + m.to(tl.int64)[None, :] * K
    first, last = part * per_part * BLOCK_K, tl.minimum((part + 1) * per_part * BLOCK_K, K)
    if DEPENDENT:
        wait_for_launcher()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        w = load_weight(
            WORDS, SCALES, ZEROS, n, start, N, K, scale_row, scale_column, KIND, SCALE, UNIT,
            BLOCK_K, RUN, ROW_GROUP, COLUMN_GROUP, not PER_ROW,
        )  # fmt: skip
        k = start + column
        x = tl.load(x_rows + k[:, None], mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
        acc = dot(w.to(X.dtype.element_ty), x, acc, "tf32")
    real = (n < N)[:, None] & (m < M)[None, :]
    mine = True
    if parts > 1:
        slot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        slots = PARTS + tile.to(tl.int64) * parts * (BLOCK_N * BLOCK_M) + slot
        tl.store(slots + part * (BLOCK_N * BLOCK_M), acc, mask=real)
        mine = _is_last_to_arrive(ARRIVED + tile, parts)
        if mine:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                at = slots + other * (BLOCK_N * BLOCK_M)
                acc += tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
    if mine:
        acc *= _scale_of_rows(SCALES, ROW_SCALES, n, N, UNIT, PER_ROW)[:, None]
        if BIAS is not None:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        out = OUT + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class DequantizeInRegisters:
    """A GEMM of any GPU from compute capability 8.0 on, for any number of rows."""

    name = "dequantize in registers"
    block_m: int  # rows of x of a tile: 16 or more
    block_n: int  # weight rows of a tile
    block_k: int  # columns of a step: a multiple of 64, of 128 for 4 bits
    parts: int = 1  # split-K: programs per tile
    warps: int = 4
    stages: int = 4

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether the parts have steps to share, and partial sums fit the workspace."""
        tiles = triton.cdiv(outputs, self.block_n) * triton.cdiv(rows, self.block_m)
        parts_bytes = 4 * tiles * self.parts * self.block_n * self.block_m
        fits = self.parts == 1 or (tiles <= TILES and parts_bytes <= PARTS_BYTES)
        return fits and self.parts <= triton.cdiv(inputs, self.block_k)

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        rows, (outputs, inputs) = len(x), weight.shape
        assert self.serves(rows, outputs, inputs) and x.shape[1] == inputs
        x = in_packed_order(x, weight)
        out = x.new_empty(rows, outputs)
        if rows == 0:
            return out
        scales, per_row = decoding(weight), scale_is_per_row(weight)
        steps = triton.cdiv(inputs, self.block_k)
        per_part = triton.cdiv(steps, self.parts)
        tiles = triton.cdiv(outputs, self.block_n) * triton.cdiv(rows, self.block_m)
        _dequant_gemm[(tiles, triton.cdiv(steps, per_part))](
            weight.words, scales.scales, weight.zeros, weight.row_scales, x, bias,
            *workspace(x.device), out, rows, outputs, inputs, scales.scale_row,
            scales.scale_column, per_part, KIND=weight.kind, SCALE=scales.kind,
            UNIT=scales.unit, RUN=scales.run_of(self.block_k), ROW_GROUP=weight.row_group,
            COLUMN_GROUP=weight.column_group, PER_ROW=per_row, BLOCK_M=self.block_m,
            BLOCK_N=self.block_n, BLOCK_K=self.block_k, GROUP_M=GROUP_M, num_warps=self.warps,
            num_stages=self.stages, **dependent_launch(x.device),
        )  # fmt: skip
        return out


# By the largest number of rows.  All have steps of 128 columns and no split-K, so that a row's sum
# has one order in all of them.
SMALL = {
    16: DequantizeInRegisters(16, 64, 128),
    32: DequantizeInRegisters(32, 64, 128),
    64: DequantizeInRegisters(64, 64, 128, stages=3),
}
LARGE = {
    128: DequantizeInRegisters(128, 64, 128, stages=3),
    1 << 30: DequantizeInRegisters(128, 128, 128, warps=8, stages=3),
}
LARGE_SHARED = 160 << 10  # bytes of shared memory of a block that LARGE takes


@cache
def tiles(device: torch.device) -> dict[int, DequantizeInRegisters]:
    """SMALL, and LARGE where there is the shared memory: not on 8.6 and 8.9."""
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared < LARGE_SHARED:
            return SMALL
    return SMALL | LARGE


def tile_of(device: torch.device, rows: int) -> DequantizeInRegisters:
    """The configuration without split-K for `rows` rows."""
    found = tiles(device)
    return next((gemm for most, gemm in found.items() if rows <= most), SMALL[MAX_ROWS])


def dequant_gemms(
    device: torch.device, programs: int, rows: int, outputs: int, inputs: int
) -> list[DequantizeInRegisters]:
    """Candidates for x [rows, inputs] and W [outputs, inputs] on a device of so many SMs."""
    whole = tile_of(device, rows)
    candidates = [whole]
    if rows <= MAX_ROWS:
        for block_n in (32, 64):
            parts = max(2, min(8, round(2 * programs * block_n / outputs)))
            split = whole.block_m, block_n, 128, parts
            candidates.append(DequantizeInRegisters(*split, stages=whole.stages))
    return [gemm for gemm in candidates if gemm.serves(rows, outputs, inputs)]


@dataclass(frozen=True, slots=True)
class DequantizeInRegistersUnsplit:
    """DequantizeInRegisters without split-K, in the tile for the number of rows.

    A row's sum has the same order for any number of rows, as --deterministic asks for.
    """

    name = DequantizeInRegisters.name

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        return True

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        return tile_of(x.device, len(x)).run(x, weight, bias)


def in_packed_order(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [M, K] with its columns in the order of the weight's, contiguous."""
    if weight.permutation is not None:
        return x.index_select(1, weight.permutation)
    return x.contiguous()
