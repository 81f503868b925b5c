"""KVPool: the keys and values of every layer, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPool:
    """k, v: [layers, pages, kv_heads, page_size, head_dim]."""

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVPool:
        shape = (layers, pages, kv_heads, page_size, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes
