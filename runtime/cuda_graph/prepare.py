# prepare: the inputs of a step, from the block that the host sent and the state of the slots.
#   grid      R + 1: a program a row, and one for the tokens that are padding
#   reads     block (buffers.py): columns of `stride` numbers, then sampling rows, token ids,
#             pages; page_table [slots, max_pages] int32; last_token [slots]
#   writes    tokens, positions, slot_mapping [T] int64; logit_rows [R] int64, the last token of
#             each row; row_pages [R, max_pages] int32, as far as the row has pages; the new pages
#             to page_table; sampler_rows [slots, ROW_WORDS] int32 of new sequences
#   padding   tokens 0, at position 0, not stored (slot_mapping -1); rows of slot -1 get no pages
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

# Columns of the block.  Slots and sample slots of padding rows are -1, its lengths are 0.
SLOT, START, KV_LEN, PAGES_BEFORE, PAGES_ADDED, PAGES_AT, SAMPLE_SLOT, CU_Q = range(8)
NUM_COLUMNS = 8
LAST = -1  # in the block's token ids: the slot's last sampled token


@triton.jit
def _pages_at(table, added, before, at, mask):
    """Entries `at` of a row's page table, of which the slot has the first `before`."""
    old = tl.load(table + at, mask=mask & (at < before), other=0)
    new = tl.load(added + (at - before), mask=mask & (at >= before), other=0)
    return tl.where(at < before, old, new)


@triton.jit
def _fill_padding(tokens, positions, slot_mapping, first, end, BLOCK: tl.constexpr):
    for base in range(first, end, BLOCK):
        at = base + tl.arange(0, BLOCK)
        none = tl.zeros([BLOCK], tl.int64)
        tl.store(tokens + at, none, mask=at < end)
        tl.store(positions + at, none, mask=at < end)
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
    block, page_table, last_token, sampler_rows, tokens, positions, slot_mapping, logit_rows,
    row_pages, stride, new_rows_at, num_new_rows, tokens_at, pages_at, num_tokens, stride_table,
    stride_row,
    SLOT: tl.constexpr, START: tl.constexpr, PAGES_BEFORE: tl.constexpr, PAGES_ADDED: tl.constexpr,
    PAGES_AT: tl.constexpr, CU_Q: tl.constexpr, LAST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_rows = tl.num_programs(0) - 1
    if row < num_new_rows:
        _apply(block + new_rows_at + row * ROW_WORDS, sampler_rows, ROW_WORDS, LANES)
    if row == num_rows:
        used = tl.load(block + CU_Q * stride + num_rows)
        _fill_padding(tokens, positions, slot_mapping, used, num_tokens, BLOCK)
    else:
        slot = tl.load(block + SLOT * stride + row).to(tl.int64)
        begin = tl.load(block + CU_Q * stride + row)
        end = tl.load(block + CU_Q * stride + row + 1)
        tl.store(logit_rows + row, tl.maximum(end - 1, 0).to(tl.int64))
        if slot >= 0:
            start = tl.load(block + START * stride + row)
            before = tl.load(block + PAGES_BEFORE * stride + row)
            count = before + tl.load(block + PAGES_ADDED * stride + row)
            added = block + pages_at + tl.load(block + PAGES_AT * stride + row)
            last = tl.load(last_token + slot).to(tl.int64)
            table = page_table + slot * stride_table
            for base in range(begin, end, BLOCK):
                at = base + tl.arange(0, BLOCK)
                mask = at < end
                token = tl.load(block + tokens_at + at, mask=mask, other=0).to(tl.int64)
                position = start + (at - begin)
                page = _pages_at(table, added, before, position // PAGE, mask).to(tl.int64)
                tl.store(tokens + at, tl.where(token == LAST, last, token), mask=mask)
                tl.store(positions + at, position.to(tl.int64), mask=mask)
                tl.store(slot_mapping + at, page * PAGE + position % PAGE, mask=mask)
            own = row_pages + row.to(tl.int64) * stride_row
            for base in range(0, count, BLOCK):
                at = base + tl.arange(0, BLOCK)
                page = _pages_at(table, added, before, at, at < count)
                tl.store(own + at, page, mask=at < count)
                tl.store(table + at, page, mask=(at >= before) & (at < count))


def prepare(
    block: Tensor,
    page_table: Tensor,
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
    slot_mapping: Tensor,
    logit_rows: Tensor,
    row_pages: Tensor,
    page_size: int,
) -> None:
    """Fill the inputs of a step of R rows and T tokens, padding included.

    block [words] int32: columns of `stride` numbers; num_new_rows sampling rows from new_rows_at,
    token ids from tokens_at, and new pages of rows from pages_at on.  The other shapes are in the
    header.
    """
    assert row_pages.shape[1] == page_table.shape[1]
    assert row_pages.stride(1) == page_table.stride(1) == 1
    num_rows = len(logit_rows)
    assert stride > num_rows == len(row_pages) and num_new_rows <= num_rows
    words = sampler_rows.shape[1]
    assert sampler_rows.is_contiguous()
    _prepare[(num_rows + 1,)](
        block, page_table, last_token, sampler_rows, tokens, positions, slot_mapping, logit_rows,
        row_pages, stride, new_rows_at, num_new_rows, tokens_at, pages_at, len(tokens),
        page_table.stride(0), row_pages.stride(0),
        SLOT=SLOT, START=START, PAGES_BEFORE=PAGES_BEFORE, PAGES_ADDED=PAGES_ADDED,
        PAGES_AT=PAGES_AT, CU_Q=CU_Q, LAST=LAST, PAGE=page_size, BLOCK=BLOCK, ROW_WORDS=words,
        LANES=triton.next_power_of_2(words),
    )  # fmt: skip
