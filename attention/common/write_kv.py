# write_kv: writes the step's K and V into the paged KV cache, both in one launch.
#   grid      (T, head tiles): a program copies up to 1024 elements of K and as many of V
#   reads     new_k, new_v [T, kv_heads, D] bf16, fp16 or fp32, rows and heads at any stride;
#             slot_mapping [T] int64; k_scale, v_scale [kv_heads] fp32 if the pages hold fp8
#   writes    k, v [pages, kv_heads, page_size, D] at (slot // page_size, head, slot % page_size)
#   skips     tokens whose slot is negative: the padding of a captured graph
#   math      a cast; for fp8, value / scale, clamped to +-448 (the e4m3 range), NaN stays NaN
#   bound     memory: 2 * T * kv_heads * D * (input + stored bytes)
#   checked   tests/attention/common/test_write_kv.py against plain torch indexing
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait

MAX_FP8: tl.constexpr = tl.constexpr(448.0)
TILE = 1024  # elements of each of K and V per program: 16 bytes per thread


@triton.jit
def to_pages(values, scale_ptr, head, head_mask, HAS_SCALE: tl.constexpr, dtype: tl.constexpr):
    """values [heads, D] -> the pages' dtype, quantized with one scale per head."""
    if HAS_SCALE:
        scale = tl.load(scale_ptr + head, mask=head_mask, other=1.0)[:, None]
        # Not 0, whose division takes a slow branch: heads past the last one doubled the time.
        # Columns past a head's end, which head_dim 128 does not have, still take it.
        values = tl.where(head_mask[:, None], values.to(tl.float32), 1.0)
        values = tl.div_rn(values, scale)
        values = tl.clamp(values, -MAX_FP8, MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)


@triton.jit
def _write_kv(
    new_k, new_v, k, v, slot_mapping, k_scale, v_scale,
    stride_new_k_token, stride_new_k_head, stride_new_v_token, stride_new_v_head,
    stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head, stride_v_token,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr,  # per tile, a power of two
    DIM: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    HAS_SCALE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if DEPENDENT:
        start_successor_and_wait()
    if slot >= 0:
        page, cell = slot // PAGE, slot % PAGE
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dim = tl.arange(0, DIM)
        head_mask = head < KV_HEADS
        mask = head_mask[:, None] & (dim < HEAD_DIM)[None, :]
        source = new_k + token * stride_new_k_token + head[:, None] * stride_new_k_head
        keys = tl.load(source + dim[None, :], mask=mask)
        source = new_v + token * stride_new_v_token + head[:, None] * stride_new_v_head
        values = tl.load(source + dim[None, :], mask=mask)
        wide = head.to(tl.int64)[:, None]
        target = k + page * stride_k_page + wide * stride_k_head + cell * stride_k_token
        keys = to_pages(keys, k_scale, head, head_mask, HAS_SCALE, k.dtype.element_ty)
        tl.store(target + dim[None, :], keys, mask=mask)
        target = v + page * stride_v_page + wide * stride_v_head + cell * stride_v_token
        values = to_pages(values, v_scale, head, head_mask, HAS_SCALE, v.dtype.element_ty)
        tl.store(target + dim[None, :], values, mask=mask)


def write_kv(
    new_k: Tensor,
    new_v: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store new_k, new_v [T, kv_heads, head_dim] into one layer's pages at slot_mapping [T] int64.

    k, v:     [pages, kv_heads, page_size, head_dim] with stride 1 in the last dimension
    k_scale, v_scale: [kv_heads] float32, exactly if the pages are float8_e4m3fn, which store
              value / scale, clamped to the type's range
    Tokens with a negative slot are skipped.  Slots are not checked against the number of pages.
    """
    tokens, kv_heads, head_dim = new_k.shape
    fp8 = k.dtype == torch.float8_e4m3fn
    assert new_v.shape == new_k.shape and k.shape == v.shape and k.dtype == v.dtype
    assert k.shape[1] == kv_heads and k.shape[3] == head_dim
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    assert new_k.stride(2) == new_v.stride(2) == k.stride(3) == v.stride(3) == 1
    assert (k_scale is not None) == (v_scale is not None) == fp8, "scales belong to fp8 pages"
    if tokens == 0:
        return
    dim = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, TILE // dim))
    _write_kv[(tokens, triton.cdiv(kv_heads, heads))](
        new_k, new_v, k, v, slot_mapping, k_scale, v_scale,
        *new_k.stride()[:2], *new_v.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=k.shape[2], HEADS=heads, DIM=dim,
        HAS_SCALE=fp8, num_warps=max(1, min(4, heads * dim // 256)), **dependent_launch(k.device),
    )  # fmt: skip
