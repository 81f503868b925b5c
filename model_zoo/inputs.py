"""ModelInput: the one argument of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ModelInput:
    """tokens, positions: [T] int64; ends: [R] int64, the last token of each row.

    The model returns the hidden states at `ends`: the last layer drops the other tokens once their
    keys and values are stored.  None: it returns those of all tokens.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor | None
    meta: AttentionMetadata
    kv: KVPool
    backend: Backend
