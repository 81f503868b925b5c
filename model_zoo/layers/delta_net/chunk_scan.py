# chunk_scan: a prompt's chunks one after the other, from the state before to the state after.
#   grid      (programs, Hv * DV / BLOCK_V): a program has BLOCK_V columns of the state of a value
#             head, for one row after the other of those that are prompts
#   reads     what prompt_inputs and chunk_local wrote; the state in the row's slot, unless the
#             sequence begins here
#   writes    out [T, Hv * Dv], o before the gated norm; the state, in place, and as it was at the
#             row's position of `snapshots`, which divides by CHUNK
#   math      with the state S: v' = solve (v - exp(G) K S); o = exp(G) q S + p v';
#             S <- exp(G') S + k^T (exp(G' - G) v'), where G' is the chunk's last G.  S in float32
#             registers, rounded to the type of qkv for products.  All of it transposed: S^T and
#             v'^T are then the first matrices of products, which tensor cores take from the
#             registers where the products before left them
#   launch    waits before it launches dependents
#   bound     latency: six products a chunk, of which four depend on each other; the next chunk's
#             tensors are copied meanwhile
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_prompts.py against float64
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import wait_for_launcher


@triton.jit
def _chunk(
    s, Q, K_IN, V, SOLVE, P, GATES, OUT, index, at, real, head, part, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The plan's chunk `index`, of the tokens `at`: its output is stored; -> the state after it.

    s [BLOCK_V, DK]: the state's transpose
    """
    key = tl.arange(0, DK)[None, :]
    token = tl.arange(0, CHUNK)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    mask, of_head = real[:, None], (at * HV + head)[:, None]
    of_key_head = (at * HK + head // (HV // HK))[:, None] * DK + key
    q = tl.load(Q + of_key_head, mask=mask, other=0.0)
    k = tl.load(K_IN + of_key_head, mask=mask, other=0.0)
    v = tl.load(V + of_head * DV + value, mask=mask, other=0.0)
    solve = tl.load(SOLVE + of_head * CHUNK + token[None, :], mask=mask, other=0.0)
    p = tl.load(P + of_head * CHUNK + token[None, :], mask=mask, other=0.0)
    gate = GATES + (index * HV + head) * (4 * CHUNK)
    decay, left = tl.load(gate + token)[None, :], tl.load(gate + CHUNK + token)[None, :]
    final = tl.load(gate + CHUNK - 1)
    rounded = s.to(k.dtype)
    one = (tl.arange(0, BLOCK_V)[:, None] == tl.arange(0, BLOCK_V)[None, :]).to(k.dtype)
    r = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * -decay
    r = tl.dot(one, tl.trans(v), r, input_precision=PRECISION)  # v needs no registers on its way
    r = tl.dot(r.to(k.dtype), tl.trans(solve), input_precision=PRECISION)
    o = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * decay
    o = tl.dot(r.to(k.dtype), tl.trans(p), o, input_precision=PRECISION)
    tl.store(OUT + of_head * DV + value, tl.trans(o.to(OUT.dtype.element_ty)), mask=mask)
    return tl.dot((r * left).to(k.dtype), k, s * final, input_precision=PRECISION)


@triton.jit
def _chunk_scan(
    Q, K_IN, V, SOLVE, P, GATES, STATE, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT, SNAPSHOTS, ROWS,
    FIRST_CHUNKS, COUNTS, OUT, state_slot, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = DV // BLOCK_V
    head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    num_rows = tl.load(COUNTS)
    if DEPENDENT:
        wait_for_launcher()
    columns = part * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    cell = head * (DK * DV) + columns * DK + tl.arange(0, DK)[None, :]
    for number in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), disable_licm=True):
        row, first_index = tl.load(ROWS + number), tl.load(FIRST_CHUNKS + number)
        begin, end = tl.load(CU_SEQLENS + row), tl.load(CU_SEQLENS + row + 1)
        start = tl.load(LENGTHS + row) - (end - begin)
        slot = tl.load(SLOTS + row).to(tl.int64)
        continued = (start > 0) & (slot >= 0)
        s = tl.load(STATE + slot * state_slot + cell, mask=continued, other=0.0).to(tl.float32)
        begin_chunk = begin - start % CHUNK  # chunks end where the position divides by CHUNK
        kept, border, part_of_row, last_part = slot, end, 1, begin_chunk
        if SNAPSHOTS is not None:
            kept = tl.load(SNAPSHOTS + row).to(tl.int64)
            border = begin - start + tl.load(SNAPSHOTS_AT + row)
            part_of_row = 1 - ((kept >= 0) & (border > begin) & (border <= end)).to(tl.int32)
            last_part = tl.where(part_of_row == 0, border, begin_chunk)
        # Two parts if the state between them is kept: a store in the chunks' loop spills registers.
        # Where a part begins is not carried from the one before: Triton drops what a loop carries
        # if nothing but the bounds of a loop within it reads it (tests/support/machine_code/
        # lost_bounds.py).
        for of_row in tl.range(part_of_row, 2, disable_licm=True):
            target, since, until = slot, last_part, end
            if of_row == 0:
                target, since, until = kept, begin_chunk, border
            for chunk in range(since, until, CHUNK):
                index = first_index + (chunk - begin_chunk) // CHUNK
                first, last = tl.maximum(chunk, begin), tl.minimum(chunk + CHUNK, end)
                token = first + tl.arange(0, CHUNK)
                s = _chunk(
                    s, Q, K_IN, V, SOLVE, P, GATES, OUT, index, token.to(tl.int64), token < last,
                    head, part, HK, HV, DK, DV, BLOCK_V, CHUNK, PRECISION,
                )  # fmt: skip
            if target >= 0:
                tl.store(STATE + target * state_slot + cell, s.to(STATE.dtype.element_ty))
