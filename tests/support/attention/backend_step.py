"""Attention cases through the Backend protocol: plan, write, attend."""

from __future__ import annotations

from torch import Tensor

from attention.backend import Backend, Capacity, Shape
from attention.dispatch import choose
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from tests.support.attention.attention_oracle import OracleCase, dequantised


def shape_of(case: OracleCase) -> Shape:
    return Shape(
        heads=case.q.shape[1],
        kv_heads=case.kv_heads,
        head_dim=case.q.shape[2],
        page_size=case.k.shape[2],
        dtype=case.q.dtype,
        kv_dtype=case.k.dtype,
    )


def back_end(
    case: OracleCase, name: str, *, rows: int = 16, tokens: int = 64, **options
) -> Backend:
    """The back end for cases like this one."""
    capacity = Capacity(rows=rows, tokens=tokens)
    return choose(case.q.device, name, shape_of(case), capacity, **options)


def pool_of(case: OracleCase) -> KVPool:
    """The case's layer as a pool of one layer."""
    scales = (None if scale is None else scale[None] for scale in (case.k_scale, case.v_scale))
    return KVPool(case.k[None], case.v[None], *scales)


def meta_of(case: OracleCase) -> AttentionMetadata:
    """The step as the runtime describes it; the case's first rows of one token decode."""
    q_lens, kv_lens = zip(*case.rows, strict=True)
    decode_rows = next((row for row, q_len in enumerate(q_lens) if q_len != 1), len(q_lens))
    return AttentionMetadata(
        cu_seqlens_q=case.cu_seqlens_q,
        cache_seqlens=case.cache_seqlens,
        page_tables=(case.page_table,),
        slot_mappings=(case.slot_mapping,),
        max_seqlen_q=max(q_lens),
        decode_rows=decode_rows,
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


def newest(case: OracleCase) -> tuple[Tensor, Tensor]:
    """k, v [T, kv_heads, D] of the step's own tokens, as the model computes them; 0 without KV."""
    found: list[Tensor] = []
    for rows, scale in ((case.keys, case.k_scale), (case.values, case.v_scale)):
        new = case.q.new_zeros(len(case.q), case.kv_heads, case.q.shape[2])
        for row, stored in enumerate(rows):
            count = min(case.rows[row][0], len(stored))
            own = case.tokens(row)
            tail = stored[len(stored) - count :]
            new[own.stop - count : own.stop] = dequantised(tail, scale).to(new.dtype)
        found.append(new)
    return found[0], found[1]


def attended(case: OracleCase, backend: Backend, *, write: bool = True) -> tuple[Tensor, Tensor]:
    """(out, lse) of the case; its newest keys and values are taken away and written again."""
    kv, meta = pool_of(case), meta_of(case)
    meta = backend.plan(meta, kv)
    if write:
        new = newest(case)
        slots = case.slot_mapping[case.slot_mapping >= 0]
        for pool in (case.k, case.v):
            pool[slots // pool.shape[2], :, slots % pool.shape[2]] = float("nan")
        backend.write(*new, kv.layers[0], meta)
    _, lse = case.results()
    options = {
        "scale": case.scale, "window": case.window, "softcap": case.softcap, "sinks": case.sinks,
    }  # fmt: skip
    return backend.attend(case.q, kv.layers[0], meta, **options, lse=lse), lse
