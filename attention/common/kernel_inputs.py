"""KernelInputs: what the attention kernels take besides their plans."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor


def _is_float32_row(tensor: Tensor, dim: int = 0) -> bool:
    return tensor.dtype == torch.float32 and tensor.stride(dim) == 1


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
        q, k, v, out, table, lse = self.q, self.k, self.v, self.out, self.page_table, self.lse
        heads, kv_heads = q.shape[1], k.shape[1]
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
        assert out.shape == q.shape and k.shape == v.shape and k.shape[3] == q.shape[2]
        assert heads % kv_heads == 0 and out.dtype == q.dtype and k.dtype == v.dtype
        assert table.dtype == torch.int32 and table.stride(1) == 1
        assert lse is None or (lse.shape == out.shape[:2] and _is_float32_row(lse, 1))
        assert self.sinks is None or (self.sinks.shape == (heads,) and _is_float32_row(self.sinks))
        fp8 = k.dtype == torch.float8_e4m3fn
        assert fp8 or k.dtype == q.dtype
        for scale in (self.k_scale, self.v_scale):
            assert (scale is not None) == fp8, "scales belong to float8 pages"
            assert scale is None or (scale.shape == (kv_heads,) and _is_float32_row(scale))

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
