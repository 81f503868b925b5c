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

    Only the states of `ends` come out of the model: the last layer goes on with those alone once it
    has stored its keys and values.  None: the states of all tokens do.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor | None
    meta: AttentionMetadata
    kv: KVPool
    backend: Backend
