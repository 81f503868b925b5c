"""OneDnnInt8: y = x W^T + b of int8 weights and activations on a CPU; what a device multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.implementations import supports_kernels
from model_zoo.layers.padded_rows import padded_rows
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, unpack_codes

# Which schemes a device multiplies as they are packed: all, none, or those of int8 W8A8.
Packs = bool | Literal["int8"]
MIDDLE = 128  # oneDNN takes activations of 0 to 255, and those of int8 take seconds
LARGEST = 127.0
LEAST = 1e-10  # in place of a largest value of 0


def packs_of(device: torch.device, dtype: torch.dtype) -> Packs:
    """dtype: of activations.  Of a CPU without VNNI, sums of pairs are cut off at 16 bits."""
    if device.type != "cpu":
        return supports_kernels(device, dtype)
    known = dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    return "int8" if known and torch.cpu._is_vnni_supported() else False


@dataclass(frozen=True, slots=True, eq=False)
class OneDnnInt8:
    """A weight in oneDNN's order.  Activations are quantized as quantize_rows does it.

    weight  of torch.ops.onednn.qlinear_prepack
    scales  [N] float32
    sums    [N] float32: of the numbers of a row, times its scale; of activations with zero points
    """

    name = "int8 (oneDNN)"
    weight: Tensor
    scales: Tensor
    sums: Tensor | None

    @classmethod
    def of(cls, weight: PackedWeight) -> OneDnnInt8:
        numbers = (unpack_codes(weight.words, "int8") ^ MIDDLE).view(torch.int8)
        scales = weight.scales.flatten().float()
        sums = None if weight.sums is None else weight.sums * scales
        return cls(torch.ops.onednn.qlinear_prepack(numbers, None), scales, sums)

    def run(self, x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
        """x [M, K], bias [N] -> x W^T + bias [M, N]; weight: is not read."""
        rows = len(x)
        codes, scales, zeros = self._quantized(x.float())
        codes = F.pad(codes, (0, 0, 0, padded_rows(rows) - rows))
        zero_points = torch.zeros(len(self.scales), dtype=torch.int64)
        y = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, MIDDLE, self.weight, self.scales, zero_points, None, 1.0, 0,
            torch.float32, "none", [], "",
        )[:rows]  # fmt: skip
        if self.sums is not None:
            y += (MIDDLE - zeros) * self.sums
        y *= scales
        return (y if bias is None else y + bias).to(x.dtype)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, K] float32 -> (codes uint8, scales [M, 1], zero points [M, 1])."""
        if self.sums is None:
            scales = x.abs().amax(1, keepdim=True).clamp_min_(LEAST) / LARGEST
            zeros = torch.full_like(scales, MIDDLE)
        else:
            least = x.amin(1, keepdim=True).clamp_max_(0)
            span = x.amax(1, keepdim=True).clamp_min_(0) - least
            scales = span.clamp_min_(LEAST) / (2 * LARGEST + 1)
            zeros = (-least / scales).round_()
        codes = (x / scales).round_().add_(zeros).clamp_(0, 2 * LARGEST + 1)
        return codes.to(torch.uint8), scales, zeros
