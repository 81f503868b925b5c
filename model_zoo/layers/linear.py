"""Linear: y = x W^T + b, with the fast path of CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """weight [out, in], bias [out] or None.  Call prepare() once the weights are loaded."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        )
        self._packed: Tensor | None = None

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

    def forward(self, x: Tensor) -> Tensor:
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
