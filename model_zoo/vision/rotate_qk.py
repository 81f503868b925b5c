# rotate_qk: rotary positions of the queries and keys of an image's patches, in place.
#   grid      (blocks of patches, 2 * heads): a program turns one head of one of the two
#   reads     qkv [N, 3, heads, D] bf16, fp16 or fp32: queries, keys, values; cos_sin [N, D] fp32:
#             cos of D / 2 angles, then sin
#   writes    queries and keys: (low, high) -> (low * cos - high * sin, high * cos + low * sin)
#   math      fp32
#   limits    D even; 3 * heads * D * N < 2^63
#   bound     memory: 4 * N * heads * D * bytes
#   checked   tests/model_zoo/vision/test_rotate_qk.py against PyTorch's operations
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # patches of a program


@triton.jit
def _rotate_qk(
    QKV, COS_SIN, count, row_stride, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None]
    mask = (row < count) & (lane < HALF)
    angles = COS_SIN + row * (2 * HALF) + lane
    cos = tl.load(angles, mask=mask, other=0.0)
    sin = tl.load(angles + HALF, mask=mask, other=0.0)
    at = QKV + row * row_stride + tl.program_id(1) * (2 * HALF) + lane
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = QKV.dtype.element_ty
    tl.store(at, (low * cos - high * sin).to(kind), mask=mask)
    tl.store(at + HALF, (high * cos + low * sin).to(kind), mask=mask)


def rotate_qk(qkv: Tensor, cos_sin: Tensor) -> None:
    """See above."""
    count, three, heads, head_dim = qkv.shape
    assert three == 3 and head_dim % 2 == 0 and qkv.is_contiguous()
    assert cos_sin.shape == (count, head_dim) and cos_sin.is_contiguous()
    half = head_dim // 2
    _rotate_qk[(triton.cdiv(count, ROWS), 2 * heads)](
        qkv, cos_sin, count, 3 * heads * head_dim, HALF=half,
        LANES=triton.next_power_of_2(half), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
