"""KernelInputs: what the attention kernels take besides their plans."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """The tensors of one layer and step, with stride 1 in their last dimension.

    q, out      [T, heads, D]; a kernel writes the rows of out that its plan has
    k, v        [pages, kv_heads, page, D] of one layer, of q's type or float8_e4m3fn
    page_table  [B, max_pages] int32
    lse         [T, heads] float32, natural log of the softmax sum, -inf for a query without keys
    softcap     logits become softcap * tanh(logit / softcap); 0: unchanged
    sinks       [heads] float32, one more logit in each query's sum
    k_scale, v_scale  [kv_heads] float32: dequantization scales, exactly with float8 pages
    """

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor
    out: Tensor
    lse: Tensor | None = None
    _: KW_ONLY
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        q, k, v, out = self.q, self.k, self.v, self.out
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1

    def strides(self) -> tuple[int, ...]:
        """Of q, page_table, k, v, out and lse, in the order of the kernels' parameters."""
        token, head, *_ = self.q.stride()
        kv = (*self.k.stride()[:3], *self.v.stride()[:3])
        return token, head, self.page_table.stride(0), *kv, *self.out_strides()

    def out_strides(self) -> tuple[int, int, int]:
        """Of out's tokens and heads, and lse's tokens."""
        return self.out.stride(0), self.out.stride(1), 0 if self.lse is None else self.lse.stride(0)

    @property
    def precision(self) -> str:
        """Of tl.dot: tensor cores would round float32."""
        return "ieee" if self.q.dtype == torch.float32 else "tf32"
