"""ModelInput: the one argument of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepImages:
    """What a step that computes tokens of images needs beside their ids.

    features   [F, 1 + deepstack, hidden]: of tokens of images, as VisionEncoder.encode.  Rows that
               `index` does not name may hold anything
    index      [T] int64: the row of `features` of each token of the step; -1: it is of text, or of
               padding
    positions  [3, T] int64: frame, row and column of each token, for the rope
    """

    features: Tensor
    index: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class ModelInput:
    """tokens, positions: [T] int64; ends: [R] int64, the last token of each row.

    The model returns the hidden states at `ends`: the last layer drops the other tokens once their
    keys and values are stored.  None: it returns those of all tokens.
    positions are those of the rope: where images come before, they differ from places in the KV.
    images: None if no token of the step is of an image
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor | None
    meta: AttentionMetadata
    kv: KVPool
    backend: Backend
    images: StepImages | None = None
