"""Linear: y = x W^T + b, with packed weights on CPUs and autotuned GEMMs on GPUs."""

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

# From this many rows on, cuBLAS adds the output to the residual (addmm): on an H100, addmm and norm
# took 2 % less of a layer of 1667 rows than a GEMM followed by a fused sum and norm.  With 803 rows
# addmm took up to 5 % longer than a GEMM; the total has not been measured there.
MIN_ADDMM_ROWS = 1024


class Linear(nn.Module):
    """weight [out, in], bias [out] or None.  Call prepare() once the weights are loaded."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        )
        self._packed: Tensor | None = None
        self._gemms: list[GemmImpl | None] = []  # indexed by the number of rows
        self._fallback: GemmImpl | None = None  # for more rows

    def prepare(self, *, keep_weight: bool = False) -> None:
        """On a CPU, replace the weight by oneDNN's packed layout.

        keep_weight: another layer shares the plain weight.  A packed GEMM takes a third to nine
        tenths of the time, in float32 and bfloat16, for 1 to 256 rows (Zen 5, one thread).  Padding
        one row to four, which helps older CPUs, costs time there.
        """
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if not keep_weight:
                self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def use_gemms(self, gemms: Mapping[int, GemmImpl], fallback: GemmImpl | None = None) -> None:
        """Set the GEMM for each bucket of rows in BUCKETS; a bucket covers smaller numbers too.

        fallback  for buckets that are not in gemms, and for more rows; None: cuBLAS
        The GEMM depends on the number of rows only, so that a CUDA graph can capture it.
        """
        below = [0, *BUCKETS]
        self._gemms, self._fallback = [fallback], fallback
        for before, rows in pairwise(below):
            self._gemms += [gemms.get(rows, fallback)] * (rows - before)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether use_gemms has set a GEMM for any number of rows, so that none is autotuned."""
        return self._fallback is not None

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """x [T, in], residual [T, out] -> (output or None, residual).

        None: cuBLAS added the output to residual, in place, with the error of a rounded output that
        is added and rounded again.
        """
        adds = self._fallback is None and self.bias is None and len(x) >= MIN_ADDMM_ROWS
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
    """silu(gate) * up (arXiv 2002.05202); weight [2 * out, in]: gate rows, then up rows."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, 2 * outputs, bias=bias, dtype=dtype)
        self._swiglu_gemms: list[GemmImpl | None] = []  # one for each of SIZES

    def use_swiglu(self, gemms: Mapping[int, GemmImpl]) -> None:
        """Set the fused GEMM for each number of rows in SIZES, which covers smaller numbers too.

        More rows use that of the largest size.  Sizes that are not in gemms, and rows up to the
        largest of BUCKETS, use Linear's GEMM and silu_mul.
        """
        self._swiglu_gemms = [gemms.get(size) for size in SIZES]

    def swiglu(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self._swiglu_gemms and len(x) > BUCKETS[-1]:
            gemm = self._swiglu_gemms[min(bisect_left(SIZES, len(x)), len(SIZES) - 1)]
            if gemm is not None:
                return gemm.run(x.contiguous(), self.weight, self.bias)
        both = self(x)
        if fused_kernels.use_fused_kernels(x.device):
            from model_zoo.layers.kernels.silu_mul import silu_mul

            return silu_mul(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


def can_pack(weight: Tensor) -> bool:
    """Whether `prepare` packs the weight."""
    return weight.device.type == "cpu" and cpu_packs(weight.dtype)


def cpu_packs(dtype: torch.dtype) -> bool:
    """Whether this CPU and PyTorch build have oneDNN's packed GEMM for weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
