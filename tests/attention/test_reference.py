"""The reference back end against dense attention in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention import reference, reference_plan
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.reference import ReferenceBackend

CPU = torch.device("cpu")


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [q_len, heads, d]; k, v [kv_len, kv_heads, d]; causal, aligned at the end."""
    q_len, heads, head_dim = q.shape
    kv_len = len(k)
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * head_dim**-0.5
    query = torch.arange(kv_len - q_len, kv_len)
    future = torch.arange(kv_len)[None] > query[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class ReferenceStep:
    """Random rows over a pool of shuffled pages; every cell that no row owns holds NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],  # (q_len, kv_len) a row
        *,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 16,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        lengths = sorted(lengths, key=lambda pair: pair[0] != 1)
        q_lens, kv_lens = [q for q, _ in lengths], [k for _, k in lengths]
        counts = [-(-length // page) for length in kv_lens]
        pages = torch.randperm(sum(counts) + 3).tolist()
        self.kv = KVPool.allocate(
            layers=2,
            pages=len(pages),
            kv_heads=kv_heads,
            page_size=page,
            head_dim=head_dim,
            dtype=dtype,
            device=CPU,
        )
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        table = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        self.q = torch.randn(sum(q_lens), kv_heads * group, head_dim, dtype=dtype)
        self.k = [torch.randn(length, kv_heads, head_dim, dtype=dtype) for length in kv_lens]
        self.v = [torch.randn(length, kv_heads, head_dim, dtype=dtype) for length in kv_lens]
        writes: list[Tensor] = []
        for row, (q_len, kv_len) in enumerate(lengths):
            own = torch.tensor([pages.pop() for _ in range(counts[row])])
            table[row, : counts[row]] = own
            position = torch.arange(kv_len)
            slots = own[position // page] * page + position % page
            writes.append(slots[-q_len:])
            past = slots[:-q_len]
            self.kv.k[1][past // page, :, past % page] = self.k[row][:-q_len]
            self.kv.v[1][past // page, :, past % page] = self.v[row][:-q_len]
        self.meta = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32),
            cache_seqlens=torch.tensor(kv_lens, dtype=torch.int32),
            page_tables=(table,),
            slot_mappings=(torch.cat(writes),),
            max_seqlen_q=max(q_lens),
            decode_rows=sum(q == 1 for q in q_lens),
            q_lens=tuple(q_lens),
            kv_lens=tuple(kv_lens),
        )

    def run(self) -> Tensor:
        backend = ReferenceBackend()
        meta = backend.plan(self.meta, self.kv)
        new_k = torch.cat([k[-q:] for k, q in zip(self.k, meta.q_lens, strict=True)])
        new_v = torch.cat([v[-q:] for v, q in zip(self.v, meta.q_lens, strict=True)])
        backend.write(new_k, new_v, self.kv.layers[1], meta)
        return backend.attend(self.q, self.kv.layers[1], meta, scale=self.q.shape[-1] ** -0.5)

    def oracle(self) -> Tensor:
        rows = self.q.split(self.meta.q_lens)
        return torch.cat([dense(*row) for row in zip(rows, self.k, self.v, strict=True)])


rows = st.lists(
    st.integers(1, 90).flatmap(
        lambda kv: st.tuples(st.sampled_from([1, 1, kv, -(-kv // 2)]), st.just(kv))
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    rows,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([16, 40, 128]),
    st.sampled_from([16, 32]),
    st.integers(0, 2**31),
)
def test_attention_over_pages_equals_dense_attention(lengths, kv_heads, group, dim, page, seed):
    torch.manual_seed(seed)
    step = ReferenceStep(lengths, kv_heads=kv_heads, group=group, head_dim=dim, page=page)
    torch.testing.assert_close(step.run().double(), step.oracle(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_torch_attention(dtype: torch.dtype):
    torch.manual_seed(0)
    step = ReferenceStep([(1, 70), (1, 5), (33, 80), (64, 64)], dtype=dtype, head_dim=64)
    exact, ours = step.oracle(), step.run().double()
    error = torch.zeros(())
    for q, k, v in zip(step.q.split(step.meta.q_lens), step.k, step.v, strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(heads, 1).transpose(0, 1)[None] for x in (k, v))
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask
        )
        error = torch.maximum(
            error,
            (theirs[0].transpose(0, 1) - dense(q, *(x[0].transpose(0, 1) for x in (k, v))))
            .abs()
            .max(),
        )
    assert (ours - exact).abs().max() <= 2 * error + 1e-3


def test_a_prompt_in_query_tiles_equals_the_whole(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    step = ReferenceStep([(75, 90), (1, 3)])
    whole = step.run()
    monkeypatch.setattr(reference, "TILE", 7)
    torch.testing.assert_close(step.run(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_bytes", [1, 2 * 6 * 16 * 16 * 4, 1 << 30])
def test_rows_that_decode_in_splits_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
):
    """One KV head of one row at a time, a few rows, and all rows at once."""
    torch.manual_seed(3)
    monkeypatch.setattr(reference_plan, "CHUNK_BYTES", chunk_bytes)
    step = ReferenceStep([(1, length) for length in (90, 3, 64, 16, 17, 88, 1, 65, 40)] + [(5, 9)])
    torch.testing.assert_close(step.run().double(), step.oracle(), rtol=1e-5, atol=1e-5)


def test_short_rows_are_not_padded_to_a_long_one():
    step = ReferenceStep([(1, 1000), *[(1, 20)] * 30])
    plan = ReferenceBackend().plan(step.meta, step.kv).plan
    assert isinstance(plan, reference_plan.ReferencePlan)
    pages = 63 + 30 * 2
    chunks = plan.chunks(0, 0).decode
    assert sum(chunk.kv_slots.numel() for chunk in chunks) == pages * step.kv.kv_heads


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_a_prompt_of_8192_tokens_makes_no_square_of_scores():
    torch.manual_seed(4)
    step = ReferenceStep([(8192, 8192)], kv_heads=1, group=2)
    with LargestTensor() as largest:
        out = step.run()
    assert largest.numel <= 2 * reference.TILE * 8192
    last = dense(step.q[-3:], step.k[0], step.v[0])
    torch.testing.assert_close(out[-3:].double(), last, rtol=1e-5, atol=1e-5)


def test_attend_without_a_plan_is_refused():
    step = ReferenceStep([(1, 5)])
    with pytest.raises(AssertionError, match="plan"):
        ReferenceBackend().attend(step.q, step.kv.layers[1], step.meta, scale=1.0)


def test_a_page_may_be_shared_by_rows():
    torch.manual_seed(2)
    step = ReferenceStep([(1, 33), (1, 40)])
    table = step.meta.page_tables[0]
    table[0, :2] = table[1, :2]  # the first two full pages of row 1 serve row 0 too
    for cache in (step.k, step.v):
        cache[0][:32] = cache[1][:32]
    torch.testing.assert_close(step.run().double(), step.oracle(), rtol=1e-5, atol=1e-5)
