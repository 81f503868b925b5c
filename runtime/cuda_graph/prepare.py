# prepare: the inputs of a step, from the block that the host sent and the state of the slots.
#   grid      (R + 1, groups): a program a row, and one for the tokens that are padding; what all
#             groups share is done by those of the first group
#   reads     block (buffers.py): columns of `stride` numbers, then sampling rows, token ids,
#             pages, those of all groups side by side; page_tables [groups, slots, max_pages]
#             int32; last_token [slots]; position_deltas [slots] int64, of models that read images
#   writes    tokens, positions [T], slot_mappings [groups, T] int64; logit_rows [R] int64, the last
#             token of each row; row_pages [groups, R, max_pages] int32, as far as the row has
#             pages; the new pages to page_tables; sampler_rows [slots, ROW_WORDS] int32 of new
#             sequences
#   padding   tokens 0, at position 0, not stored (slot -1); rows of slot -1 get no pages
#   order     A row's program reads of the slot's pages only those that no program writes, and takes
#             the new ones from the block: no program waits for another
#   limits    pages * page_size < 2^63; a row's tokens and pages < 2^31
#   bound     latency: three memory accesses, and one more for every BLOCK of tokens and pages
#   checked   tests/runtime/cuda_graph/test_prepare.py against plain torch
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens or pages a program handles at once

# Columns of the block.  Slots of all kinds are -1 in rows of padding, lengths are 0.
SLOT, START, KV_LEN, PAGES_BEFORE, PAGES_ADDED, PAGES_AT, SAMPLE_SLOT, CU_Q = range(8)
# Of models with recurrent states.  The last two, of steps that are not of decode rows alone: a
# position within a row, and where the state that it has there goes.
STATE_SLOT, SNAPSHOT_AT, SNAPSHOT_STATE = range(8, 11)
NUM_COLUMNS = 11
LAST = -1  # in the block's token ids: the slot's last sampled token


@triton.jit
def _pages_at(table, added, before, at, mask, GROUPS: tl.constexpr):
    """Entries `at` of a row's page table, of which the slot has the first `before`."""
    old = tl.load(table + at, mask=mask & (at < before), other=0)
    new = tl.load(added + (at - before) * GROUPS, mask=mask & (at >= before), other=0)
    return tl.where(at < before, old, new)


@triton.jit
def _fill_padding(tokens, positions, slot_mapping, first, end, group, BLOCK: tl.constexpr):
    for base in range(first, end, BLOCK):
        at = base + tl.arange(0, BLOCK)
        none = tl.zeros([BLOCK], tl.int64)
        shared = (at < end) & (group == 0)
        tl.store(tokens + at, none, mask=shared)
        tl.store(positions + at, none, mask=shared)
        tl.store(slot_mapping + at, none - 1, mask=at < end)


