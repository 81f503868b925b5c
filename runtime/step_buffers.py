"""Step buffers: what the host tells the device of a step, in one block and one copy.

    columns of the rows, `stride` numbers each (kernels/prepare.py names them)
    what new sequences say of sampling, a row each
    token ids
    the pages that rows get

Little more is copied than the step needs.  The host writes into pinned memory, of which there are
several pieces: one is not written again before its copy has happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import Batch, NewRow
from runtime.buckets import Bucket
from runtime.kernels import prepare
from runtime.sampler_state import ROW_WORDS, SamplerState

Ints = NDArray[np.int32]
Block = TypeVar("Block", Ints, Tensor)

RING = 4  # of steps, two are under way at once
ALIGNMENT = 8  # numbers: no kernel is compiled twice because a column begins elsewhere
PIECE = 256  # numbers: a copy is so many, or a multiple
EXTRA_PAGES = 1024  # pages of a block beyond one a row: a prompt of 16384 tokens moves in
NEW_ROWS = 16  # sequences that a block has room for; 4 where a step feeds no prompts


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in the block of a step of some bucket, in numbers of 4 bytes."""

    bucket: Bucket
    stride: int
    new_rows_at: int
    num_new_rows: int
    tokens_at: int
    pages_at: int
    end: int

    @classmethod
    @cache
    def of(cls, bucket: Bucket) -> Layout:
        stride = _aligned(bucket.rows + 1)
        new_rows_at = prepare.NUM_COLUMNS * stride
        num_new_rows = min(bucket.rows, NEW_ROWS // 4 if bucket.decode else NEW_ROWS)
        tokens_at = new_rows_at + _aligned(num_new_rows * ROW_WORDS)
        pages_at = tokens_at + _aligned(bucket.tokens)
        end = pages_at + bucket.rows + EXTRA_PAGES
        return cls(bucket, stride, new_rows_at, num_new_rows, tokens_at, pages_at, end)

    @property
    def page_room(self) -> int:
        return self.end - self.pages_at

    def column(self, block: Tensor, index: int, length: int) -> Tensor:
        return block[index * self.stride : index * self.stride + length]

    def new_rows(self, block: Block) -> Block:
        """[num_new_rows, ROW_WORDS]"""
        end = self.new_rows_at + self.num_new_rows * ROW_WORDS
        return block[self.new_rows_at : end].reshape(self.num_new_rows, ROW_WORDS)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@cache
def _packer(count: int) -> Struct:
    return Struct(f"{count}i")


def fill(
    numbers: Ints, layout: Layout, batch: Batch, pages_before: Ints, sample_slots: Ints
) -> int:
    """Write the block of a step.  Returns how many numbers of it there are to copy.

    pages_before [B]: pages that each row's slot has; sample_slots [B]: its slot where the row's
    token is chosen within the step, else -1.
    """
    columns = numbers[: layout.new_rows_at].reshape(prepare.NUM_COLUMNS, layout.stride)
    count = len(batch.slots)
    pack, memory = _packer(count).pack_into, numbers.data
    row_bytes = 4 * layout.stride
    pack(memory, prepare.SLOT * row_bytes, *batch.slots)
    pack(memory, prepare.START * row_bytes, *batch.starts)
    starts, kv_lens = columns[prepare.START], columns[prepare.KV_LEN]
    ends, kv_ends = columns[prepare.CU_Q], columns[prepare.CU_K]
    total = len(batch.tokens)
    ends[0] = kv_ends[0] = 0
    if total == count:
        ends[1 : count + 1] = _counting(count)
        np.add(starts[:count], 1, out=kv_lens[:count])
    else:
        pack(memory, prepare.KV_LEN * row_bytes, *batch.q_lens)
        np.cumsum(kv_lens[:count], out=ends[1 : count + 1])
        kv_lens[:count] += starts[:count]
    np.cumsum(kv_lens[:count], out=kv_ends[1 : count + 1])
    columns[prepare.PAGES_BEFORE, :count] = pages_before
    columns[prepare.SAMPLE_SLOT, :count] = sample_slots
    _pad(columns, count, total, int(kv_ends[count]))
    _packer(total).pack_into(memory, 4 * layout.tokens_at, *batch.tokens)
    return _fill_pages(numbers, columns, layout, batch)


@cache
def _counting(count: int) -> Ints:
    return np.arange(1, count + 1, dtype=np.int32)


def _pad(columns: Ints, count: int, total: int, kv_total: int) -> None:
    columns[prepare.SLOT, count:] = -1
    columns[prepare.SAMPLE_SLOT, count:] = -1
    columns[prepare.KV_LEN, count:] = 0
    columns[prepare.CU_Q, count + 1 :] = total
    columns[prepare.CU_K, count + 1 :] = kv_total


def _fill_pages(numbers: Ints, columns: Ints, layout: Layout, batch: Batch) -> int:
    count, new_pages = len(batch.slots), len(batch.new_pages)
    added = columns[prepare.PAGES_ADDED]
    if not new_pages:
        added[:count] = 0
        columns[prepare.PAGES_AT, :count] = 0
        return layout.tokens_at + len(batch.tokens)
    assert new_pages <= layout.page_room, "the caller has moved them out of the batch"
    row_bytes = 4 * layout.stride
    _packer(count).pack_into(numbers.data, prepare.PAGES_ADDED * row_bytes, *batch.num_new_pages)
    at = columns[prepare.PAGES_AT, :count]
    np.cumsum(added[:count], out=at)
    at -= added[:count]
    _packer(new_pages).pack_into(numbers.data, 4 * layout.pages_at, *batch.new_pages)
    return layout.pages_at + new_pages


class Staging:
    """Numbers on the host, pinned where there is a GPU, and the copy that reads them."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tensor = torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu)
        self.numbers: Ints = self._tensor.numpy()
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # of the block, and of this, by length

    def wait(self) -> None:
        """Until the numbers may be written again."""
        # As a rule they may, and to wait for nothing takes longer than all that the host writes.
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()

    def copy_to(self, block: Tensor, count: int) -> None:
        """block: the same one each time."""
        length = min(-(-count // PIECE) * PIECE, len(block))
        target, source = self._views.get(length) or self._view(block, length)
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _view(self, block: Tensor, length: int) -> tuple[Tensor, Tensor]:
        self._views[length] = block[:length], self._tensor[:length]
        return self._views[length]


class StepBuffers:
    """The block on the device, and its stagings on the host."""

    def __init__(self, largest: list[Bucket], device: torch.device) -> None:
        length = max(Layout.of(bucket).end for bucket in largest)
        self.block = torch.zeros(length, dtype=torch.int32, device=device)
        self._ring = [Staging(length, device) for _ in range(RING)]
        self._next = 0

    def send(
        self,
        bucket: Bucket,
        batch: Batch,
        pages_before: Ints,
        sample_slots: Ints,
        new_rows: list[NewRow],
        sampler: SamplerState,
    ) -> None:
        """Queue the copy of a step's block.  new_rows: those that `sampler` shall learn of."""
        staging = self._ring[self._next]
        self._next = (self._next + 1) % RING
        staging.wait()
        layout = Layout.of(bucket)
        sampler.pack(new_rows, layout.new_rows(staging.numbers))
        count = fill(staging.numbers, layout, batch, pages_before, sample_slots)
        staging.copy_to(self.block, count)
