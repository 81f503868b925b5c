"""encoder_attention: each row attends to all rows of its sequence, by the kernel for the device."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.dispatch import HALF_DTYPES, Machine
from attention.encoder.seqlens import Seqlens

KernelName = Literal["varlen_hopper", "varlen", "sdpa"]
HEAD_DIMS = (64, 72, 80)  # of our kernels


def encoder_attention(qkv: Tensor, seqlens: Seqlens, *, kernel: KernelName | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v within each sequence -> [T, heads, head_dim].

    qkv     [T, 3, heads, head_dim] bf16, fp16 or fp32: queries, keys and values of all sequences;
            rows at any stride.  SDPA takes no padded ones
    kernel  None: that for the device
    """
    assert qkv.shape[1] == 3 and len(qkv) == seqlens.total
    kernel = kernel or kernel_for(qkv.device, qkv.shape[-1], qkv.dtype)
    if kernel == "varlen_hopper":
        from attention.encoder.varlen_hopper import varlen_hopper

        return varlen_hopper(qkv, seqlens)
    if kernel == "varlen":
        from attention.encoder.varlen import varlen

        return varlen(qkv, seqlens)
    return _sdpa(qkv, seqlens)


@cache
def kernel_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> KernelName:
    """Triton supports GPUs from compute capability 8.0 on; others, CPUs, and heads of other sizes
    than HEAD_DIMS run PyTorch's.

    For compute capability 9.0 ptxas compiles the plain kernel wrongly in half precision.
    """
    machine = Machine.of(device)
    capability = machine.capability
    if capability is None or capability < (8, 0) or not machine.triton or head_dim not in HEAD_DIMS:
        return "sdpa"
    return "varlen_hopper" if capability[0] == 9 and dtype in HALF_DTYPES else "varlen"


def _sdpa(qkv: Tensor, seqlens: Seqlens) -> Tensor:
    """One sequence after the other."""
    assert not seqlens.padded, "lengths are read on the host"
    found: list[Tensor] = []
    for sequence in qkv.split(seqlens.lens):
        q, k, v = (one.transpose(0, 1)[None] for one in sequence.unbind(1))
        found.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)
