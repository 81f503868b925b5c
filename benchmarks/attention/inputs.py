"""The tensors of a case: views of one pool of random numbers, shuffled page tables.

Allocating and filling gigabytes takes longer than measuring them, so that all cases share one flat
tensor for each type.  A cold case cycles through several KV sets, enough that a set is evicted from
the L2 cache before it is read again; a set is a page table over its own pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from benchmarks.attention.cases import ITEM_BYTES, AttentionCase

COLD_BYTES = 400 << 20  # of KV in all sets, eight times the L2 cache of an H100
MAX_SETS = 1024
TWICE_BELOW = 4 << 30  # smaller cases have two sets at least
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


class DoesNotFit(ValueError):
    """The case needs more memory than the pool has."""


def num_sets(case: AttentionCase, cold_bytes: int = COLD_BYTES) -> int:
    """KV sets that the case uses in turn."""
    if case.warm:
        return 1
    if not case.is_decode:
        return 2  # bound by arithmetic
    kv_bytes = max(2 * case.pages * case.page * case.cell_bytes, 1)
    if case.window:
        kv_bytes = max(case.kv_bytes, 1)  # what is read, which is less
    least = 2 if kv_bytes < TWICE_BELOW else 1
    return min(MAX_SETS, max(least, -(-cold_bytes // kv_bytes)))


def pool_items(case: AttentionCase, cold_bytes: int = COLD_BYTES) -> int:
    """Numbers of K and V together that the case's sets hold."""
    cells = num_sets(case, cold_bytes) * case.pages * case.page
    return 2 * cells * case.kv_heads * case.head_dim


class RandomPool:
    """Normally distributed numbers on the device, one flat tensor for each type."""

    def __init__(self, device: torch.device, cold_bytes: int = COLD_BYTES) -> None:
        self.device = device
        self.cold_bytes = cold_bytes
        self._flat: dict[str, Tensor] = {}

    def reserve(self, cases: Sequence[AttentionCase]) -> None:
        """Make tensors that all the cases fit in, as far as there is memory."""
        needed: dict[str, int] = {}
        for case in cases:
            dtype = case.kv_dtype or case.dtype
            needed[dtype] = max(needed.get(dtype, 0), pool_items(case, self.cold_bytes))
        most = self._max_bytes()
        for dtype, items in sorted(needed.items(), key=lambda item: item[1]):
            items = min(items, most // ITEM_BYTES[dtype])
            self._flat[dtype] = self._random(items, DTYPES[dtype])

    def _max_bytes(self) -> int:
        if self.device.type != "cuda":
            return 1 << 28
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.6)

    def _random(self, items: int, dtype: torch.dtype) -> Tensor:
        flat = torch.empty(items, dtype=dtype, device=self.device)
        if dtype != torch.float8_e4m3fn:
            return flat.normal_()
        for part in flat.split(1 << 28):  # there are no normal_() bytes
            part.copy_(torch.randn(len(part), device=self.device, dtype=torch.float16))
        return flat

    def take(self, items: int, dtype: str) -> Tensor:
        """A view of the first so many.

        Raises DoesNotFit if the pool is smaller.
        """
        flat = self._flat[dtype]
        if items > len(flat):
            gib, has = ((n * ITEM_BYTES[dtype]) / 2**30 for n in (items, len(flat)))
            raise DoesNotFit(f"needs {gib:.1f} GiB of {dtype}, the pool has {has:.1f}")
        return flat[:items]


@dataclass
class Inputs:
    """Tensors of a case; `tables` [sets, B, max_pages] int32, entries past a row's length are 0."""

    case: AttentionCase
    q: Tensor  # [T, heads, D]
    out: Tensor  # like q
    k: Tensor  # [pages, kv_heads, page, D], laid out as in KVPool
    v: Tensor
    memory: Tensor  # what k and v are views of, flat: for those that want another layout
    tables: Tensor
    cu_seqlens_q: Tensor  # [B + 1] int32
    cache_seqlens: Tensor  # [B] int32
    sinks: Tensor | None  # [heads] float32
    k_scale: Tensor | None  # [kv_heads] float32, with fp8
    v_scale: Tensor | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.case.head_dim)

    @property
    def sets(self) -> int:
        return len(self.tables)

    @cached_property
    def kv(self) -> KVPool:
        """k and v as a pool of one layer."""
        scales = (None if scale is None else scale[None] for scale in (self.k_scale, self.v_scale))
        return KVPool(self.k[None], self.v[None], *scales)

    def meta(self, number: int) -> AttentionMetadata:
        """The step over one of the sets."""
        case, device = self.case, self.q.device
        return AttentionMetadata(
            cu_seqlens_q=self.cu_seqlens_q,
            cache_seqlens=self.cache_seqlens,
            page_tables=(self.tables[number],),
            slot_mappings=(torch.arange(case.tokens, device=device),),
            max_seqlen_q=max(case.q_lens),
            decode_rows=sum(q_len == 1 for q_len in case.q_lens),
            q_lens=case.q_lens,
            kv_lens=case.kv_lens,
        )


def make_inputs(case: AttentionCase, pool: RandomPool) -> Inputs:
    """Views of the pool for the case.

    Raises DoesNotFit if the pool is smaller than the case's KV.
    """
    device, count = pool.device, num_sets(case, pool.cold_bytes)
    kv_dtype = case.kv_dtype or case.dtype
    pages = count * case.pages
    shape = (pages, case.kv_heads, 2, case.page, case.head_dim)
    memory = pool.take(math.prod(shape), kv_dtype)
    k, v = memory.view(shape).unbind(2)
    generator = torch.Generator(device).manual_seed(case.rows)
    q = torch.randn(
        (case.tokens, case.heads, case.head_dim), device=device, generator=generator
    ).to(DTYPES[case.dtype])

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def about(size: int, mean: float) -> Tensor:
        return mean + 0.1 * torch.randn(size, device=device, generator=generator)

    fp8 = kv_dtype == "fp8"
    return Inputs(
        case=case,
        q=q,
        out=torch.empty_like(q),
        k=k,
        v=v,
        memory=memory,
        tables=_page_tables(case, count, generator, device),
        cu_seqlens_q=ints(0, *case.q_lens).cumsum(0).int(),
        cache_seqlens=ints(*case.kv_lens),
        sinks=about(case.heads, 0.0) if case.sinks else None,
        k_scale=about(case.kv_heads, 1.0) if fp8 else None,
        v_scale=about(case.kv_heads, 1.0) if fp8 else None,
    )


def _page_tables(
    case: AttentionCase, count: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Each set has all its pages in random order, and no page of another set."""
    lens = torch.tensor([-(-kv_len // case.page) for kv_len in case.kv_lens], device=device)
    width = max(1, int(lens.max()))
    used = torch.arange(width, device=device) < lens[:, None]
    tables = torch.zeros(count, case.rows, width, dtype=torch.int32, device=device)
    order = torch.randperm(count * case.pages, generator=generator, device=device).int()
    return tables.masked_scatter_(used.expand_as(tables), order)
