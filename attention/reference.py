"""ReferenceBackend: exact attention in plain torch, over pages.

The oracle that every kernel is compared with, and the back end of a CPU.  Query heads of one group
share their K and V: the group is folded into the rows of one batched matrix product, so that K and
V are never repeated.  Softmax is computed in float32.

On a CPU the time goes into moving K and V, so that they are gathered with one copy, in pieces that
stay in the cache, and never for more rows than a piece holds: memory does not grow with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta
from attention.upload import upload

# Both measured on a Zen 5 core with 2 MiB of L2 cache; half and twice are within 20 %.
PIECE_BYTES = 2 << 20  # keys of decode rows gathered at once
TILE = 64  # queries of a prompt computed at once, for as many KV heads as fit MAX_SCORES
MAX_SCORES = 1 << 20  # float32 scores of a tile; one KV head may have eight times as many
GPU_FACTOR = 64  # a GPU wants fewer, larger pieces: all three times this


@dataclass(frozen=True, slots=True)
class Piece:
    """Decode rows of like length, or some KV heads of a long one, that are computed at once."""

    rows: slice | Tensor  # N of the step's rows
    heads: slice  # H of the KV heads
    cells: Tensor  # [N * H * P] int64: rows of a pool seen as [pages * kv_heads, page * head_dim]
    outside: Tensor | None  # [N, 1, P * page] bool, cells past a row's length; None: there are none
    junk: Tensor | None  # [num_outside * H] int64: the same cells, rows of [N * H * P * page, D]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row that feeds several tokens."""

    tokens: slice
    kv_len: int
    cells: Tensor  # [kv_heads * P] int64, as Piece.cells


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    write_cells: Tensor  # [T * kv_heads] int64: rows of a pool seen as [cells, head_dim]
    pieces: tuple[Piece, ...]
    chunks: tuple[Chunk, ...]


