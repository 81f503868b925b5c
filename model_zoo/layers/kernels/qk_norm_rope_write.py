# qk_norm_rope_write: all between a layer's qkv GEMM and attention, in one launch.
#   grid      (T, head tiles): tiles of query heads, then of key heads, then of value heads; without
#             norm and rope there are no tiles of query heads
#   reads     qkv [T, (heads + 2 * kv_heads) * D] bf16, fp16 or fp32, with gates D more values after
#             each head's query; cos_sin [T, R], cos in the first R / 2 columns and sin in the rest,
#             or none: R <= D values of a head are rotated; q_weight, k_weight [D] of the norms, or
#             none; slot_mapping [T] int64; k_scale, v_scale [kv_heads] fp32 if pages hold fp8;
#             scales of qkv's rows and columns, if it is UnscaledRows
#   writes    queries in place; keys and values into k, v [pages, kv_heads, page_size, D] at
#             (slot // page_size, head, slot % page_size)
#   skips     keys and values of tokens whose slot is negative: the padding of a captured graph
#   math      sums of squares in fp32; rounded to the type of qkv after the norm, after its weight,
#             after each product of the rotation and after their sum, as PyTorch's operations.
#             With PLUS_ONE, 1 is added to the weights in fp32, and their product is rounded once
#   launch    dependents are launched at once; before the wait it reads weights, columns' scales
#             and slots.
#             Attention may copy keys and values of earlier steps while this runs, which
#             writes only the positions of this step's tokens
#   bound     memory: T * (heads + 2 * kv_heads) * D * 2 * bytes
#   checked   tests/model_zoo/layers/test_qk_norm_rope_write.py against PyTorch's operations
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from attention.common.write_kv import to_pages
from model_zoo.layers.kernels.add_rms_norm import scaled
from model_zoo.layers.quantized_rows import UnscaledRows, parts_of

FEW_TOKENS = 64  # up to here a launch is bound by latency


