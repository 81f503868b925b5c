"""The host's side of a step: its inputs in one block and one copy, and the copy of its tokens.

    columns of the rows, `stride` numbers each (prepare.py names them)
    sampling parameters of new sequences, a row each
    token ids
    the new pages of rows, those of all groups side by side

Only the used part of the block is copied.  Both directions have a ring of pinned buffers on the
host: one is not written again before its copy is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graph import prepare
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.driver import CudaEvent, CudaStream
from runtime.executor.transfers import ALIGNMENT, PackedLayout
from runtime.sampling.state import NO_SLOT, ROW_WORDS, SamplerState
from runtime.scheduler.batch import Batch, Int64Array, NewRow

Int32Array = NDArray[np.int32]

RING = 4  # steps; two are in flight at once
EXTRA_PAGES = 1024  # pages of a block beyond one a row: enough for a prompt of 16384 tokens
NEW_ROWS = 16  # sequences that fit into a block; 4 in decode steps


@dataclass(frozen=True, slots=True)
class Layout:
    """The block of a bucket's step; offsets in numbers of 4 bytes."""

    bucket: Bucket
    packed: PackedLayout
    stride: int
    new_rows_at: int
    num_new_rows: int
    tokens_at: int
    pages_at: int
    page_room: int

    @classmethod
    @cache
    def of(cls, bucket: Bucket, num_groups: int = 1) -> Layout:
        """num_groups: of layers that share a page table."""
        stride = _aligned(bucket.rows + 1)
        num_new_rows = min(bucket.rows, NEW_ROWS // 4 if bucket.decode else NEW_ROWS)
        page_room = num_groups * (bucket.rows + EXTRA_PAGES)
        packed = PackedLayout((torch.int32, (prepare.NUM_COLUMNS, stride)))
        new_rows_at, tokens_at, pages_at = (
            packed.add(torch.int32, shape) // 4
            for shape in ((num_new_rows, ROW_WORDS), (bucket.tokens,), (page_room,))
        )
        return cls(
            bucket, packed, stride, new_rows_at, num_new_rows, tokens_at, pages_at, page_room
        )

    def column(self, block: Tensor, index: int, length: int) -> Tensor:
        return block[index * self.stride : index * self.stride + length]


def _aligned(count: int) -> int:
    """Numbers of 4 bytes, so that Triton specializes each kernel once."""
    return -(-count * 4 // ALIGNMENT) * ALIGNMENT // 4


class HostBlock:
    """The block of a bucket in host memory, as arrays."""

    def __init__(self, memory: Tensor, layout: Layout) -> None:
        """memory [bytes] uint8"""
        self._layout = layout
        columns, new_rows, tokens, pages = layout.packed.views(memory)
        self._columns: list[Int32Array] = list(columns.numpy())
        self.new_rows: Int32Array = new_rows.numpy()
        self._tokens: Int32Array = tokens.numpy()
        self._pages: Int32Array = pages.numpy()

    def fill(self, batch: Batch, pages_before: Int64Array, sample_slots: Int64Array) -> int:
        """Write all but the new rows.  Returns how many numbers of the block are to be copied.

        pages_before [B]: number of pages of each row's slot; sample_slots [B]: the slot of a row
        that the step samples, else -1.
        """
        columns, count, total = self._columns, len(batch.slots), len(batch.tokens)
        columns[prepare.SLOT][:count] = batch.slots
        columns[prepare.START][:count] = batch.starts
        columns[prepare.PAGES_BEFORE][:count] = pages_before
        columns[prepare.SAMPLE_SLOT][:count] = sample_slots
        if len(batch.state_slots):
            columns[prepare.STATE_SLOT][:count] = batch.state_slots
        if not self._layout.bucket.decode:
            columns[prepare.SNAPSHOT_STATE].fill(-1)
            for row, position, state in batch.state_snapshots:
                columns[prepare.SNAPSHOT_AT][row] = position
                columns[prepare.SNAPSHOT_STATE][row] = state
        ends, kv_lens = columns[prepare.CU_Q], columns[prepare.KV_LEN][:count]
        ends[0] = 0
        np.add(batch.starts, batch.q_lens, out=kv_lens, casting="same_kind")
        np.cumsum(batch.q_lens, out=ends[1 : count + 1])
        if count < self._layout.bucket.rows:
            self._pad(count)
        self._tokens[:total] = batch.tokens
        return self._fill_pages(batch, count, total)

    def _pad(self, count: int) -> None:
        columns = self._columns
        for column in (prepare.SLOT, prepare.SAMPLE_SLOT, prepare.STATE_SLOT):
            columns[column][count:] = -1
        columns[prepare.KV_LEN][count:] = 0
        columns[prepare.CU_Q][count + 1 :] = columns[prepare.CU_Q][count]

    def _fill_pages(self, batch: Batch, count: int, total: int) -> int:
        added, at = self._columns[prepare.PAGES_ADDED], self._columns[prepare.PAGES_AT][:count]
        new_pages = len(batch.new_pages)
        if not new_pages:
            added[:count] = 0
            at.fill(0)
            return self._layout.tokens_at + total
        assert new_pages <= self._layout.page_room, "the caller appends more pages than fit itself"
        added[:count] = batch.num_new_pages
        np.cumsum(added[:count], out=at)
        at -= added[:count]
        self._pages[:new_pages] = batch.new_pages
        return self._layout.pages_at + new_pages


class Staging:
    """A host buffer, pinned where there is a GPU, and its copy to the device."""

    def __init__(self, block: Tensor, stream: CudaStream | None) -> None:
        """block: the destination on the device."""
        self._block, self._stream = block, stream
        self._tensor = torch.zeros(len(block), dtype=torch.int32, pin_memory=stream is not None)
        self._blocks: dict[Bucket, HostBlock] = {}
        self._copied = None if stream is None else CudaEvent(stream)
        self._addresses = block.data_ptr(), self._tensor.data_ptr()

    def block(self, layout: Layout) -> HostBlock:
        """The buffer in the layout of a bucket, once its last copy is complete."""
        if self._copied is not None:
            self._copied.wait()
        bucket = layout.bucket
        if bucket not in self._blocks:
            self._blocks[bucket] = HostBlock(self._tensor.view(torch.uint8), layout)
        return self._blocks[bucket]

    def copy(self, count: int) -> None:
        if self._stream is None or self._copied is None:
            self._block[:count].copy_(self._tensor[:count])
            return
        self._stream.to_device(*self._addresses, 4 * count)
        self._copied.set()


class StepBuffers:
    """The block on the device, and its ring of staging buffers on the host."""

    def __init__(self, largest: list[Bucket], device: torch.device, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        layouts = [Layout.of(bucket, num_groups) for bucket in largest]
        length = max(layout.packed.num_bytes // 4 for layout in layouts)
        self.block = torch.zeros(length, dtype=torch.int32, device=device)
        stream = CudaStream(device) if device.type == "cuda" else None
        self._ring = [Staging(self.block, stream) for _ in range(RING)]
        self._next = 0

    def layout(self, bucket: Bucket) -> Layout:
        """The block of a bucket's step."""
        return Layout.of(bucket, self._num_groups)

    def send(
        self,
        bucket: Bucket,
        batch: Batch,
        pages_before: Int64Array,
        sample_slots: Int64Array,
        new_rows: list[NewRow],
        sampler: SamplerState,
    ) -> None:
        """Queue the copy of a step's block.  new_rows: those whose parameters `sampler` packs."""
        staging = self._ring[self._next]
        self._next = (self._next + 1) % RING
        block = staging.block(self.layout(bucket))
        if new_rows:
            sampler.pack(new_rows, block.new_rows)
        else:
            block.new_rows[:, 0] = NO_SLOT
        staging.copy(block.fill(batch, pages_before, sample_slots))


class OutputCopy:
    """tokens [R] int32, -1 in rows that did not sample; usable [R] int8.  Valid after wait()."""

    def __init__(self, source: Tensor, stream: CudaStream | None) -> None:
        """source: the output buffer on the device."""
        self._source, self._stream = source, stream
        self._memory = torch.zeros_like(source, device="cpu", pin_memory=stream is not None)
        self._arrived = None if stream is None else CudaEvent(stream)
        self._addresses = self._memory.data_ptr(), source.data_ptr()
        self._views: dict[int, tuple[NDArray[np.int32], NDArray[np.int8]]] = {}  # by rows
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def copy(self, rows: int, length: int) -> None:
        """Queue the copy of the first `length` bytes, the outputs of `rows` rows."""
        self.tokens, self.usable = self._views.get(rows) or self._view(rows)
        if self._stream is None or self._arrived is None:
            self._memory[:length].copy_(self._source[:length])
            return
        self._stream.to_host(*self._addresses, length)
        self._arrived.set()

    def _view(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        tokens, usable = output_layout(rows).views(self._memory)
        self._views[rows] = tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self._arrived is not None:
            self._arrived.wait()


@cache
def output_layout(rows: int) -> PackedLayout:
    """tokens [rows] int32 and usable [rows] int8"""
    return PackedLayout((torch.int32, (rows,)), (torch.int8, (rows,)))


class OutputRing:
    """The output buffer of steps of at most max_rows rows, and its ring on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        num_bytes = output_layout(max_rows).num_bytes
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        stream = CudaStream(device) if device.type == "cuda" else None
        self._ring = [OutputCopy(self._memory, stream) for _ in range(RING)]
        self._next = 0

    def outputs(self, rows: int) -> list[Tensor]:
        """tokens, usable [rows] on the device."""
        return output_layout(rows).views(self._memory)

    def fetch(self, rows: int) -> OutputCopy:
        """Queue the copy to the host.  The result is valid for RING - 1 more steps."""
        copy = self._ring[self._next]
        self._next = (self._next + 1) % RING
        copy.copy(rows, output_layout(rows).num_bytes)
        return copy
