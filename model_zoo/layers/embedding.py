"""Token embedding and the output head, which may share its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.linear import can_pack, packed_linear


class Embedding(nn.Module):
    """weight [rows, size]; ids [T] -> [T, size]."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """hidden [R, size] -> logits [R, vocab] float32; `tied` is the embedding that it shares."""

    def __init__(self, vocab: int, size: int, dtype: torch.dtype, tied: Embedding | None) -> None:
        super().__init__()
        self.weight = (
            nn.Parameter(torch.empty(vocab, size, dtype=dtype), requires_grad=False)
            if tied is None
            else tied.weight
        )
        self._packed: Tensor | None = None

    def prepare(self) -> None:
        """As Linear.prepare(); the plain weights stay, the embedding may need them."""
        if self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(hidden, self.weight).float()
        return packed_linear(hidden, self._packed, None).float()
