"""Token embedding and the output head, which may share its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.linear import Linear


class Embedding(nn.Module):
    """weight [rows, size]; ids [T] -> [T, size]."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(Linear):
    """hidden [R, size] -> logits [R, vocab] like it; `tied` is the embedding that it shares."""

    def __init__(self, vocab: int, size: int, dtype: torch.dtype, tied: Embedding | None) -> None:
        super().__init__(size, vocab, bias=False, dtype=dtype)
        self._tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    def prepare(self, *, keep_weight: bool = False) -> None:
        super().prepare(keep_weight=keep_weight or self._tied)
