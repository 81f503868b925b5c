"""KVPool: the paged KV cache of all layers, and LayerKV, what one layer sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention.kv_groups import KVLayout
from attention.state_pool import StatePool, zeros

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages as one layer sees them.

    group             whose page table names the pages of this layer
    k, v              [pages, kv_heads, page_size, head_dim]
    k_scale, v_scale  [kv_heads] float32 with float8 pages, else None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    group: int = 0

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
    """k, v: [depth, pages, kv_heads, page_size, head_dim], views of one tensor.

    A head's keys of a page are followed by its values, so that both are one contiguous read, 1 %
    faster on an H100 than two.

    k_scale, v_scale: [layers, kv_heads] float32 if k and v are float8_e4m3fn, else None; the
    dequantized value is the stored one times the scale.

    layout: which layers share pages; without it, all do, and `depth` is the number of layers.
    layers: what each layer with attention sees.

    states: of the layers without attention; None: there are none.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layout: KVLayout | None = None
    states: StatePool | None = None
    layers: tuple[LayerKV, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layout = self.layout or KVLayout.uniform(len(self.k))
        assert layout.depth == len(self.k), "the layout is for another pool"
        k, v = self.k.unbind(), self.v.unbind()
        layers = tuple(
            LayerKV(k[place], v[place], *self._scales(layer), group=group)
            for layer, (group, place) in enumerate(layout.places())
        )
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "layers", layers)

    @classmethod
    def allocate(
        cls,
        *,
        layers: int | KVLayout,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
    ) -> KVPool:
        """A zeroed pool; float8_e4m3fn with scales of 1.  layers: how many, or their layout."""
        layout = KVLayout.uniform(layers) if isinstance(layers, int) else layers
        both = zeros((layout.depth, pages, kv_heads, 2, page_size, head_dim), dtype, device)
        k, v = both.unbind(3)
        if dtype != FP8:
            return cls(k, v, layout=layout, states=states)
        ones = torch.ones(2, layout.num_layers, kv_heads, device=device)
        return cls(k, v, ones[0], ones[1], layout, states)

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
        """Of keys and values."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
