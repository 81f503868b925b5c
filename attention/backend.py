"""Backend: the protocol that attention back ends implement, and the sizes one is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention.kv_pool import KVPool, LayerKV
from attention.metadata import AttentionMetadata

# A program of stream-k's planner holds 8 bytes a row in shared memory; 128 KiB of twice as many.
# Shared memory is carved out of the L1 cache: GPUs of compute capability 8.6 and 8.9 have up to 100
# KB of it on an SM, 1 KB of which is the driver's for each block (NVIDIA Ampere GPU Architecture
# Tuning Guide, "Unified Shared Memory/L1/Texture Cache").
# Compiling it takes ten seconds for this many rows, a minute for twice as many.
MAX_PLANNED_ROWS = 8192


class UnsupportedAttention(ValueError):
    """The requested back end cannot run on this device or model; the message names the remedy."""


class Backend(Protocol):
    name: str  # the value of --attention
    details: str  # which kernels run, for the start report
    # All lengths are read on the device, so that a step can be captured in a CUDA graph.
    reads_lengths_on_device: bool

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Compute once per step what every layer uses, such as work tiles -> meta with a plan."""
        ...

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Store k, v [T, kv_heads, head_dim] of this step at the slot mapping of kv.group.

        Float8 pages store value / scale, clamped to the type's range.  A model with a fused kernel
        that rotates keys and stores them does not call this.
        """
        ...

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
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

        window   sliding window: a query sees the last `window` of these; 0: all
        softcap  logits become softcap * tanh(logit / softcap); 0: unchanged
        sinks    [heads] float32, attention sinks: one more logit in each softmax sum, no value
        lse      [T, heads] float32, output: natural log of each query's softmax sum
        Raises UnsupportedAttention for a window that the back end was not built for.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A back end, its decode and prefill kernels, and the split planner of the decode kernel."""

    backend: str
    decode: str = "torch"
    prefill: str = "torch"
    planner: str = ""
    reason: str = ""  # why `auto` fell back

    @property
    def max_rows(self) -> int | None:
        """Rows of the largest step; None: no limit."""
        return MAX_PLANNED_ROWS if self.backend in ("flash2", "batch-invariant") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The attention of one model, for which a back end is built."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of q, and of K and V before the write
    kv_dtype: torch.dtype  # of the pages

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest step that a back end allocates for."""

    rows: int
    tokens: int
    row_tokens: int = 1  # tokens of a decode row: more than one with speculative decoding

    def check(self, rows: int, tokens: int) -> None:
        """Raise ValueError for a larger step."""
        if rows > self.rows or tokens > self.tokens:
            raise ValueError(
                f"a step of {rows} rows and {tokens} tokens, and the attention back end was made "
                f"for {self.rows} and {self.tokens}"
            )
