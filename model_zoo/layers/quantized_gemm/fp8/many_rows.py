"""Fp8ManyRowsGemm: y = x W^T of many rows on Hopper, with both in fp8, and with a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.gemm.bands import tile_grid
from model_zoo.layers.gemm.implementations import Gate, GatingGemm
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import QuantizedRows, QuantizedRowsGemm, ScaleKind

MIN_INPUTS = 512  # columns of the ring of stages


@dataclass(frozen=True, slots=True)
class Fp8ManyRowsGemm(QuantizedRowsGemm, GatingGemm):
    """hopper/fp8_many_rows.py: compute capability 9.0, scales of rows, no bias."""

    name = "fp8 tensor cores, many rows (Hopper)"
    kind: ScaleKind = "row"

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether rows of all tensors are 16-byte aligned, and as long as the ring of stages."""
        return outputs % 16 == 0 and inputs % 16 == 0 and inputs >= MIN_INPUTS

    def gates(self, rows: int, weight: PackedWeight) -> bool:
        """As GatingGemm.gates."""
        return True

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """As QuantizedRowsGemm.product; no bias."""
        return self.multiply(x, weight, bias, None)

    def multiply(
        self,
        x: Tensor | QuantizedRows,
        weight: PackedWeight,
        bias: Tensor | None,
        gate: Gate | None,
    ) -> Tensor:
        """As GatingGemm.multiply; x may be quantized; no bias."""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.gemm.hopper.many_rows import HALF, ROWS
        from model_zoo.layers.quantized_gemm.hopper.fp8_many_rows import DEPTH, fp8_many_rows

        x = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        outputs, inputs = weight.shape
        assert x.kind == self.kind and ScaledMM(self.kind).multiplies(weight) and bias is None
        assert self.serves(len(x), outputs, inputs)
        codes = weight.words.view(torch.float8_e4m3fn)  # [N, K]
        columns = outputs if gate is None else outputs // 2
        out = torch.empty(len(x), columns, dtype=x.dtype, device=codes.device)
        if len(x) == 0:
            return out
        width, half_offset = (2 * HALF.value, HALF.value) if gate is None else (HALF.value, columns)
        grid = tile_grid(codes.device, len(x), columns, inputs, width=width, itemsize=1)
        rows, depth = ROWS.value, DEPTH.value
        fp8_many_rows[(grid.programs,)](
            tma_desc(x.codes, [rows, depth]), tma_desc(codes, [HALF.value, depth]),
            tma_desc(out, [rows, HALF.value]), x.scales, weight.scales, len(x), outputs,
            grid.m_tiles, grid.n_tiles, grid.k_blocks, grid.band, half_offset, GATE=gate or "",
            num_warps=4, maxnreg=168, **dependent_launch(codes.device),
        )  # fmt: skip
        return out
