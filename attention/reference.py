"""ReferenceBackend: exact attention in plain torch, over pages.

The oracle of the kernels' tests, and the CPU back end.  The query heads of a group (GQA) are folded
into the rows of one batched matrix multiplication, so that K and V are never repeated.  Softmax is
computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.kv_pool import FP8, KVPool, LayerKV
from attention.metadata import AttentionMetadata
from attention.reference_plan import DecodeChunk, ReferencePlan, factor

# Measured on a Zen 5 core with 2 MiB of L2 cache; half and twice are within 20 %.
TILE = 64  # queries of a prefill tile, for as many KV heads as fit MAX_SCORES
MAX_SCORES = 1 << 20  # float32 scores of a tile; one KV head may have eight times as many
LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True, slots=True)
class AttendOptions:
    """The keyword arguments of Backend.attend."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None  # [kv_heads, group]
    with_lse: bool


class ReferenceBackend:
    name = "mha"
    reads_lengths_on_device = False

    def __init__(self, reason: str = "") -> None:
        """reason: why no faster back end was chosen, for the start report."""
        self.details = f"in torch: {reason}" if reason else "in torch"

    def plan(self, meta: AttentionMetadata, kv: KVPool) -> AttentionMetadata:
        """Resolve page tables to gather indices once: the layers of a group share them."""
        return replace(meta, plan=ReferencePlan(meta, kv))

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, meta: AttentionMetadata) -> None:
        """Store k, v [T, kv_heads, head_dim] at the group's slots; none may be negative."""
        assert isinstance(meta.plan, ReferencePlan), "plan() comes first"
        scales = kv.k_scale, kv.v_scale
        for pages, new, scale in zip((kv.k, kv.v), (k, v), scales, strict=True):
            if scale is not None:
                new = (new.float() / scale[:, None]).clamp(-LARGEST, LARGEST)
            flat = _bytes(new.reshape(-1, kv.head_dim).to(pages.dtype))
            by_page = _bytes(pages).view(-1, *pages.shape[2:])  # raises where it were a copy
            by_page.index_put_(meta.plan.write_kv_slots(kv.group), flat)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(meta.plan, ReferencePlan), "plan() comes first"
        grouped = q.reshape(len(q), kv.kv_heads, -1, kv.head_dim)
        by_head = None if sinks is None else sinks.float().view(grouped.shape[1:3])
        options = AttendOptions(scale, window, softcap, by_head, lse is not None)
        out = torch.zeros_like(grouped)
        sums = None if lse is None else _without_keys(grouped, options)
        chunks = meta.plan.chunks(kv.group, window)
        for decode_chunk in chunks.decode:
            found, total = _decode(
                grouped[decode_chunk.rows][:, decode_chunk.heads], kv, decode_chunk, options
            )
            out[decode_chunk.rows, decode_chunk.heads] = found
            if sums is not None and total is not None:
                sums[decode_chunk.rows, decode_chunk.heads] = total
        for chunk in chunks.prefill:
            gathered = _gather(kv, chunk.kv_slots, slice(0, kv.kv_heads), q.dtype)
            k, v = (pool[:, : chunk.kv_len] for pool in gathered)
            totals = None if sums is None else sums[chunk.tokens]
            _prefill(grouped[chunk.tokens], k, v, options, out[chunk.tokens], totals)
        if lse is not None and sums is not None:
            lse.copy_(sums.view(lse.shape))
        return out.view(q.shape)


