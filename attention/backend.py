"""Backend: the protocol of three methods; which back end is chosen, and what it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata

# A program of a plan kernel holds 8 bytes a row in shared memory, and some GPUs give it 99 KiB.
# Compiled for so many rows it takes ten seconds, for twice as many a minute.
MAX_PLANNED_ROWS = 8192


class UnsupportedAttention(ValueError):
    """The asked-for back end cannot run here, or not that; the message names the remedy."""


class Backend(Protocol):
    name: str  # as --attention has it
    details: str  # which kernels run, for the start report
    # All lengths are read on the device, so that a CUDA graph may hold a step.
    reads_lengths_on_device: bool

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Prepare once a step what every layer will use; kv is the pool that the step will use."""
        ...

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: AttentionMetadata) -> None:
        """Store k, v [T, kv_heads, head_dim] of this step at meta.slot_mapping.

        In float8 pages: value / scale, cut to the largest number that there is.
        A model may do it itself, where a kernel of its own turns keys and stores them at once.
        """
        ...

    def attend(
        self,
        q: Tensor,
        kv: KVPool,
        layer: int,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each row's pages -> like q.

        Query i of row b sits at position cache_seqlens[b] - q_len[b] + i and sees all positions up
        to its own; this step's K and V have been written before.

        window   of these a query sees the last so many; 0: all
        softcap  logits become softcap * tanh(logit / softcap); 0: they stay
        sinks    [heads] float32, one more logit in each query's sum, without a value
        lse      [T, heads] float32, is filled with the natural log of each query's sum
        Raises UnsupportedAttention for what the back end was not made for.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A back end, its kernels for rows that decode and for prompts, and who plans the former."""

    backend: str
    decode: str = "torch"
    prefill: str = "torch"
    planner: str = ""
    reason: str = ""  # why `auto` took nothing better

    @property
    def max_rows(self) -> int | None:
        """Rows of the largest step; None: any number."""
        return MAX_PLANNED_ROWS if self.backend in ("flash2", "fixed") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a back end serves: one model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of q, and of K and V before they are stored
    kv_dtype: torch.dtype  # of the pages

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest step."""

    rows: int
    tokens: int

    def check(self, rows: int, tokens: int) -> None:
        """Raises ValueError for a step that is larger."""
        if rows > self.rows or tokens > self.tokens:
            raise ValueError(
                f"a step of {rows} rows and {tokens} tokens, and the attention back end was made "
                f"for {self.rows} and {self.tokens}"
            )
