"""Attention of packed sequences in float64, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the largest value: weights and results are rounded to the type.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def make_qkv(
    lens: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> Tensor:
    """[T, 3, heads, head_dim] of random numbers, whose scores are large enough to tell keys."""
    torch.manual_seed(7)
    qkv = torch.randn(sum(lens), 3, heads, head_dim)
    qkv[:, :2] *= 1.5
    return qkv.to(device, dtype)


def oracle(qkv: Tensor, lens: tuple[int, ...]) -> Tensor:
    """[T, heads, head_dim] float64"""
    found: list[Tensor] = []
    for sequence in qkv.double().split(lens):
        q, k, v = sequence.transpose(0, 2).unbind(1)  # [heads, rows, head_dim]
        scores = q @ k.mT / qkv.shape[-1] ** 0.5
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


def error(out: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    return float((out.double() - expected).abs().max() / expected.abs().max())
