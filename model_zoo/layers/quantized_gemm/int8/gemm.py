"""Int8Gemm: y = x W^T + b of int8 weights and activations, and its configurations for a shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from model_zoo.layers.gemm.implementations import (
    MAX_ROWS,
    PARTS_BYTES,
    TILES,
    block_m,
    workspace,
)
from model_zoo.layers.quantized_gemm.int8.kernel import _int8_gemm
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import QuantizedRows, QuantizedRowsGemm, ScaleKind
from model_zoo.quantization.weight_scheme import WeightScheme

GROUP_M = 8  # adjacent tiles of x, which share W in the L2 cache
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class Int8Gemm(QuantizedRowsGemm):
    """A GEMM of any GPU from compute capability 8.0 on, for any number of rows."""

    name = "int8 tensor cores"
    kind: ScaleKind  # "int8" or "int8 zeros"
    block_m: int  # rows of x of a tile: 16 or more
    block_n: int  # weight rows of a tile
    block_k: int  # columns of a step
    parts: int = 1  # split-K: programs per tile
    warps: int = 4
    stages: int = 4
    tma: bool = False  # whole tiles are copied by the Tensor Memory Accelerator: Hopper

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether the parts have steps to share, and partial sums fit the workspace."""
        tiles = triton.cdiv(outputs, self.block_n) * triton.cdiv(rows, self.block_m)
        parts_bytes = 4 * tiles * self.parts * self.block_n * self.block_m
        fits = self.parts == 1 or (tiles <= TILES and parts_bytes <= PARTS_BYTES)
        return fits and inputs % self.block_k == 0 and self.parts <= inputs // self.block_k

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        return self.product(quantize_rows(x, self.kind), weight, bias)

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As QuantizedRowsGemm.product."""
        rows, (outputs, inputs) = x.count, weight.shape
        assert x.kind == self.kind and self.serves(rows, outputs, inputs)
        assert weight.kind == "int8" and (x.zeros is None or weight.sums is not None)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=weight.device)
        if rows == 0:
            return out
        codes = weight.words.view(torch.int8)
        operands = x.codes, codes
        if self.tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            operands = tuple(
                TensorDescriptor.from_tensor(tensor, [height, self.block_k])
                for tensor, height in ((x.codes, self.block_m), (codes, self.block_n))
            )
        parts, arrived = workspace(weight.device)
        per_part = triton.cdiv(inputs // self.block_k, self.parts)
        tiles = triton.cdiv(outputs, self.block_n) * triton.cdiv(rows, self.block_m)
        _int8_gemm[(tiles, triton.cdiv(inputs // self.block_k, per_part))](
            operands[0], x.scales, x.zeros, operands[1], weight.scales, weight.sums, bias,
            parts.view(torch.int32), arrived, out, rows, outputs, inputs, per_part, TMA=self.tma,
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, BLOCK_K=self.block_k, GROUP_M=GROUP_M,
            SPLIT=self.parts > 1, num_warps=self.warps, num_stages=self.stages,
            **dependent_launch(weight.device),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class Int8GemmByRows(QuantizedRowsGemm):
    """Int8Gemm in the tile for the number of rows: the same bits for all, and no measurement."""

    name = Int8Gemm.name
    kind: ScaleKind

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        return self.product(quantize_rows(x, self.kind), weight, bias)

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As QuantizedRowsGemm.product."""
        outputs, inputs = weight.shape
        step = MAX_ROWS if x.count <= MAX_ROWS else 2 * MAX_ROWS
        rows = max(1, triton.cdiv(x.count, step)) * step  # so that few choices are kept
        gemm = int8_gemms(weight.device, self.kind, rows, outputs, inputs)[0]
        return gemm.product(x, weight, bias)


def activation_kind(scheme: WeightScheme) -> ScaleKind | None:
    """The activations that Int8Gemm multiplies weights of the scheme by; None: by none."""
    if not scheme.multiplies_integers:
        return None
    return "int8 zeros" if scheme.activation_zeros else "int8"


@cache
def int8_gemms(
    device: torch.device, kind: ScaleKind, rows: int, outputs: int, inputs: int
) -> tuple[Int8Gemm, ...]:
    """Candidates for x [rows, inputs] and W [outputs, inputs], first one that is never bad."""
    programs, tma, roomy = _abilities(device)
    found = (
        _few(kind, rows, outputs, inputs, programs)
        if rows <= MAX_ROWS
        else _many(kind, rows, outputs, programs, tma=tma, roomy=roomy)
    )
    return tuple(gemm for gemm in dict.fromkeys(found) if gemm.serves(rows, outputs, inputs))


def _few(kind: ScaleKind, rows: int, outputs: int, inputs: int, programs: int) -> list[Int8Gemm]:
    """Steps of 256 columns where K has whole ones: more bytes are in flight."""
    height, step = block_m(rows, 16), 256 if inputs % 256 == 0 else 128
    stages = 4 if height < MAX_ROWS else 3
    found: list[Int8Gemm] = []
    for block_n in (64, 32, 128):
        parts = max(1, min(8, round(2 * programs * block_n / outputs)))
        found.append(Int8Gemm(kind, height, block_n, step, parts, stages=stages))
    return [*found, Int8Gemm(kind, height, 64, 128, stages=stages)]


def _many(
    kind: ScaleKind, rows: int, outputs: int, programs: int, *, tma: bool, roomy: bool
) -> list[Int8Gemm]:
    """roomy: a block may have as much shared memory as the largest tiles take"""
    if not roomy:
        return [
            Int8Gemm(kind, 128, 128, 64, warps=8, stages=3),
            Int8Gemm(kind, 64, 128, 64, stages=4),
        ]
    small = Int8Gemm(kind, 128, 128, 128, warps=8, stages=4, tma=tma)
    large = Int8Gemm(kind, 128, 256, 128, warps=8, stages=4 if tma else 3, tma=tma)
    high = Int8Gemm(kind, 256, 128, 128, warps=8, stages=3, tma=tma)
    tiles = triton.cdiv(rows, 128) * triton.cdiv(outputs, 128)
    parts = min(4, programs // tiles) if tiles < programs else 1
    split = Int8Gemm(kind, 128, 128, 128, max(1, parts), warps=8, stages=4, tma=tma)
    narrow = Int8Gemm(kind, 128, 64, 128, warps=4, stages=4, tma=tma)
    # Larger tiles read less; but they are fewer than SMs where there are few rows.
    ordered = [large, small] if tiles >= 3 * programs else [split, small, large]
    return [*ordered, narrow, high]


LARGE_SHARED = 160 << 10  # bytes of shared memory of a block that the largest tiles take


def _abilities(device: torch.device) -> tuple[int, bool, bool]:
    """-> (SMs, has the Tensor Memory Accelerator, has LARGE_SHARED bytes a block)."""
    if device.type != "cuda":
        return 1, False, True
    found = torch.cuda.get_device_properties(device)
    roomy = found.shared_memory_per_block_optin >= LARGE_SHARED
    tma = torch.cuda.get_device_capability(device) == HOPPER
    return found.multi_processor_count, tma, roomy
