"""Linear: y = x W^T + b, with the CPU's fast path for bfloat16."""

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

    def prepare(self) -> None:
        """On a CPU, lay bfloat16 weights out as oneDNN reads them; they replace the plain ones."""
        if self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return packed_linear(x, self._packed, self.bias)


def can_pack(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