class ReferenceBackend:
    name = "mha"

    def plan(self, meta: ForwardMeta, kv: KVPool) -> ForwardMeta:
        """Find out once where each row's keys and values are; all layers store them alike."""
        head = torch.arange(kv.kv_heads, device=meta.page_table.device)
        page, offset = meta.write_slots // kv.page_size, meta.write_slots % kv.page_size
        write = (page[:, None] * kv.kv_heads + head) * kv.page_size + offset[:, None]
        chunks: list[Chunk] = []
        start = meta.decode_rows
        for row in range(meta.decode_rows, meta.num_rows):
            end = start + meta.q_lens[row]
            num_pages = -(-meta.kv_lens[row] // kv.page_size)
            pages = meta.page_table[row, :num_pages].long()
            cells = (pages * kv.kv_heads + head[:, None]).flatten()
            chunks.append(Chunk(slice(start, end), meta.kv_lens[row], cells))
            start = end
        plan = ReferencePlan(write.flatten(), tuple(_pieces(meta, kv)), tuple(chunks))
        return replace(meta, plan=plan)

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: ForwardMeta) -> None:
        """Store k, v [T, kv_heads, head_dim] at meta.write_slots."""
        assert isinstance(meta.plan, ReferencePlan), "plan() comes first"
        for pool, new in ((kv.k, k), (kv.v, v)):
            flat = new.reshape(-1, kv.head_dim).to(pool.dtype)
            pool[layer].view(-1, kv.head_dim).index_copy_(0, meta.plan.write_cells, flat)

    def attend(
        self, q: Tensor, kv: KVPool, layer: int, meta: ForwardMeta, *, scale: float
    ) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads, head_dim], causal, as Backend.attend says."""
        assert isinstance(meta.plan, ReferencePlan), "plan() comes first"
        num_tokens, num_heads, head_dim = q.shape
        q = q.reshape(num_tokens, kv.kv_heads, num_heads // kv.kv_heads, head_dim)
        out = torch.empty_like(q)
        # Rows of one page of one KV head: gathering them is the only copy of K and V.
        k = kv.k[layer].view(-1, kv.page_size * head_dim)
        v = kv.v[layer].view(-1, kv.page_size * head_dim)
        for piece in meta.plan.pieces:
            found = _decode(q[piece.rows][:, piece.heads], k, v, piece, scale)
            out[piece.rows, piece.heads] = found
        for chunk in meta.plan.chunks:
            keys, values = (
                pool[chunk.cells].view(kv.kv_heads, -1, head_dim)[:, : chunk.kv_len]
                for pool in (k, v)
            )
            _prefill(q[chunk.tokens], keys, values, scale, out[chunk.tokens])
        return out.view(num_tokens, num_heads, head_dim)


def _factor(tensor: Tensor) -> int:
    return 1 if tensor.device.type == "cpu" else GPU_FACTOR


def _pieces(meta: ForwardMeta, kv: KVPool) -> list[Piece]:
    """Cut the rows that decode, longest first, into pieces of like length."""
    lens = meta.kv_lens
    by_length = sorted(range(meta.decode_rows), key=lambda row: -lens[row])
    piece_bytes = PIECE_BYTES * _factor(meta.page_table)
    page_bytes = kv.kv_heads * kv.page_size * kv.head_dim * kv.k.element_size()
    pieces: list[Piece] = []
    while by_length:
        num_pages = -(-lens[by_length[0]] // kv.page_size)
        most = max(1, piece_bytes // (num_pages * page_bytes))
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
            num_heads = min(kv.kv_heads, max(1, 2 * piece_bytes // head_bytes))
        for first in range(0, kv.kv_heads, num_heads):
            heads = slice(first, min(first + num_heads, kv.kv_heads))
            pieces.append(_piece(meta, kv, rows, num_pages, heads))
    return pieces


def _piece(meta: ForwardMeta, kv: KVPool, rows: list[int], num_pages: int, heads: slice) -> Piece:
    device = meta.page_table.device
    together = rows == list(range(rows[0], rows[-1] + 1))
    where = slice(rows[0], rows[-1] + 1) if together else upload(torch.tensor(rows), device)
    pages = meta.page_table[where, :num_pages].long()
    size = num_pages * kv.page_size
    lens = [meta.kv_lens[row] for row in rows]
    outside = junk = None
    if min(lens) < size:
        past = (
            torch.arange(size) >= torch.tensor(lens)[:, None]
        )  # on the host, where nonzero() waits for nothing
        every_head = past[:, None].expand(-1, heads.stop - heads.start, -1)
        junk = upload(every_head.flatten().nonzero()[:, 0], device)
        outside = upload(past[:, None], device)
        # Table entries past a row's length are junk: read a page that exists instead.
        pages = torch.where(outside[:, 0, :: kv.page_size], pages[:, :1], pages)
    head = torch.arange(heads.start, heads.stop, device=device)
    cells = pages[:, None] * kv.kv_heads + head[:, None]  # [N, H, P]
    return Piece(where, heads, cells.flatten(), outside, junk)


def _decode(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> Tensor:
    """q [N, H, group, D] and a layer's K and V by page and head -> like q."""
    num_rows, num_heads, group, head_dim = q.shape
    keys = k.index_select(0, piece.cells).view(num_rows * num_heads, -1, head_dim)
    values = v.index_select(0, piece.cells).view(num_rows * num_heads, -1, head_dim)
    grouped = q.reshape(num_rows * num_heads, group, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().mul_(scale)
    if piece.outside is not None and piece.junk is not None:
        scores.view(num_rows, num_heads * group, -1).masked_fill_(piece.outside, float("-inf"))
        # A cell past the length may hold anything, NaN too, and 0 * NaN is NaN.
        values.view(-1, head_dim).index_fill_(0, piece.junk, 0)
    weights = torch.softmax(scores, -1).to(values.dtype)
    return torch.bmm(weights, values).view(q.shape)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """One row, in tiles of queries and KV heads: no [q_len, kv_len] matrix is ever whole.

    q, out [q_len, kv_heads, group, D]; k, v [kv_heads, kv_len, D].
    """
    q_len, kv_heads, group, head_dim = q.shape
    kv_len = k.shape[1]
    max_scores = MAX_SCORES * _factor(q)
    tile = max(1, min(TILE * _factor(q), 8 * max_scores // (group * kv_len)))
    for begin in range(0, q_len, tile):
        end = min(begin + tile, q_len)
        count, seen = end - begin, kv_len - q_len + end  # later keys concern no query of the tile
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        rows = q[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, group * count, head_dim)
        num_heads = max(1, max_scores // (group * count * seen))
        for first in range(0, kv_heads, num_heads):
            heads = slice(first, first + num_heads)
            scores = torch.bmm(rows[heads], k[heads, :seen].transpose(1, 2)).float().mul_(scale)
            newest = scores.view(-1, group, count, seen)[..., seen - count :]
            newest.masked_fill_(future, float("-inf"))
            weights = torch.softmax(scores, -1).to(v.dtype)
            mixed = torch.bmm(weights, v[heads, :seen]).view(-1, group, count, head_dim)
            out[begin:end, heads] = mixed.permute(2, 0, 1, 3)
