"""ModelInput: the one argument of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta


@dataclass(frozen=True, slots=True)
class ModelInput:
    """tokens, positions: [T] int64; logit_rows: [R] int64, the tokens whose logits are wanted."""

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    meta: ForwardMeta
    kv: KVPool
    backend: Backend
