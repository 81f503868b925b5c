"""Batch + slots -> ModelInput: one upload of host integers; the rest is computed on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from model_zoo.inputs import ModelInput
from runtime.executor.slots import SlotTables
from runtime.executor.transfers import PackedUpload
from runtime.scheduler.batch import LAST, Batch, Int64Array


def build_input(
    batch: Batch,
    slots: SlotTables,
    kv: KVPool,
    backend: Backend,
    *,
    all_hidden_states: bool = False,
) -> ModelInput:
    """The model's input for a batch whose pages are in `slots`.

    all_hidden_states: those of all tokens, not only of each row's last one
    """
    q_lens, starts = batch.q_lens, batch.starts
    ends = _offsets(q_lens)  # [B + 1]
    row_of_token = np.repeat(np.arange(len(q_lens)), q_lens)
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], q_lens)
    kv_lens = starts + q_lens
    numbers = PackedUpload()
    for column in (batch.tokens, positions, row_of_token, ends[1:] - 1, batch.slots):
        numbers.add(column, torch.int64)
    for column in (kv_lens, ends, batch.state_slots, *_snapshots(batch)):
        numbers.add(column, torch.int32)
    _, columns = numbers.send(slots.device)
    token_ids, token_positions, token_rows, last_tokens, row_slots, lens, sums = columns[:7]
    states, snapshot_positions, snapshot_states = columns[7:]
    only_decode = batch.decode_rows == len(q_lens)
    if LAST in batch.tokens:
        last = slots.last_token[row_slots[token_rows]]
        token_ids = torch.where(token_ids == LAST, last, token_ids)
    most = -(-int(kv_lens.max()) // kv.page_size)
    tables = tuple(table[row_slots, :most] for table in slots.page_tables)
    meta = AttentionMetadata(
        cu_seqlens_q=sums,
        cache_seqlens=lens,
        page_tables=tables,
        slot_mappings=tuple(
            _slot_mapping(pages, token_rows, token_positions, kv.page_size) for pages in tables
        ),
        max_seqlen_q=int(q_lens.max()),
        decode_rows=batch.decode_rows,
        q_lens=tuple(q_lens.tolist()),
        kv_lens=tuple(kv_lens.tolist()),
    )
    if kv.states is not None:
        snapshots = None if only_decode else (snapshot_positions, snapshot_states)
        meta = replace(meta, state_slots=states, state_snapshots=snapshots)
    return ModelInput(
        tokens=token_ids,
        positions=token_positions,
        # If all rows decode, every token is the last of its row.
        ends=None if all_hidden_states or only_decode else last_tokens,
        meta=backend.plan(meta, kv),
        kv=kv,
        backend=backend,
    )


def _snapshots(batch: Batch) -> tuple[Int64Array, Int64Array]:
    """AttentionMetadata.state_snapshots of a model with recurrent states."""
    rows = len(batch.state_slots)
    positions, states = np.zeros(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    for row, position, state in batch.state_snapshots:
        positions[row], states[row] = position, state
    return positions, states


def _offsets(lens: Int64Array) -> Int64Array:
    offsets = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=offsets[1:])
    return offsets


def _slot_mapping(pages: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[T] int64: the KV cell of each token, page * page_size + offset."""
    page = pages[rows, positions // page_size].to(torch.int64)
    return page * page_size + positions % page_size
