"""ReferencePlan: a step's gather indices into the KV pool, by chunks of rows.

On a CPU the time goes into moving K and V, so that they are gathered with one copy, in chunks that
stay in the L2 cache: the memory for them does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Decode rows that see similarly many positions, or some KV heads of one long row."""

    rows: slice | Tensor  # N of the step's rows
    heads: slice  # H of the KV heads
    kv_slots: Tensor  # [N, H, P] int64: indices into a pool viewed as [pages * kv_heads, page, D]
    outside: Tensor | None  # [N, 1, P * page] bool, positions that a row does not see; None: none
    junk: Tensor | None  # [num_outside * H] int64: the same, as indices of [N * H * P * page, D]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One row with several query tokens."""

    tokens: slice
    kv_len: int  # positions from the first page on that a query of the row sees
    kv_slots: Tensor  # [1, kv_heads, P] int64, as DecodeChunk.kv_slots


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The chunks of a step; rows without keys are in neither list."""

    decode: tuple[DecodeChunk, ...]
    prefill: tuple[PrefillChunk, ...]


class ReferencePlan:
    """The gather and scatter indices of a step, each computed when a layer first needs it."""

    def __init__(self, meta: AttentionMetadata, kv: KVPool) -> None:
        self._meta, self._kv = meta, kv
        self._write: dict[int, tuple[Tensor, Tensor]] = {}
        self._chunks: dict[tuple[int, int], RowChunks] = {}

    def write_kv_slots(self, group: int) -> tuple[Tensor, Tensor]:
        """(page and head, offset), [T * kv_heads] int64 each, of [pages * kv_heads, page, D]."""
        if group not in self._write:
            kv, slots = self._kv, self._meta.slot_mappings[group]
            head = torch.arange(kv.kv_heads, device=slots.device)
            page, offset = slots // kv.page_size, slots % kv.page_size
            page_and_head = (page[:, None] * kv.kv_heads + head).flatten()
            self._write[group] = page_and_head, offset.repeat_interleave(kv.kv_heads)
        return self._write[group]

    def chunks(self, group: int, window: int) -> RowChunks:
        """The chunks of the rows in layers of a group with this window."""
        if (group, window) not in self._chunks:
            table = self._meta.page_tables[group]
            self._chunks[group, window] = RowChunks(
                tuple(_decode_chunks(self._meta, self._kv, table, window)),
                tuple(_prefill_chunks(self._meta, self._kv, table, window)),
            )
        return self._chunks[group, window]


def _first_page(kv_len: int, q_len: int, window: int, page_size: int) -> int:
    """The first page of which a query of a row sees a position."""
    return max(0, kv_len - q_len + 1 - window) // page_size if window else 0


def _prefill_chunks(
    meta: AttentionMetadata, kv: KVPool, table: Tensor, window: int
) -> Iterator[PrefillChunk]:
    head = torch.arange(kv.kv_heads, device=table.device)
    start = meta.decode_rows
    for row in range(meta.decode_rows, meta.num_rows):
        kv_len, q_len = meta.kv_lens[row], meta.q_lens[row]
        end = start + q_len
        if kv_len and end > start:
            first = _first_page(kv_len, q_len, window, kv.page_size)
            pages = table[row, first : -(-kv_len // kv.page_size)].long()
            kv_slots = (pages * kv.kv_heads + head[:, None])[None]
            yield PrefillChunk(slice(start, end), kv_len - first * kv.page_size, kv_slots)
        start = end


def factor(tensor: Tensor) -> int:
    """How much larger chunks are on the tensor's device than on a CPU."""
    return 1 if tensor.device.type == "cpu" else GPU_FACTOR


def _decode_chunks(
    meta: AttentionMetadata, kv: KVPool, table: Tensor, window: int
) -> Iterator[DecodeChunk]:
    """Group the decode rows, those with most pages first, into chunks of similar size."""
    lens = meta.kv_lens
    pages_of = {
        row: -(-lens[row] // kv.page_size) - _first_page(lens[row], 1, window, kv.page_size)
        for row in range(meta.decode_rows)
        if lens[row]
    }
    by_length = sorted(pages_of, key=lambda row: (-pages_of[row], -lens[row]))
    chunk_bytes = CHUNK_BYTES * factor(table)
    page_bytes = kv.kv_heads * kv.page_size * kv.head_dim * kv.k.element_size()
    while by_length:
        num_pages = pages_of[by_length[0]]
        most = max(1, chunk_bytes // (num_pages * page_bytes))
        count = 1
        # A row is padded to at most twice its pages.
        while count < min(most, len(by_length)) and 2 * pages_of[by_length[count]] >= num_pages:
            count += 1
        rows, by_length = by_length[:count], by_length[count:]
        num_heads = kv.kv_heads
        if count == 1:
            head_bytes = num_pages * page_bytes // kv.kv_heads
            num_heads = min(kv.kv_heads, max(1, 2 * chunk_bytes // head_bytes))
        for first in range(0, kv.kv_heads, num_heads):
            heads = slice(first, min(first + num_heads, kv.kv_heads))
            yield _decode_chunk(meta, kv, table, window, rows, num_pages, heads)


def _decode_chunk(
    meta: AttentionMetadata,
    kv: KVPool,
    table: Tensor,
    window: int,
    rows: list[int],
    num_pages: int,
    heads: slice,
) -> DecodeChunk:
    device = table.device
    together = rows == list(range(rows[0], rows[-1] + 1))
    where = slice(rows[0], rows[-1] + 1) if together else upload(torch.tensor(rows), device)
    size = num_pages * kv.page_size
    lens = torch.tensor([meta.kv_lens[row] for row in rows])[:, None]
    if window:
        firsts = [_first_page(meta.kv_lens[row], 1, window, kv.page_size) for row in rows]
        first = torch.tensor(firsts)[:, None]
        # The last columns of a shorter row are outside, and clamped to the table.
        columns = (first + torch.arange(num_pages)).clamp(max=table.shape[1] - 1)
        pages = table[where].gather(1, upload(columns, device)).long()
        positions = first * kv.page_size + torch.arange(size)
        unseen = (positions >= lens) | (positions < lens - window)
    else:
        pages = table[where, :num_pages].long()
        unseen = torch.arange(size) >= lens
    outside = junk = None
    if unseen.any():  # on the host, where nonzero() does not synchronize
        every_head = unseen[:, None].expand(-1, heads.stop - heads.start, -1)
        junk = upload(every_head.flatten().nonzero()[:, 0], device)
        outside = upload(unseen[:, None], device)
        # Table entries past a row's length are junk: read a page that exists instead.
        pages = torch.where(outside[:, 0, :: kv.page_size], pages[:, :1], pages)
    head = torch.arange(heads.start, heads.stop, device=device)
    kv_slots = pages[:, None] * kv.kv_heads + head[:, None]  # [N, H, P]
    return DecodeChunk(where, heads, kv_slots, outside, junk)