def _bytes(pool: Tensor) -> Tensor:
    """float8 viewed as bytes, which every device can gather and scatter; other types unchanged."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def _without_keys(grouped: Tensor, options: AttendOptions) -> Tensor:
    """[T, kv_heads, group] float32: the log-sum-exp of queries that see no key."""
    sums = torch.full_like(grouped[..., 0], float("-inf"), dtype=torch.float32)
    return sums if options.sinks is None else options.sinks.expand_as(sums).clone()


def _gather(
    kv: LayerKV, kv_slots: Tensor, heads: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """kv_slots [N, H, P] -> K and V [N * H, P * page, D]; the only copy that is made of them."""
    found: list[Tensor] = []
    for pages, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        by_page = _bytes(pages).flatten(0, 1)
        picked = by_page.index_select(0, kv_slots.flatten()).view(pages.dtype)
        if scale is not None:
            by_head = picked.view(*kv_slots.shape[:2], -1).float()
            picked = (by_head * scale[heads, None]).to(dtype)
        found.append(picked.view(kv_slots.shape[0] * kv_slots.shape[1], -1, kv.head_dim))
    return found[0], found[1]


def _logits(products: Tensor, options: AttendOptions) -> Tensor:
    logits = products.float().mul_(options.scale)
    if options.softcap:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    return logits


def _softmax(logits: Tensor, options: AttendOptions, heads: slice) -> tuple[Tensor, Tensor | None]:
    """logits [N, H, group, Q, keys] -> softmax weights, and log-sum-exp [N, H, group, Q]."""
    if options.sinks is None and not options.with_lse:
        return torch.softmax(logits, -1), None
    total = logits.logsumexp(-1, keepdim=True)
    if options.sinks is not None:
        total = torch.logaddexp(total, options.sinks[heads, :, None, None])
    return torch.exp(logits - total), total[..., 0]


def _decode(
    q: Tensor, kv: LayerKV, decode_chunk: DecodeChunk, options: AttendOptions
) -> tuple[Tensor, Tensor | None]:
    """q [N, H, group, D] -> (like q, its log-sum-exp [N, H, group]).

    K and V are freed before the next chunk is gathered, into the same, still cached memory.
    """
    k, v = _gather(kv, decode_chunk.kv_slots, decode_chunk.heads, q.dtype)
    num_rows, num_heads, group, head_dim = q.shape
    size = k.shape[1]
    products = torch.bmm(q.reshape(num_rows * num_heads, group, head_dim), k.transpose(1, 2))
    logits = _logits(products, options).view(num_rows, num_heads, group, 1, size)
    flat = logits.view(num_rows, num_heads * group, size)
    if decode_chunk.outside is not None and decode_chunk.junk is not None:
        flat.masked_fill_(decode_chunk.outside, float("-inf"))
        # A slot past the length or before the window may hold NaN, and 0 * NaN is NaN.
        v.view(-1, head_dim).index_fill_(0, decode_chunk.junk, 0)
    weights, total = _softmax(logits, options, decode_chunk.heads)
    out = torch.bmm(weights.to(v.dtype).view(-1, group, size), v).view(q.shape)
    return out, None if total is None else total[..., 0]


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, out: Tensor, sums: Tensor | None
) -> None:
    """One row, in tiles of queries and KV heads: no [q_len, kv_len] matrix is materialized.

    q, out [q_len, kv_heads, group, D]; k, v [kv_heads, kv_len, D]; sums [q_len, kv_heads, group].
    """
    q_len, kv_heads, group, head_dim = q.shape
    kv_len = k.shape[1]
    max_scores = MAX_SCORES * factor(q)
    tile = max(1, min(TILE * factor(q), 8 * max_scores // (group * kv_len)))
    for begin in range(0, q_len, tile):
        end = min(begin + tile, q_len)
        count, seen = end - begin, kv_len - q_len + end  # keys the tile sees at most
        first = max(0, kv_len - q_len + begin + 1 - options.window) if options.window else 0
        masked = _masked(count, seen - first, options.window, q.device)
        rows = q[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, group * count, head_dim)
        num_heads = max(1, max_scores // (group * count * seen))
        for head in range(0, kv_heads, num_heads):
            heads = slice(head, head + num_heads)
            products = torch.bmm(rows[heads], k[heads, first:seen].transpose(1, 2))
            logits = _logits(products, options).view(1, -1, group, count, seen - first)
            newest = logits[..., -masked.shape[1] :]
            newest.masked_fill_(masked, float("-inf"))
            weights, total = _softmax(logits, options, heads)
            weights = weights.to(v.dtype).view(-1, group * count, seen - first)
            mixed = torch.bmm(weights, v[heads, first:seen]).view(-1, group, count, head_dim)
            out[begin:end, heads] = mixed.permute(2, 0, 1, 3)
            if sums is not None and total is not None:
                sums[begin:end, heads] = total[0].permute(2, 0, 1)


def _masked(count: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[count, n] bool: which of the last n keys the last `count` queries do not see.

    n is `count` without a window, `keys` with one.
    """
    if not window:
        return torch.ones(count, count, dtype=torch.bool, device=device).triu_(1)
    position = torch.arange(keys - count, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key > position) | (key <= position - window)
