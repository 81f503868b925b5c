"""Paged attention cases and the dense float64 attention that every kernel is compared with.

A case is a step of rows (q_len, kv_len) over a pool of shuffled pages.  What no row owns is poison:
every such cell of the pool holds NaN, the tails of last pages and other layers too; entries of the
page table past a row's length are 2**31 - 1 or -1; results begin as NaN.  A kernel that reads or
leaves out one cell too many shows it.

The tolerance is FlashAttention's: at most twice the error of the same maths in the dtype itself,
row by row, so that a long row with small values is not hidden by a short one with large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from attention.common.kernel_inputs import KernelInputs
from tests.support.attention.poisoned_kv_pool import FP8, SPARE, fill, place, poisoned_layers, read


@dataclass(frozen=True)
class OracleCase:
    """One step's tensors as a kernel wants them, and the dense rows as the oracle wants them."""

    rows: tuple[tuple[int, int], ...]  # (q_len, kv_len)
    q: Tensor  # [T, heads, D]
    k: Tensor  # [pages, kv_heads, page, D], one layer of a pool
    v: Tensor
    page_table: Tensor  # [B, P] int32
    cu_seqlens_q: Tensor  # [B + 1] int32
    cache_seqlens: Tensor  # [B] int32
    slot_mapping: Tensor  # [T] int64, where each token's key is: page * page_size + offset
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None  # [heads] float32
    k_scale: Tensor | None  # [kv_heads] float32
    v_scale: Tensor | None
    keys: list[Tensor] = field(repr=False)  # a row: [kv_len, kv_heads, D], as the pool stores them
    values: list[Tensor] = field(repr=False)

    def spoil_before_window(self) -> None:
        """What a model frees: pages that no query sees are junk in the table, and cells of other
        pages that none sees are no numbers."""
        page_size = self.k.shape[2]
        for row, (q_len, kv_len) in enumerate(self.rows):
            first_seen = max(kv_len - q_len - self.window + 1, 0)
            first_page = first_seen // page_size
            self.page_table[row, :first_page] = 2**31 - 1
            for position in range(first_page * page_size, first_seen):
                page = self.page_table[row, position // page_size]
                cell = position % page_size
                self.k[page, :, cell] = self.v[page, :, cell] = float("nan")

    def inputs(self, out: Tensor, lse: Tensor | None = None) -> KernelInputs:
        """Of a kernel that writes out and lse; `window` comes by plan or by itself."""
        return KernelInputs(
            self.q, self.k, self.v, self.page_table, out, lse, scale=self.scale,
            softcap=self.softcap, sinks=self.sinks, k_scale=self.k_scale, v_scale=self.v_scale,
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def results(self) -> tuple[Tensor, Tensor]:
        """out [T, heads, D] and lse [T, heads] for a kernel to fill; NaN until then."""
        out = torch.full_like(self.q, float("nan"), memory_format=torch.contiguous_format)
        return out, out.new_full(out.shape[:2], float("nan"), dtype=torch.float32)

    def tokens(self, row: int) -> slice:
        start = sum(q_len for q_len, _ in self.rows[:row])
        return slice(start, start + self.rows[row][0])

    def oracle(self) -> tuple[Tensor, Tensor]:
        """(out [T, heads, D], lse [T, heads]) in float64."""
        return self._by_row(torch.float64)

    def in_dtype(self) -> Tensor:
        """out [T, heads, D]: the same maths with every matmul and weight in q's dtype."""
        return self._by_row(self.q.dtype)[0].double()

    def _by_row(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for row in range(len(self.rows)):
            k = dequantised(self.keys[row], self.k_scale).to(dtype)
            v = dequantised(self.values[row], self.v_scale).to(dtype)
            out, lse = dense_attention(
                self.q[self.tokens(row)].to(dtype),
                k,
                v,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                sinks=self.sinks,
            )
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


def dequantised(stored: Tensor, scale: Tensor | None) -> Tensor:
    """[n, kv_heads, D] as the pool stores it -> its values, in float64."""
    values = stored.double()
    return values if scale is None else values * scale.double()[:, None]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One row: q [q_len, heads, D]; k, v [kv_len, kv_heads, D] -> out like q, lse [q_len, heads].

    Matmuls and weights are in q's dtype; the softmax is never in less than float32.
    """
    q_len, heads, head_dim = q.shape
    kv_len, kv_heads, _ = k.shape
    position = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    key = torch.arange(kv_len, device=q.device)[None]
    hidden = key > position
    if window:
        hidden |= key <= position - window
    grouped = q.reshape(q_len, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->qhgk", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(q_len, -1, -1, 1)
        scores = torch.cat([scores, sink], -1)
    lse = (
        scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    )
    shift = lse.masked_fill(lse == -torch.inf, 0)  # nothing seen: the weights are 0, not NaN
    weights = torch.exp(scores - shift[..., None])[..., :kv_len].to(q.dtype)
    out = torch.einsum("qhgk,khd->qhgd", weights, v)
    return out.reshape(q.shape), lse.reshape(q_len, heads)


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    scale: float | None = None,
    q_factor: float = 1.0,
    layout: str = "HND",
    strided_q: bool = False,
    shared_pages: int = 0,
    first_page: int = 0,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> OracleCase:
    """Random rows (q_len, kv_len), N(0, 1) tensors; the same arguments give the same case.

    kv_dtype      of the pool, dtype if not said; float8_e4m3fn comes with a scale a KV head
    q_factor      multiplies q, and so the logits, which are N(0, 1) without it
    layout        of the pool: HND [pages, heads, page, D], NHD, `joint` (both in one tensor), or
                  `mixed` (K as HND, V as NHD)
    strided_q     q is a view into a wider tensor, as a fused QKV projection gives it
    shared_pages  rows long enough have the first row's first pages
    first_page    no row's page has a smaller id
    """
    assert all(q_len <= kv_len or kv_len == 0 for q_len, kv_len in rows), "q_len > kv_len"
    random = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=random, device=device)
    kv_dtype = kv_dtype or dtype
    scales = [normal(kv_heads).abs().add_(0.5) / 8 if kv_dtype == FP8 else None for _ in "kv"]
    q = (normal(sum(q_len for q_len, _ in rows), kv_heads * group, head_dim) * q_factor).to(dtype)
    table, places = place(rows, page, shared_pages, first_page, seed)
    slots = [own.to(device) for own in places]
    num_pages = first_page + sum(-(-kv_len // page) for _, kv_len in rows) + SPARE
    pools = poisoned_layers((num_pages, kv_heads, page, head_dim), kv_dtype, layout, device)
    _fill(pools, slots, scales, lambda count: normal(count, kv_heads, head_dim))
    return OracleCase(
        rows=tuple(rows),
        q=_part_of_wider(q, 2 * kv_heads) if strided_q else q,
        k=pools[0],
        v=pools[1],
        page_table=table.to(device),
        cu_seqlens_q=_ints([0, *accumulate(q_len for q_len, _ in rows)], device),
        cache_seqlens=_ints([kv_len for _, kv_len in rows], device),
        slot_mapping=torch.cat([_newest(own, n) for own, (n, _) in zip(slots, rows, strict=True)]),
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        sinks=normal(kv_heads * group) if sinks else None,
        k_scale=scales[0],
        v_scale=scales[1],
        keys=[read(pools[0], own) for own in slots],
        values=[read(pools[1], own) for own in slots],
    )


def _fill(
    pools: Sequence[Tensor],
    slots: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    values: Callable[[int], Tensor],
) -> None:
    """Write so many values to each row's slots, of keys and then of values."""
    for pool, scale in zip(pools, scales, strict=True):
        for own in slots:
            fill(pool, own, values(len(own)), scale)


def _part_of_wider(q: Tensor, more_heads: int) -> Tensor:
    """The same values as a view, between poison."""
    wide = torch.nn.functional.pad(q, (0, 0, 0, more_heads), value=float("nan"))
    return wide[:, : q.shape[1]]


def _ints(values: Sequence[int], device: str | torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _newest(slots: Tensor, count: int) -> Tensor:
    """The last `count` slots; -1 for the tokens of a row without KV."""
    return slots[len(slots) - count :] if len(slots) else slots.new_full((count,), -1)


def check(
    case: OracleCase,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    served: Callable[[int], bool] = lambda q_len: True,
) -> None:
    """Assert that out and lse are the case's attention, in the rows whose q_len `served` accepts.

    out and lse came from case.results(); rows not served must not have been written.
    """
    want, want_lse = case.oracle()
    error = (case.in_dtype() - want).abs()
    rounding = torch.finfo(case.q.dtype).eps / 2
    # A float32 sum of so many products is off by about the root of as many roundings; a few more
    # come from scaling it, to base 2 and back.
    of_logits = torch.finfo(torch.float32).eps / 2 * (case.q.shape[2] ** 0.5 + 4)
    for row, (q_len, kv_len) in enumerate(case.rows):
        if q_len == 0:
            continue
        tokens, name = case.tokens(row), f"row {row} (q_len {q_len}, kv_len {kv_len})"
        if not served(q_len):
            assert out[tokens].isnan().all(), f"{name}: out was written, but is not served"
            assert lse is None or lse[tokens].isnan().all(), f"{name}: lse was written"
            continue
        # Weights are off, relatively, by as much as logits are: those that matter are near the lse.
        logits = of_logits * float(want_lse[tokens].nan_to_num(neginf=0).abs().max())
        limit = 2 * error[tokens].max() + (rounding + logits) * want[tokens].abs().max() + 1e-5
        _assert_close(f"{name}: out", out[tokens], want[tokens], float(limit))
        if lse is not None:
            _assert_close(f"{name}: lse", lse[tokens], want_lse[tokens], 1e-4 + logits)


def _assert_close(name: str, found: Tensor, want: Tensor, limit: float) -> None:
    difference = (found.double() - want).abs()
    difference[found.double() == want] = 0  # equal infinities
    bad = ~(difference <= limit)
    if not bad.any():
        return
    worst = difference.nan_to_num(nan=torch.inf).flatten().argmax()
    where = [int(i) for i in torch.unravel_index(worst, want.shape)]
    got, expected, off = (float(x.flatten()[worst]) for x in (found, want, difference))
    raise AssertionError(
        f"{name}{where} is {got:.6g}, expected {expected:.6g}: off by {off:.3g}, "
        f"allowed {limit:.3g}; {int(bad.sum())} of {bad.numel()} values are off, "
        f"{int(found.isnan().sum())} are NaN"
    )
