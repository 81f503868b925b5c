"""Linear: y = x W^T + b, with the fast paths of CPUs, and of GPUs for few rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm.implementations import BUCKETS, GemmImpl
from model_zoo.layers.gemm.swiglu import SIZES

# Rows from which cuBLAS had better add a product to the residual: on an H100 that and a norm took
# 2 % less of a layer of 1667 rows than a product and then sum and norm.  With 803 rows a product
# that adds took up to 5 % longer; whether that is more than is saved has not been measured.
MANY_ROWS = 1024


class Linear(nn.Module):
    """weight [out, in], bias [out] or None.  Call prepare() once the weights are loaded."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        )
        self._packed: Tensor | None = None
        self._gemms: list[GemmImpl | None] = []  # by the number of rows
        self._fallback: GemmImpl | None = None  # for more of them

    def prepare(self, *, keep_weight: bool = False) -> None:
        """On a CPU, lay the weights out as oneDNN reads them, in place of the plain ones.

        `keep_weight` if another layer shares the plain ones.  Packed, a product takes a third to
        nine tenths of the time, in float32 as in bfloat16, for one row as for 256 (Zen 5, one
        thread).  Filling up one row to four, which helps older CPUs, costs time there.
        """
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if not keep_weight:
                self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def use_gemms(self, gemms: Mapping[int, GemmImpl], fallback: GemmImpl | None = None) -> None:
        """From now on compute like this: BUCKETS' numbers of rows, and those below, by a product.

        beyond  what is not there, and more rows; None: cuBLAS
        Which product serves depends on the number of rows alone, so that a graph may be captured.
        """
        below = [0, *BUCKETS]
        self._gemms, self._fallback = [fallback], fallback
        for before, rows in pairwise(below):
            self._gemms += [gemms.get(rows, fallback)] * (rows - before)

    @property
    def is_fixed(self) -> bool:
        """Whether every number of rows has its product, and none is left to choose."""
        return self._fallback is not None

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """x [T, in], residual [T, out] -> (what is to be added, or None, residual).

        None: it is in residual already, added by cuBLAS with the error of a rounded product that
        is added and rounded again.
        """
        adds = self._fallback is None and self.bias is None and len(x) >= MANY_ROWS
        if (
            adds
            and fused_kernels.use_fused_kernels(x.device)
            and x.dtype in (torch.bfloat16, torch.float16)
        ):
            return None, residual.addmm_(x, self.weight.t())
        return self(x), residual

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        gemm = self._gemms[len(x)] if len(x) < len(self._gemms) else self._fallback
        if gemm is not None:
            return gemm.run(x.contiguous(), self.weight, self.bias)
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class SwigluLinear(Linear):
    """silu(gate) * up (arXiv 2002.05202): weight [2 * out, in], gates and then ups."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, 2 * outputs, bias=bias, dtype=dtype)
        self._ways: list[GemmImpl | None] = []  # for each of SIZES

    def use_swiglu(self, ways: Mapping[int, GemmImpl]) -> None:
        """From now on compute like this: SIZES' numbers of rows, and fewer, by a product.

        More rows are computed as the most.  What is not there, and BUCKETS' rows, are computed as
        Linear does.
        """
        self._ways = [ways.get(size) for size in SIZES]

    def swiglu(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self._ways and len(x) > BUCKETS[-1]:
            way = self._ways[min(bisect_left(SIZES, len(x)), len(SIZES) - 1)]
            if way is not None:
                return way.run(x.contiguous(), self.weight, self.bias)
        both = self(x)
        if fused_kernels.use_fused_kernels(x.device):
            from model_zoo.layers.kernels.silu_mul import silu_mul

            return silu_mul(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


def can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and cpu_packs(weight.dtype)


def cpu_packs(dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of PyTorch have oneDNN's kernels for weights of the type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
