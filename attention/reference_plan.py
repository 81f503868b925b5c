"""ReferencePlan: a step's gather indices into the KV pool, by chunks of rows.

On a CPU the time goes into moving K and V, so that they are gathered with one copy, in chunks that
stay in the L2 cache: the memory for them does not grow with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata, upload

# Measured on a Zen 5 core with 2 MiB of L2 cache; half and twice are within 20 %.
CHUNK_BYTES = 2 << 20  # of keys of decode rows gathered at once
GPU_FACTOR = 64  # chunks on a GPU are larger by this


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Decode rows of similar length, or some KV heads of one long row, computed at once."""

    rows: slice | Tensor  # N of the step's rows
    heads: slice  # H of the KV heads
    kv_lens: Tensor  # [N] int32
    kv_slots: Tensor  # [N, H, P] int64: indices into a pool viewed as [pages * kv_heads, page, D]
    outside: Tensor | None  # [N, 1, P * page] bool, positions past a row's length; None: no such
    junk: Tensor | None  # [num_outside * H] int64: the same, as indices of [N * H * P * page, D]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One row with several query tokens."""

    tokens: slice
    kv_len: int
    kv_slots: Tensor  # [1, kv_heads, P] int64, as DecodeChunk.kv_slots


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The chunks of a step; rows without keys are in neither list."""

    # (page and head, offset), [T * kv_heads] int64 each, of [pages * kv_heads, page, head_dim].
    write_kv_slots: tuple[Tensor, Tensor]
    decode_chunks: tuple[DecodeChunk, ...]
    prefill_chunks: tuple[PrefillChunk, ...]


def make_plan(meta: AttentionMetadata, kv: KVPool) -> ReferencePlan:
    """The gather and scatter indices of a step, valid for every layer of the pool."""
    head = torch.arange(kv.kv_heads, device=meta.page_table.device)
    page, offset = meta.slot_mapping // kv.page_size, meta.slot_mapping % kv.page_size
    write = (page[:, None] * kv.kv_heads + head).flatten(), offset.repeat_interleave(kv.kv_heads)
    chunks: list[PrefillChunk] = []
    start = meta.decode_rows
    for row in range(meta.decode_rows, meta.num_rows):
        end = start + meta.q_lens[row]
        if meta.kv_lens[row] and end > start:
            num_pages = -(-meta.kv_lens[row] // kv.page_size)
            pages = meta.page_table[row, :num_pages].long()
            kv_slots = (pages * kv.kv_heads + head[:, None])[None]
            chunks.append(PrefillChunk(slice(start, end), meta.kv_lens[row], kv_slots))
        start = end
    return ReferencePlan(write, tuple(_decode_chunks(meta, kv)), tuple(chunks))


def factor(tensor: Tensor) -> int:
    """How much larger chunks are on the tensor's device than on a CPU."""
    return 1 if tensor.device.type == "cpu" else GPU_FACTOR


def _decode_chunks(meta: AttentionMetadata, kv: KVPool) -> list[DecodeChunk]:
    """Group the decode rows, longest first, into chunks of similar length."""
    lens = meta.kv_lens
    with_keys = (row for row in range(meta.decode_rows) if lens[row])
    by_length = sorted(with_keys, key=lambda row: -lens[row])
    chunk_bytes = CHUNK_BYTES * factor(meta.page_table)
    page_bytes = kv.kv_heads * kv.page_size * kv.head_dim * kv.k.element_size()
    decode_chunks: list[DecodeChunk] = []
    while by_length:
        num_pages = -(-lens[by_length[0]] // kv.page_size)
        most = max(1, chunk_bytes // (num_pages * page_bytes))
        count = 1
        # A row is padded to at most twice its pages.
        while (
            count < min(most, len(by_length))
            and 2 * -(-lens[by_length[count]] // kv.page_size) >= num_pages
        ):
            count += 1
        rows, by_length = by_length[:count], by_length[count:]
        num_heads = kv.kv_heads
        if count == 1:
            head_bytes = num_pages * page_bytes // kv.kv_heads
            num_heads = min(kv.kv_heads, max(1, 2 * chunk_bytes // head_bytes))
        for first in range(0, kv.kv_heads, num_heads):
            heads = slice(first, min(first + num_heads, kv.kv_heads))
            decode_chunks.append(_decode_chunk(meta, kv, rows, num_pages, heads))
    return decode_chunks


def _decode_chunk(
    meta: AttentionMetadata, kv: KVPool, rows: list[int], num_pages: int, heads: slice
) -> DecodeChunk:
    device = meta.page_table.device
    together = rows == list(range(rows[0], rows[-1] + 1))
    where = slice(rows[0], rows[-1] + 1) if together else upload(torch.tensor(rows), device)
    pages = meta.page_table[where, :num_pages].long()
    size = num_pages * kv.page_size
    lens = [meta.kv_lens[row] for row in rows]
    outside = junk = None
    if min(lens) < size:
        # On the host, where nonzero() does not synchronize.
        past = torch.arange(size) >= torch.tensor(lens)[:, None]
        every_head = past[:, None].expand(-1, heads.stop - heads.start, -1)
        junk = upload(every_head.flatten().nonzero()[:, 0], device)
        outside = upload(past[:, None], device)
        # Table entries past a row's length are junk: read a page that exists instead.
        pages = torch.where(outside[:, 0, :: kv.page_size], pages[:, :1], pages)
    head = torch.arange(heads.start, heads.stop, device=device)
    kv_slots = pages[:, None] * kv.kv_heads + head[:, None]  # [N, H, P]
    return DecodeChunk(where, heads, meta.cache_seqlens[where], kv_slots, outside, junk)
