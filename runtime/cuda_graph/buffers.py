"""The host's side of a step: its inputs in one block and one copy, and its tokens.

    columns of the rows, `stride` numbers each (prepare.py names them)
    output: where in the ring the step's last kernel writes its tokens
    sampling parameters of new sequences, a row each
    token ids
    the new pages of rows, those of all groups side by side

Only the used part of the block is copied; tokens are written to the host's memory by the kernel,
since a copy after it would keep the GPU from the next step.  A step has one event, at its end: the
GPU takes microseconds for each.  Until then its buffers, of a ring in pinned memory, are not
written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graph import prepare
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.driver import CudaEvent, CudaStream
from runtime.executor.pending import MAX_IN_FLIGHT
from runtime.executor.transfers import ALIGNMENT, PackedLayout
from runtime.sampling.state import NO_SLOT, ROW_WORDS, SamplerState
from runtime.scheduler.batch import Batch, Int64Array, NewRow

Int32Array = NDArray[np.int32]

RING = MAX_IN_FLIGHT  # steps, whose events StepClock takes
EXTRA_PAGES = 1024  # pages of a block beyond one a row: enough for a prompt of 16384 tokens
NEW_ROWS = 16  # sequences that fit into a block; 4 in decode steps


@dataclass(frozen=True, slots=True)
class Layout:
    """The block of a bucket's step; offsets in numbers of 4 bytes."""

    bucket: Bucket
    packed: PackedLayout
    stride: int
    output_at: int
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
        output_at, new_rows_at, tokens_at, pages_at = (
            packed.add(torch.int32, shape) // 4
            for shape in ((1,), (num_new_rows, ROW_WORDS), (bucket.tokens,), (page_room,))
        )
        return cls(
            bucket, packed, stride, output_at, new_rows_at, num_new_rows, tokens_at, pages_at,
            page_room,
        )  # fmt: skip

    def column(self, block: Tensor, index: int, length: int) -> Tensor:
        return block[index * self.stride : index * self.stride + length]

    def output(self, block: Tensor) -> Tensor:
        return block[self.output_at : self.output_at + 1]


def _aligned(count: int) -> int:
    """Numbers of 4 bytes, so that Triton specializes each kernel once."""
    return -(-count * 4 // ALIGNMENT) * ALIGNMENT // 4


class HostBlock:
    """The block of a bucket in host memory, as arrays."""

    def __init__(self, memory: Tensor, layout: Layout) -> None:
        """memory [bytes] uint8"""
        self._layout = layout
        columns, output, new_rows, tokens, pages = layout.packed.views(memory)
        self._columns: list[Int32Array] = list(columns.numpy())
        self.output: Int32Array = output.numpy()
        self.new_rows: Int32Array = new_rows.numpy()
        self._tokens: Int32Array = tokens.numpy()
        self._pages: Int32Array = pages.numpy()

    def fill(self, batch: Batch, pages_before: Int64Array, sample_slots: Int64Array) -> int:
        """Write all but the output and the new rows.  Returns how many of the block's numbers are
        to be copied.

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


@cache
def output_layout(rows: int) -> PackedLayout:
    """tokens [rows] int32 and usable [rows] int8"""
    return PackedLayout((torch.int32, (rows,)), (torch.int8, (rows,)))


class StepOutputs:
    """tokens [R] int32, -1 in rows that did not sample; usable [R] int8.  Valid after wait()."""

    def __init__(self, memory: Tensor, stream: CudaStream | None) -> None:
        """memory [bytes] uint8, on the host: what the step's last kernel writes"""
        self._memory = memory
        self.ended = None if stream is None else CudaEvent(stream)  # all of the step is complete
        self._views: dict[int, tuple[NDArray[np.int32], NDArray[np.int8]]] = {}  # by rows
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def end(self, rows: int) -> None:
        """When all of a step of so many rows is queued."""
        self.tokens, self.usable = self._views.get(rows) or self._view(rows)
        if self.ended is not None:
            self.ended.record()

    def _view(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        tokens, usable = output_layout(rows).views(self._memory)
        self._views[rows] = tokens.numpy(), usable.numpy()
        return self._views[rows]

    def wait(self) -> None:
        """Block until the device has finished the step."""
        if self.ended is not None:
            self.ended.synchronize()


class HostBuffers:
    """What the host has of one step: its block, which is copied to the device, and its outputs."""

    def __init__(
        self, index: int, block: Tensor, outputs: StepOutputs, stream: CudaStream | None
    ) -> None:
        """index: in the ring; block: the destination on the device"""
        self._index, self._block, self._stream = index, block, stream
        self.outputs = outputs
        self._tensor = torch.zeros(len(block), dtype=torch.int32, pin_memory=stream is not None)
        self._blocks: dict[Bucket, HostBlock] = {}
        self._addresses = block.data_ptr(), self._tensor.data_ptr()

    def block(self, layout: Layout) -> HostBlock:
        """The block in the layout of a bucket, once the step that had it last is complete."""
        self.outputs.wait()
        bucket = layout.bucket
        if bucket not in self._blocks:
            self._blocks[bucket] = HostBlock(self._tensor.view(torch.uint8), layout)
        self._blocks[bucket].output[0] = self._index
        return self._blocks[bucket]

    def copy(self, count: int) -> None:
        """Queue the copy of the first `count` numbers of the block."""
        if self._stream is None:
            self._block[:count].copy_(self._tensor[:count])
        else:
            self._stream.to_device(*self._addresses, 4 * count)


class StepBuffers:
    """The block on the device, and the ring of what the host has of steps.

    Each step begins with send() and ends with end().
    """

    def __init__(self, largest: list[Bucket], device: torch.device, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        layouts = [Layout.of(bucket, num_groups) for bucket in largest]
        length = max(layout.packed.num_bytes // 4 for layout in layouts)
        self.block = torch.zeros(length, dtype=torch.int32, device=device)
        stream = CudaStream(device) if device.type == "cuda" else None
        num_bytes = output_layout(max(bucket.rows for bucket in largest)).num_bytes
        pinned = stream is not None
        self._outputs = torch.zeros(RING, num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._ring = [
            HostBuffers(index, self.block, StepOutputs(memory, stream), stream)
            for index, memory in enumerate(self._outputs)
        ]
        self._current = 0
        # As a step's own, so that times between both can be taken.  A CPU has no events.
        self.new_event = None if stream is None else partial(CudaEvent, stream)

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
        self._current = (self._current + 1) % RING
        buffers = self._ring[self._current]
        block = buffers.block(self.layout(bucket))
        if new_rows:
            sampler.pack(new_rows, block.new_rows)
        else:
            block.new_rows[:, 0] = NO_SLOT
        buffers.copy(block.fill(batch, pages_before, sample_slots))

    def outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """tokens, usable [RING, rows], to which kernels write: those of a step where its block's
        `output` says."""
        start = output_layout(rows).offset(1)
        tokens = self._outputs.view(torch.int32)[:, :rows]
        return tokens, self._outputs[:, start : start + rows].view(torch.int8)

    def end(self, rows: int) -> StepOutputs:
        """When all of the step is queued: its outputs, valid until RING more have begun."""
        outputs = self._ring[self._current].outputs
        outputs.end(rows)
        return outputs
