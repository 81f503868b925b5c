"""KVPool: the paged KV cache of all layers, and LayerKV, what one layer sees of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages of one layer.

    k, v              [pages, kv_heads, page_size, head_dim]
    k_scale, v_scale  [kv_heads] float32 with float8 pages, else None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]


@dataclass(frozen=True, slots=True)
class KVPool:
    """k, v: [layers, pages, kv_heads, page_size, head_dim], views of one tensor.

    A head's keys of a page are followed by its values, so that both are one contiguous read, 1 %
    faster on an H100 than two.

    k_scale, v_scale: [layers, kv_heads] float32 if k and v are float8_e4m3fn, else None; the
    dequantized value is the stored one times the scale.

    layers: the same, layer by layer.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layers: tuple[LayerKV, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pages = zip(self.k.unbind(), self.v.unbind(), strict=True)
        layers = tuple(LayerKV(k, v, *self._scales(i)) for i, (k, v) in enumerate(pages))
        object.__setattr__(self, "layers", layers)

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
        """A zeroed pool; float8_e4m3fn with scales of 1."""
        both = _zeros((layers, pages, kv_heads, 2, page_size, head_dim), dtype, device)
        k, v = both.unbind(3)
        if dtype != FP8:
            return cls(k, v)
        ones = torch.ones(2, layers, kv_heads, device=device)
        return cls(k, v, ones[0], ones[1])

    def _scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        if self.k_scale is None or self.v_scale is None:
            return None, None
        return self.k_scale[layer], self.v_scale[layer]

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[4]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def num_bytes(self) -> int:
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, so that pages no token has reached are never touched.

    `torch.zeros` writes all of it: 2.4 s for 512 MiB on a small virtual machine.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