@triton.jit
def _apply(block, sampler_rows, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Store the sampling parameters of one new sequence in the slot that its first word names."""
    word = tl.arange(0, LANES)
    values = tl.load(block + word, mask=word < WORDS, other=0)
    slot = tl.load(block).to(tl.int64)
    if slot >= 0:
        tl.store(sampler_rows + slot * WORDS + word, values, mask=word < WORDS)


@triton.jit(
    do_not_specialize=[
        "stride",
        "new_rows_at",
        "num_new_rows",
        "tokens_at",
        "pages_at",
        "num_tokens",
    ]
)
def _prepare(
    block, page_tables, last_token, sampler_rows, position_deltas, tokens, positions, slot_mappings,
    logit_rows, row_pages, stride, new_rows_at, num_new_rows, tokens_at, pages_at, num_tokens,
    stride_group_table, stride_table, stride_group_mapping, stride_group_row, stride_row,
    SLOT: tl.constexpr, START: tl.constexpr, PAGES_BEFORE: tl.constexpr, PAGES_ADDED: tl.constexpr,
    PAGES_AT: tl.constexpr, CU_Q: tl.constexpr, LAST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROW_WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    num_rows = tl.num_programs(0) - 1
    slot_mapping = slot_mappings + group.to(tl.int64) * stride_group_mapping
    if (row < num_new_rows) & (group == 0):
        _apply(block + new_rows_at + row * ROW_WORDS, sampler_rows, ROW_WORDS, LANES)
    if row == num_rows:
        used = tl.load(block + CU_Q * stride + num_rows)
        _fill_padding(tokens, positions, slot_mapping, used, num_tokens, group, BLOCK)
    else:
        slot = tl.load(block + SLOT * stride + row).to(tl.int64)
        begin = tl.load(block + CU_Q * stride + row)
        end = tl.load(block + CU_Q * stride + row + 1)
        if group == 0:
            tl.store(logit_rows + row, tl.maximum(end - 1, 0).to(tl.int64))
        if slot >= 0:
            start = tl.load(block + START * stride + row)
            before = tl.load(block + PAGES_BEFORE * stride + row)
            count = before + tl.load(block + PAGES_ADDED * stride + row)
            added = block + pages_at + tl.load(block + PAGES_AT * stride + row) * GROUPS + group
            last = tl.load(last_token + slot).to(tl.int64)
            delta = 0
            if position_deltas is not None:
                delta = tl.load(position_deltas + slot)
            table = page_tables + group.to(tl.int64) * stride_group_table + slot * stride_table
            for base in range(begin, end, BLOCK):
                at = base + tl.arange(0, BLOCK)
                mask = at < end
                token = tl.load(block + tokens_at + at, mask=mask, other=0).to(tl.int64)
                position = start + (at - begin)
                page = _pages_at(table, added, before, position // PAGE, mask, GROUPS).to(tl.int64)
                shared = mask & (group == 0)
                tl.store(tokens + at, tl.where(token == LAST, last, token), mask=shared)
                tl.store(positions + at, position.to(tl.int64) + delta, mask=shared)
                tl.store(slot_mapping + at, page * PAGE + position % PAGE, mask=mask)
            own = row_pages + group.to(tl.int64) * stride_group_row + row.to(tl.int64) * stride_row
            for base in range(0, count, BLOCK):
                at = base + tl.arange(0, BLOCK)
                page = _pages_at(table, added, before, at, at < count, GROUPS)
                tl.store(own + at, page, mask=at < count)
                tl.store(table + at, page, mask=(at >= before) & (at < count))


def prepare(
    block: Tensor,
    page_tables: Tensor,
    last_token: Tensor,
    sampler_rows: Tensor,
    *,
    stride: int,
    new_rows_at: int,
    num_new_rows: int,
    tokens_at: int,
    pages_at: int,
    tokens: Tensor,
    positions: Tensor,
    slot_mappings: Tensor,
    logit_rows: Tensor,
    row_pages: Tensor,
    page_size: int,
    position_deltas: Tensor | None = None,
) -> None:
    """Fill the inputs of a step of R rows and T tokens, padding included.

    block [words] int32: columns of `stride` numbers; num_new_rows sampling rows from new_rows_at,
    token ids from tokens_at, and new pages of rows from pages_at on.  The other shapes are in the
    header.  position_deltas: what is added to the places of a slot's tokens for their positions
    """
    groups, _, max_pages = page_tables.shape
    assert len(row_pages) == len(slot_mappings) == groups and row_pages.shape[2] == max_pages
    assert row_pages.stride(2) == page_tables.stride(2) == slot_mappings.stride(1) == 1
    num_rows = len(logit_rows)
    assert stride > num_rows == row_pages.shape[1] and num_new_rows <= num_rows
    words = sampler_rows.shape[1]
    assert sampler_rows.is_contiguous()
    _prepare[(num_rows + 1, groups)](
        block, page_tables, last_token, sampler_rows, position_deltas, tokens, positions,
        slot_mappings, logit_rows, row_pages, stride, new_rows_at, num_new_rows, tokens_at,
        pages_at, len(tokens), *page_tables.stride()[:2], slot_mappings.stride(0),
        *row_pages.stride()[:2],
        SLOT=SLOT, START=START, PAGES_BEFORE=PAGES_BEFORE, PAGES_ADDED=PAGES_ADDED,
        PAGES_AT=PAGES_AT, CU_Q=CU_Q, LAST=LAST, PAGE=page_size, BLOCK=BLOCK, GROUPS=groups,
        ROW_WORDS=words, LANES=triton.next_power_of_2(words),
    )  # fmt: skip
