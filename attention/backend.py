"""The Backend protocol, and the choice of a back end: by name and capability, never silently."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta


class UnsupportedAttention(ValueError):
    """The asked-for back end cannot run here; the message names the remedy."""


class Backend(Protocol):
    name: str

    def plan(self, meta: ForwardMeta, kv: KVPool) -> ForwardMeta:
        """Prepare once a step what every layer will use; kv is the pool that the step will use."""
        ...

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: ForwardMeta) -> None:
        """Store k, v [T, kv_heads, head_dim] of this step at meta.write_slots."""
        ...

    def attend(
        self, q: Tensor, kv: KVPool, layer: int, meta: ForwardMeta, *, scale: float
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each row's pages -> like q.

        Query i of row b sits at position cache_seqlens[b] - q_len[b] + i and sees all positions up
        to its own; this step's K and V have been written before.
        """
        ...


def choose(device: torch.device, requested: str) -> Backend:
    """The back end for `--attention requested` on this device.

    Raises UnsupportedAttention, naming what would work, if there is no such back end here.
    """
    from attention.reference import ReferenceBackend

    if requested in ("auto", "mha"):
        return ReferenceBackend()
    raise UnsupportedAttention(
        f"--attention {requested} is not available on {device.type} in this version: "
        "use --attention mha or auto"
    )
