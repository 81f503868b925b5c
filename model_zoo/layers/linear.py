"""Linear: y = x W^T + b, with the fast paths of CPUs, and of GPUs for few rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.gemm.products import BUCKETS


class Product(Protocol):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        ...


class Linear(nn.Module):
    """weight [out, in], bias [out] or None.  Call prepare() once the weights are loaded."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        )
        self._packed: Tensor | None = None
        self._products: list[Product | None] = []  # by the number of rows
        self._beyond: Product | None = None  # for more of them

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

    def use_products(self, products: Mapping[int, Product], beyond: Product | None = None) -> None:
        """From now on compute like this: BUCKETS' numbers of rows, and those below, by a product.

        beyond  what is not there, and more rows; None: cuBLAS
        Which product serves depends on the number of rows alone, so that a graph may be captured.
        """
        below = [0, *BUCKETS]
        self._products, self._beyond = [beyond], beyond
        for before, rows in pairwise(below):
            self._products += [products.get(rows, beyond)] * (rows - before)

    @property
    def is_settled(self) -> bool:
        """Whether every number of rows has its product, and none is left to choose."""
        return self._beyond is not None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        product = self._products[len(x)] if len(x) < len(self._products) else self._beyond
        if product is not None:
            return product.run(x.contiguous(), self.weight, self.bias)
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this CPU and this build of PyTorch have oneDNN's kernels for the weight's type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
