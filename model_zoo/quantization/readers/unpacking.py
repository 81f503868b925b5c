"""Codes out of the words and bytes that hold several of them."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., B] uint8 -> [..., 2 B] uint8: the low four bits of a byte, then the high ones."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., 32 W / bits] uint8: the code at the lowest bits of a word first."""
    # One dimension: the last of several has no stride of 1 where its size is 1.
    codes = words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    return codes if bits == 8 else unpack_nibbles(codes)
