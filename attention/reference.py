"""ReferenceBackend: exact attention in plain torch, over pages.

The oracle that every kernel is compared with, and the back end of a CPU.  Query heads of one group
share their K and V: the group is folded into the rows of one batched matrix product, so that K and
V are never repeated.  Softmax is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta

# Scores of one query tile are [kv_heads, group * tile, kv_len] float32: a bounded piece of S x S.
MAX_SCORES = 1 << 22


class ReferenceBackend:
    name = "mha"

    def plan(self, meta: ForwardMeta) -> ForwardMeta:
        return meta

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: ForwardMeta) -> None:
        """Store k, v [T, kv_heads, head_dim] at meta.write_slots."""
        page = meta.write_slots // kv.page_size
        offset = meta.write_slots % kv.page_size
        kv.k[layer][page, :, offset] = k.to(kv.k.dtype)
        kv.v[layer][page, :, offset] = v.to(kv.v.dtype)

    def attend(
        self, q: Tensor, kv: KVPool, layer: int, meta: ForwardMeta, *, scale: float
    ) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads, head_dim], causal, as Backend.attend says."""
        out = torch.empty_like(q)
        decode = meta.decode_rows
        if decode:
            out[:decode] = self._decode(q[:decode], kv, layer, meta, scale)
        start = decode
        for row in range(decode, meta.num_rows):
            end = start + meta.q_lens[row]
            k, v = self._gather(kv, layer, meta, row)
            out[start:end] = _attend_row(q[start:end], k, v, scale)
            start = end
        return out

    def _decode(self, q: Tensor, kv: KVPool, layer: int, meta: ForwardMeta, scale: float) -> Tensor:
        """All rows of one token at once, padded to the longest.  q: [B, heads, head_dim]."""
        rows, heads, head_dim = q.shape
        kv_heads = kv.k.shape[2]
        longest = max(meta.kv_lens[:rows])
        pages = meta.page_table[:rows, : -(-longest // kv.page_size)].long()  # [B, P]
        lens = meta.cache_seqlens[:rows]
        position = torch.arange(pages.shape[1] * kv.page_size, device=q.device)
        outside = position[None, :] >= lens[:, None]  # [B, S]
        # Table entries past a row's length are junk: read a page that exists, then mask it.
        used = position[:: kv.page_size][None, :] < lens[:, None]
        pages = torch.where(used, pages, pages[:, :1])
        k = kv.k[layer][pages].transpose(1, 2).reshape(rows, kv_heads, -1, head_dim)
        v = kv.v[layer][pages].transpose(1, 2).reshape(rows, kv_heads, -1, head_dim)
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
        scores = torch.matmul(grouped, k.transpose(2, 3)).float() * scale
        scores.masked_fill_(outside[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, -1).to(v.dtype)
        # A masked cell may hold anything, NaN too, and 0 * NaN is NaN.
        v = v.masked_fill(outside[:, None, :, None], 0)
        return torch.matmul(weights, v).view(rows, heads, head_dim)

    def _gather(self, kv: KVPool, layer: int, meta: ForwardMeta, row: int) -> tuple[Tensor, Tensor]:
        """K and V of one row, each [kv_heads, kv_len, head_dim]."""
        length = meta.kv_lens[row]
        pages = meta.page_table[row, : -(-length // kv.page_size)].long()

        def flat(pool: Tensor) -> Tensor:
            return pool[layer][pages].transpose(0, 1).flatten(1, 2)[:, :length]

        return flat(kv.k), flat(kv.v)


def _attend_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One row, tile by tile of queries.  q [q_len, heads, d]; k, v [kv_heads, kv_len, d]."""
    q_len, heads, head_dim = q.shape
    kv_heads, kv_len = k.shape[:2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    tile = max(1, MAX_SCORES // (heads * kv_len))
    for begin in range(0, q_len, tile):
        end = min(begin + tile, q_len)
        seen = kv_len - q_len + end  # nothing later than the tile's last query is looked at
        rows = q[begin:end].view(end - begin, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(
            rows.reshape(kv_heads, -1, head_dim), k[:, :seen].transpose(1, 2)
        ).float()
        scores = (scores * scale).view(kv_heads, group, end - begin, seen)
        query = torch.arange(seen - (end - begin), seen, device=q.device)
        future = torch.arange(seen, device=q.device)[None, :] > query[:, None]
        scores.masked_fill_(future, float("-inf"))
        weights = torch.softmax(scores, -1).to(v.dtype).view(kv_heads, -1, seen)
        mixed = torch.matmul(weights, v[:, :seen]).view(kv_heads, group, end - begin, head_dim)
        out[begin:end] = mixed.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim)
    return out
