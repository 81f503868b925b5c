"""Pages for attention cases: shuffled, and NaN or junk wherever no row has put anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LAYERS, LAYER = 3, 1
JUNK = (2**31 - 1, -1)
SPARE = 3  # pages that no row owns


def place(
    rows: Sequence[tuple[int, int]], page: int, shared_pages: int, first_page: int, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Shuffled pages for each row -> (page_table [B, P] with junk, a row's slots [kv_len])."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-kv_len // page) for _, kv_len in rows]
    width = max(counts, default=0) + 1
    total = len(rows) * width
    pages = torch.randperm(sum(counts) + SPARE, generator=random) + first_page
    table = torch.where(torch.arange(total) % 2 == 0, *JUNK).to(torch.int32).view(-1, width)
    slots: list[Tensor] = []
    used = 0
    for row, ((_, kv_len), count) in enumerate(zip(rows, counts, strict=True)):
        own = pages[used : used + count]
        used += count
        if row and min(kv_len, rows[0][1]) >= shared_pages * page:
            own[:shared_pages] = table[0, :shared_pages]
        table[row, :count] = own
        position = torch.arange(kv_len)
        slots.append(own[position // page] * page + position % page)
    return table, slots


def poisoned_layers(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    layout: str,
    device: str | torch.device,
) -> tuple[Tensor, Tensor]:
    """K and V of one layer out of several, as views of `shape`; every cell of each layer is NaN."""
    pages, kv_heads, page, head_dim = shape

    def poison(*size: int) -> Tensor:
        pool = torch.empty(LAYERS, *size, dtype=dtype, device=device)
        if dtype == FP8:
            pool.view(torch.uint8).fill_(0x7F)  # its NaN
        else:
            pool.fill_(float("nan"))
        return pool[LAYER]

    if layout == "joint":
        both = poison(pages, 2, kv_heads, page, head_dim)
        return both[:, 0], both[:, 1]
    assert layout in ("HND", "NHD", "mixed"), f"layout {layout}: HND, NHD, mixed or joint"

    def single(by_token: bool) -> Tensor:
        if by_token:
            return poison(pages, page, kv_heads, head_dim).transpose(1, 2)
        return poison(*shape)

    return single(layout == "NHD"), single(layout != "HND")


def _bytes(pool: Tensor) -> Tensor:
    """A float8 tensor as bytes, which can be indexed on every device; others as they are."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def fill(pool: Tensor, slots: Tensor, values: Tensor, scale: Tensor | None) -> None:
    """Store values [n, kv_heads, D] at the slots of pool [pages, kv_heads, page, D]."""
    stored = (values if scale is None else values / scale[:, None]).to(pool.dtype)
    page = pool.shape[2]
    _bytes(pool)[slots // page, :, slots % page] = _bytes(stored)


def read(pool: Tensor, slots: Tensor) -> Tensor:
    """[n, kv_heads, D] at the slots: rows that share a page share its values."""
    page = pool.shape[2]
    return _bytes(pool)[slots // page, :, slots % page].view(pool.dtype)
