"""What decode.py does with the result of a work tile: stores the row's output, or a part of it.

A split row's parts are merged by the program that writes the last of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.common.softmax import M_INIT, finish

LOADED = tl.constexpr(32)  # elements of parts that a thread of four warps loads at once
MERGED = tl.constexpr(1024)  # elements of the output that are merged at once, at most


@triton.jit
def _write_whole(
    acc, m, total, token, heads, d, real, inside, OUT, LSE, SINKS, out_token, out_head, lse_token
):
    """Store out and lse of all keys' weighted values."""
    factor, lse = finish(m, total, SINKS, heads, real)
    tl.store(
        OUT + (token * out_token + heads * out_head)[:, None] + d[None, :],
        (acc * factor[:, None]).to(OUT.dtype.element_ty), mask=inside,
    )  # fmt: skip
    if LSE is not None:
        tl.store(LSE + token * lse_token + heads, lse, mask=real)


@triton.jit
def _add_parts(
    PARTIAL_OUT, PARTIAL_LSE, first, parts, r, d, real, inside,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """-> (acc, m, total) of rows r of `parts` parts, added in order."""
    TOGETHER: tl.constexpr = LOADED * 128 // (ROWS * BLOCK_D)
    m = tl.full([ROWS], M_INIT, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, parts, TOGETHER):
        lses, outs, m_new = (), (), m
        for i in tl.static_range(TOGETHER):
            there = start + i < parts
            slot = (first + start + i).to(tl.int64) * QUERIES + r
            # Other SMs wrote them: not from the L1 cache.
            lse = tl.load(
                PARTIAL_LSE + slot, mask=real & there, other=float("-inf"), cache_modifier=".cg"
            )
            out = tl.load(
                PARTIAL_OUT + slot[:, None] * D + d[None, :], mask=inside & there, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            lses, outs, m_new = lses + (lse,), outs + (out,), tl.maximum(m_new, lse)  # noqa: RUF005
        alpha = tl.exp2(m - m_new)
        m, total, acc = m_new, total * alpha, acc * alpha[:, None]
        for i in tl.static_range(TOGETHER):
            weight = tl.exp2(lses[i] - m)
            # The output of a part that saw no key may be anything.
            out = tl.where((lses[i] > float("-inf"))[:, None], outs[i], 0.0)
            total += weight
            acc += out * weight[:, None]
    return acc, m, total


@triton.jit
def _merge_if_last(
    merge, head, q_start, q_len, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, MERGES, ARRIVED,
    out_token, out_head, lse_token,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Count a part that the program has written; the last to be counted merges them all."""
    first, parts = tl.load(MERGES + merge * 2), tl.load(MERGES + merge * 2 + 1)
    tl.debug_barrier()  # of all threads, whose writes the atomic publishes
    if tl.atomic_add(ARRIVED + merge, 1) == parts - 1:
        ROWS: tl.constexpr = (512 if QUERIES * BLOCK_D <= 512 else MERGED) // BLOCK_D
        d = tl.arange(0, BLOCK_D)
        for row in range(0, q_len * GROUP, ROWS):
            r = row + tl.arange(0, ROWS)
            real = r < q_len * GROUP
            inside = real[:, None] & (d < D)[None, :]
            acc, m, total = _add_parts(
                PARTIAL_OUT, PARTIAL_LSE, first, parts, r, d, real, inside,
                ROWS, BLOCK_D, QUERIES, D,
            )  # fmt: skip
            _write_whole(
                acc, m, total, (q_start + r // GROUP).to(tl.int64), head * GROUP + r % GROUP, d,
                real, inside, OUT, LSE, SINKS, out_token, out_head, lse_token,
            )  # fmt: skip
        tl.store(ARRIVED + merge, 0)  # for the next launch


@triton.jit
def write_result(
    acc, m, total, w, merge, head, q_start, q_len, r, d, token, heads, real, inside,
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, MERGES, ARRIVED, out_token, out_head, lse_token,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the result of work tile w; merge: column MERGE of its entry."""
    if merge:
        slot = w.to(tl.int64) * QUERIES + r
        safe_total = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(safe_total))
        tl.store(
            PARTIAL_OUT + slot[:, None] * D + d[None, :], acc * (1.0 / safe_total)[:, None],
            mask=inside,
        )  # fmt: skip
        tl.store(PARTIAL_LSE + slot, lse, mask=real)
        _merge_if_last(
            merge - 1, head, q_start, q_len, PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SINKS, MERGES,
            ARRIVED, out_token, out_head, lse_token, GROUP, QUERIES, D, BLOCK_D,
        )  # fmt: skip
    else:
        _write_whole(
            acc, m, total, token, heads, d, real, inside, OUT, LSE, SINKS, out_token, out_head,
            lse_token,
        )  # fmt: skip
