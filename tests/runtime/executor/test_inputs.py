"""Batches become tensors: prefix sums, positions, page tables, slot mapping, tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from model_zoo.inputs import ModelInput
from runtime.executor.inputs import build_input
from runtime.executor.slots import SlotTables
from runtime.messages import SamplingParams
from runtime.scheduler.batch import LAST, Batch, NewRow, make_batch

CPU = torch.device("cpu")
PAGE = 4
PARAMS = SamplingParams(max_tokens=4)
KV = KVPool.allocate(
    layers=1, pages=64, kv_heads=1, page_size=PAGE, head_dim=2, dtype=torch.float32, device=CPU
)


def make_slots() -> SlotTables:
    return SlotTables(8, 8, CPU)


def start(*slots: int) -> list[NewRow]:
    return [NewRow(slot, PARAMS, 0, 1, []) for slot in slots]


def build(batch: Batch, slots: SlotTables) -> ModelInput:
    slots.append_pages(batch, slots.count_pages(batch))
    return build_input(batch, slots, KV, ReferenceBackend())


def test_whole_prompts_are_laid_end_to_end() -> None:
    batch = make_batch(
        [5, 2], [0, 0], [3, 5], [*range(8)], [1, 2], [9, 4, 6], [True] * 2, 0, start(5, 2)
    )
    inp = build(batch, make_slots())
    assert inp.meta.cu_seqlens_q.tolist() == [0, 3, 8]
    assert inp.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert inp.tokens.tolist() == [*range(8)]
    assert inp.ends is not None and inp.ends.tolist() == [2, 7]
    assert inp.meta.page_tables[0].tolist() == [[9, 0], [4, 6]]
    assert inp.meta.slot_mappings[0].tolist() == [36, 37, 38, 16, 17, 18, 19, 24]
    assert inp.meta.max_seqlen_q == 5


def test_decoding_rows_count_up_by_one() -> None:
    slots = make_slots()
    build(
        make_batch([1, 0], [0, 0], [4, 2], [7] * 6, [1, 1], [3, 8], [True] * 2, 0, start(1, 0)),
        slots,
    )
    slots.last_token[:2] = torch.tensor([50, 51])
    inp = build(
        make_batch([1, 0], [4, 2], [1, 1], [LAST, 33], [1, 0], [5], [True] * 2, 2, []), slots
    )
    assert inp.meta.cu_seqlens_q.tolist() == [0, 1, 2]
    assert inp.meta.cache_seqlens.tolist() == [5, 3]
    assert inp.tokens.tolist() == [51, 33]
    assert inp.positions.tolist() == [4, 2]
    assert inp.meta.slot_mappings[0].tolist() == [20, 34]
    assert (inp.meta.decode_rows, inp.meta.num_rows) == (2, 2)


def test_chunk_behind_a_prefix_is_written_behind_it() -> None:
    batch = make_batch(
        [3, 4], [0, 8], [2, 3], [1, 2, 3, 4, 5], [1, 3], [1, 6, 7, 2], [False, True], 0, start(3, 4)
    )
    inp = build(batch, make_slots())
    assert inp.meta.cu_seqlens_q.tolist() == [0, 2, 5]
    assert inp.ends is not None and inp.ends.tolist() == [1, 4]
    assert inp.meta.q_lens == (2, 3) and inp.meta.kv_lens == (2, 11)
    assert inp.meta.slot_mappings[0].tolist() == [4, 5, 8, 9, 10]


def test_tensors_have_the_types_that_kernels_expect() -> None:
    inp = build(make_batch([0], [0], [2], [1, 2], [1], [1], [True], 0, start(0)), make_slots())
    meta = inp.meta
    for tensor in (meta.cu_seqlens_q, meta.cache_seqlens, meta.page_tables[0]):
        assert tensor.dtype == torch.int32
    for tensor in (inp.tokens, inp.positions, inp.ends, meta.slot_mappings[0]):
        assert tensor is not None and tensor.dtype == torch.int64


def test_slot_that_starts_over_has_an_empty_page_table() -> None:
    slots = make_slots()
    build(make_batch([2], [0], [6], [0] * 6, [2], [11, 12], [True], 0, start(2)), slots)
    inp = build(make_batch([2], [0], [5], [0] * 5, [2], [21, 22], [True], 0, start(2)), slots)
    assert inp.meta.page_tables[0].tolist() == [[21, 22]]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_token_is_written_behind_the_one_before_it(data: st.DataObject) -> None:
    """Rows in random slots grow by random chunks, among each other, on pages of any order."""
    slots = make_slots()
    free = data.draw(st.permutations(range(64)))
    lens, pages = [0] * 8, [[] for _ in range(8)]
    for step in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
        q_lens = [data.draw(st.integers(1, 6)) for _ in rows]
        starts = [lens[slot] for slot in rows]
        num_new, new_pages = [], []
        for slot, q_len in zip(rows, q_lens, strict=True):
            need = -(-(lens[slot] + q_len) // PAGE) - len(pages[slot])
            taken, free = free[:need], free[need:]
            pages[slot] += taken
            new_pages += taken
            num_new.append(need)
            lens[slot] += q_len
        new = start(*range(8)) if step == 0 else []
        tokens, sample = [0] * sum(q_lens), [True] * len(rows)
        batch = make_batch(rows, starts, q_lens, tokens, num_new, new_pages, sample, 0, new)
        meta = build(batch, slots).meta
        wanted = [
            pages[slot][position // PAGE] * PAGE + position % PAGE
            for slot, first, q_len in zip(rows, starts, q_lens, strict=True)
            for position in range(first, first + q_len)
        ]
        assert meta.slot_mappings[0].tolist() == wanted
        for row, slot in enumerate(rows):
            assert meta.page_tables[0][row, : len(pages[slot])].tolist() == pages[slot]
