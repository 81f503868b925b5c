"""Batch + slots -> ModelInput: one upload of host integers; the rest is computed on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from model_zoo.inputs import ModelInput
from runtime.executor.slots import SequenceSlots
from runtime.executor.transfers import upload
from runtime.scheduler.batch import LAST, Batch, Int64Array


class ModelProtocol(Protocol):
    """What the runners need of a model."""

    def __call__(
        self, inp: ModelInput
    ) -> Tensor: ...  # hidden states [R, hidden] of inp.ends, or [T, hidden]

    def logits(
        self, hidden: Tensor
    ) -> Tensor: ...  # [R, hidden] -> [R, vocab], which the caller may overwrite

    def shortened(self) -> AbstractContextManager[None]: ...  # runs its first layers alone


def build_input(
    batch: Batch,
    slots: SequenceSlots,
    kv: KVPool,
    backend: Backend,
    *,
    all_hidden_states: bool = False,
) -> ModelInput:
    """The model's input for a batch, after `slots.begin(batch)`.

    all_hidden_states: those of all tokens, not only of each row's last one
    """
    q_lens, starts = batch.q_lens, batch.starts
    ends = _offsets(q_lens)  # [B + 1]
    row_of_token = np.repeat(np.arange(len(q_lens)), q_lens)
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], q_lens)
    kv_lens = starts + q_lens
    device = _upload_together(
        [
            batch.tokens,
            positions,
            row_of_token,
            ends[1:] - 1,
            batch.slots,
            kv_lens,
            ends,
        ],
        slots.device,
    )
    token_ids, token_positions, token_rows, last_tokens, row_slots, lens, sums = device
    if LAST in batch.tokens:
        last = slots.last_token[row_slots[token_rows]]
        token_ids = torch.where(token_ids == LAST, last, token_ids)
    pages = slots.page_table[row_slots, : -(-int(kv_lens.max()) // kv.page_size)]
    meta = AttentionMetadata(
        cu_seqlens_q=sums.to(torch.int32),
        cache_seqlens=lens.to(torch.int32),
        page_table=pages,
        slot_mapping=_slot_mapping(pages, token_rows, token_positions, kv.page_size),
        max_seqlen_q=int(q_lens.max()),
        decode_rows=batch.decode_rows,
        q_lens=tuple(q_lens.tolist()),
        kv_lens=tuple(kv_lens.tolist()),
    )
    return ModelInput(
        tokens=token_ids,
        positions=token_positions,
        # If all rows decode, every token is the last of its row.
        ends=None if all_hidden_states or batch.decode_rows == len(q_lens) else last_tokens,
        meta=backend.plan(meta, kv),
        kv=kv,
        backend=backend,
    )


def _offsets(lens: Int64Array) -> Int64Array:
    offsets = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=offsets[1:])
    return offsets


def _upload_together(columns: list[Int64Array], device: torch.device) -> list[Tensor]:
    joined = upload(np.concatenate(columns), device)
    return list(joined.split([len(column) for column in columns]))


def _slot_mapping(pages: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[T] int64: the KV cell of each token, page * page_size + offset."""
    page = pages[rows, positions // page_size].to(torch.int64)
    return page * page_size + positions % page_size
