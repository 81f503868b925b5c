"""AttentionSpec: what the attention of one layer is like.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer; layers with the same windows can share pages of KV."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the logits
    window: int = 0  # a query sees the last `window` positions, its own included; 0: all
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: unchanged
    has_sinks: bool = False  # one more logit in each head's softmax sum, without a value