@triton.jit
def _halves(lane, D: tl.constexpr, R: tl.constexpr):
    """Lanes -> the places in a head of its two halves, in which lane i has both of pair i.

    The lanes beyond the R / 2 pairs have the values that are not rotated.
    """
    HALF: tl.constexpr = (D + 1) // 2
    low, high = lane, lane + HALF
    if R < D:
        low = tl.where(lane < R // 2, lane, lane + R // 2)
        high = tl.where(lane < R // 2, lane + R // 2, lane + HALF)
    return low, high


@triton.jit
def _norm(low, high, low_weight, high_weight, eps, D: tl.constexpr, PLUS_ONE: tl.constexpr):
    """RMSNorm of heads given as halves [heads, D / 2]; masked elements are 0."""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(low * low + high * high, 1, keep_dims=True)
    factor = tl.rsqrt(squares / D + eps)
    low, high = low * factor, high * factor
    low_weight, high_weight = low_weight.to(tl.float32), high_weight.to(tl.float32)
    if PLUS_ONE:
        return (low * (1.0 + low_weight)).to(dtype), (high * (1.0 + high_weight)).to(dtype)
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    return (low * low_weight).to(dtype), (high * high_weight).to(dtype)


@triton.jit
def _rotate(low, high, cos, sin):
    """Rope of halves of heads: (low, high) * cos + (-high, low) * sin, each product rounded."""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    new_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return new_low.to(dtype), new_high.to(dtype)


@triton.jit
def _normed_and_rotated(
    row, first, ROW_SCALES, COLUMN_SCALES, WEIGHT, COS_SIN, at_token, eps, lane, at_low, at_high,
    low_mask, high_mask, D: tl.constexpr, R: tl.constexpr, PLUS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile of heads, which begin at columns `first` of the row, after norm and
    rotation."""
    if WEIGHT is not None:
        low_weight = tl.load(WEIGHT + at_low, mask=low_mask, other=0.0)
        high_weight = tl.load(WEIGHT + at_high, mask=high_mask, other=0.0)
    if COLUMN_SCALES is not None:
        of_low = tl.load(COLUMN_SCALES + first + at_low, mask=low_mask, other=0.0).to(tl.float32)
        of_high = tl.load(COLUMN_SCALES + first + at_high, mask=high_mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        start_successor_and_wait()
    low = tl.load(row + first + at_low, mask=low_mask, other=0.0)
    high = tl.load(row + first + at_high, mask=high_mask, other=0.0)
    if COLUMN_SCALES is not None:
        low = scaled(low, ROW_SCALES, at_token, of_low)
        high = scaled(high, ROW_SCALES, at_token, of_high)
    if COS_SIN is not None:
        angle = COS_SIN + at_token * R + lane
        is_pair = low_mask & (lane < R // 2)
        cos = tl.load(angle, mask=is_pair, other=0.0)
        sin = tl.load(angle + R // 2, mask=is_pair, other=0.0)
    if WEIGHT is not None:
        low, high = _norm(low, high, low_weight, high_weight, eps, D, PLUS_ONE)
    if COS_SIN is not None:
        new_low, new_high = _rotate(low, high, cos, sin)
        if R < D:
            new_low, new_high = tl.where(is_pair, new_low, low), tl.where(is_pair, new_high, high)
        low, high = new_low, new_high
    return low, high


@triton.jit
def _store(
    PAGES, SCALE, low, high, slot, head, at_low, at_high, low_mask, high_mask, page_stride,
    head_stride, cell_stride, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Store both halves of a tile of heads in the pages, unless the slot is negative."""
    page, cell = slot // PAGE, slot % PAGE
    target = PAGES + page * page_stride + cell * cell_stride
    target += head.to(tl.int64)[:, None] * head_stride
    real = head < KV_HEADS
    low = to_pages(low, SCALE, head, real, HAS_SCALE, PAGES.dtype.element_ty)
    high = to_pages(high, SCALE, head, real, HAS_SCALE, PAGES.dtype.element_ty)
    tl.store(target + at_low, low, mask=low_mask & (slot >= 0))
    tl.store(target + at_high, high, mask=high_mask & (slot >= 0))


@triton.jit
def _qk_norm_rope_write(
    QKV, ROW_SCALES, COLUMN_SCALES, K, V, SLOTS, COS_SIN, Q_WEIGHT, K_WEIGHT, K_SCALE, V_SCALE, eps,
    qkv_token, k_page, k_head, k_token, v_page, v_head, v_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    Q_STEP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, Q_TILES: tl.constexpr,
    BLOCK_HALF: tl.constexpr, HAS_SCALE: tl.constexpr, PLUS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = (D + 1) // 2
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = QKV + token * qkv_token
    lane = tl.broadcast_to(tl.arange(0, BLOCK_HALF)[None, :], [TILE, BLOCK_HALF])
    at_low, at_high = _halves(lane, D, R)
    if tile < Q_TILES:
        head = tile * TILE + tl.arange(0, TILE)
        real = (head < HEADS)[:, None]
        low_mask, high_mask = real & (lane < HALF), real & (lane < D - HALF)
        first = head[:, None] * Q_STEP
        low, high = _normed_and_rotated(
            row, first, ROW_SCALES, COLUMN_SCALES, Q_WEIGHT, COS_SIN, token, eps, lane, at_low,
            at_high, low_mask, high_mask, D, R, PLUS_ONE, DEPENDENT,
        )  # fmt: skip
        tl.store(row + first + at_low, low, mask=low_mask)
        tl.store(row + first + at_high, high, mask=high_mask)
    else:
        slot = tl.load(SLOTS + token)
        head = (tile - Q_TILES) % KV_TILES * TILE + tl.arange(0, TILE)
        real = (head < KV_HEADS)[:, None]
        low_mask, high_mask = real & (lane < HALF), real & (lane < D - HALF)
        first = HEADS * Q_STEP + head[:, None] * D
        if tile < Q_TILES + KV_TILES:
            low, high = _normed_and_rotated(
                row, first, ROW_SCALES, COLUMN_SCALES, K_WEIGHT, COS_SIN, token, eps, lane, at_low,
                at_high, low_mask, high_mask, D, R, PLUS_ONE, DEPENDENT,
            )  # fmt: skip
            _store(
                K, K_SCALE, low, high, slot, head, at_low, at_high, low_mask, high_mask, k_page,
                k_head, k_token, KV_HEADS, PAGE, HAS_SCALE,
            )  # fmt: skip
        else:
            low, high = _normed_and_rotated(
                row, first + KV_HEADS * D, ROW_SCALES, COLUMN_SCALES, None, None, token, eps, lane,
                at_low, at_high, low_mask, high_mask, D, R, PLUS_ONE, DEPENDENT,
            )  # fmt: skip
            _store(
                V, V_SCALE, low, high, slot, head, at_low, at_high, low_mask, high_mask, v_page,
                v_head, v_token, KV_HEADS, PAGE, HAS_SCALE,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QKNormRopeConfig:
    """Tile size and compile options."""

    heads: int  # per program, a power of two
    warps: int


def qk_norm_rope_config(tokens: int, head_dim: int) -> QKNormRopeConfig:
    """Few tokens: small programs of a warp, to use many SMs.  Many tokens: larger programs."""
    half = triton.next_power_of_2((head_dim + 1) // 2)
    heads = max(1, (256 if tokens <= FEW_TOKENS else 1024) // half)
    return QKNormRopeConfig(heads, max(1, heads * half // 256))


def qk_norm_rope_write(
    projected: Tensor | UnscaledRows,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    heads: int,
    gated: bool = False,
    cos_sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    config: QKNormRopeConfig | None = None,
) -> Tensor:
    """RMSNorm and rope of the queries and keys of a layer's qkv; write its keys and values.

    projected: qkv [T, (heads + 2 * kv_heads) * head_dim], rows at any stride; its queries are
              changed
    gated:    head_dim values, which stay as they are, follow each head's query; of UnscaledRows
              they stay unscaled
    k, v:     [pages, kv_heads, page_size, head_dim], one layer's pages as in `write_kv`
    slot_mapping: [T] int64; tokens with a negative slot are not stored
    cos_sin:  [T, dim], of `Rope.rows`: the first dim values of a head are rotated; None: no rope
    q_weight, k_weight: [head_dim] of an RMSNorm of each head with `eps`; both or neither
    plus_one: the norms multiply by their weight + 1
    k_scale, v_scale: [kv_heads] float32, exactly if the pages are float8_e4m3fn
    Returns the queries, [T, heads, head_dim], a view of qkv.
    """
    qkv, row_scales, column_scales = parts_of(projected)
    tokens, (_, kv_heads, page, head_dim) = len(qkv), k.shape
    fp8 = k.dtype == torch.float8_e4m3fn
    step = head_dim * (2 if gated else 1)  # from a head's query to the next
    assert qkv.shape == (tokens, heads * step + 2 * kv_heads * head_dim) and qkv.stride(1) == 1
    assert v.shape == k.shape and v.dtype == k.dtype and k.stride(3) == v.stride(3) == 1
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    assert (q_weight is None) == (k_weight is None)
    for weight in (q_weight, k_weight):
        assert weight is None or (weight.shape == (head_dim,) and weight.is_contiguous())
    assert (k_scale is not None) == (v_scale is not None) == fp8, "scales belong to fp8 pages"
    rotated = head_dim + head_dim % 2
    if cos_sin is not None:
        rotated = cos_sin.shape[1]
        assert cos_sin.is_contiguous() and cos_sin.dtype == qkv.dtype and len(cos_sin) == tokens
        assert head_dim % 2 == rotated % 2 == 0 and 0 < rotated <= head_dim
    config = config or qk_norm_rope_config(tokens, head_dim)
    q_tiles = triton.cdiv(heads, config.heads)
    if cos_sin is None and q_weight is None and row_scales is None:
        q_tiles = 0
    if tokens:
        _qk_norm_rope_write[(tokens, q_tiles + 2 * triton.cdiv(kv_heads, config.heads))](
            qkv, row_scales, column_scales, k, v, slot_mapping, cos_sin, q_weight, k_weight,
            k_scale, v_scale, eps, qkv.stride(0), *k.stride()[:3], *v.stride()[:3], HEADS=heads,
            KV_HEADS=kv_heads, D=head_dim, R=rotated, Q_STEP=step, PAGE=page, TILE=config.heads,
            Q_TILES=q_tiles, BLOCK_HALF=triton.next_power_of_2((head_dim + 1) // 2), HAS_SCALE=fp8,
            PLUS_ONE=plus_one,
            # Products are rounded before they are added, in fp32 too.
            num_warps=config.warps, enable_fp_fusion=False, **dependent_launch(qkv.device),
        )  # fmt: skip
    return qkv[:, : heads * step].unflatten(1, (heads, step))[..., :head_dim]
