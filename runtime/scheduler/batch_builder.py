"""Columns: the Batch of one step while it is being made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.config import MAX_SEQS
from runtime.scheduler.batch import LAST, Batch, Int64Array, NewRow
from runtime.scheduler.decode_columns import NONE, DecodeRows
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepLoad

# Columns of rows that decode, of which a step takes as many as it has; nobody writes to them.
ZEROS: Int64Array = np.zeros(MAX_SEQS, dtype=np.int64)
ONES: Int64Array = np.ones(MAX_SEQS, dtype=np.int64)
LASTS: Int64Array = np.full(MAX_SEQS, LAST, dtype=np.int64)
TRUES: NDArray[np.bool_] = np.ones(MAX_SEQS, dtype=np.bool_)


class SchedulerOutput(NamedTuple):
    """A step, whom its rows belong to, and how much there is to do."""

    batch: Batch
    decoding: DecodeRows
    prompts: list[Sequence]  # whom the rows behind are of
    load: StepLoad
    left_out: list[int]  # rows that were to sample, but had no mask when it was time

    def without(self, rows: list[int]) -> SchedulerOutput:
        """The same step, whose forward pass is queued, if these rows do not sample."""
        sample = self.batch.sample.copy()
        sample[rows] = False
        return self._replace(batch=structs.replace(self.batch, sample=sample), left_out=rows)


class BatchBuilder:
    """The rows that decode at once, then parts of prompts one by one."""

    def __init__(self, decoding: DecodeRows) -> None:
        self.decoding = decoding
        self.prompts: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.q_lens: list[int] = []
        self.tokens: list[int] = []
        self.num_new_pages: list[int] = []
        self.new_pages: list[int] = []
        self.sample: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.kv_tokens = int(np.add.reduce(decoding.starts))  # that the rows that decode read
        self.pairs = 0.0  # of a prompt token with those before it

    @property
    def decode_rows(self) -> int:
        return len(self.decoding.slots)

    @property
    def num_rows(self) -> int:
        return self.decode_rows + len(self.prompts)

    def add_prefill(self, row: Sequence, count: int, new_pages: list[int]) -> bool:
        """`count` known tokens of `row`.  True if it has caught up."""
        prefill_done = count == row.num_new_tokens
        start = row.num_computed_tokens
        self.prompts.append(row)
        self.slots.append(row.slot)
        self.starts.append(start)
        self.q_lens.append(count)
        self.tokens += row.tokens[start : start + count]
        self.num_new_pages.append(len(new_pages))
        self.new_pages += new_pages
        self.sample.append(prefill_done and row.request.params.pooling is None)
        self.pairs += count * (start + count / 2)
        row.num_computed_tokens += count
        return prefill_done

    def start(self, row: Sequence) -> None:
        """`row` has moved into a slot that must start over."""
        params = row.request.params
        history = list(row.tokens) if params.needs_history else []
        self.new_rows.append(NewRow(row.slot, params, row.seed, row.prompt_len, history))

    def launch(self) -> SchedulerOutput:
        first, rows = self.decoding, self.decode_rows
        num_new_pages, sample = ZEROS[:rows], TRUES[:rows]
        if first.new_pages:
            num_new_pages = num_new_pages.copy()
            num_new_pages[first.new_page_rows] = 1
        new_pages = first.new_pages + self.new_pages
        if self.sample:
            sample = np.concatenate((sample, np.array(self.sample, dtype=np.bool_)))
        batch = Batch(
            slots=_joined(first.slots, self.slots),
            starts=_joined(first.starts, self.starts),
            q_lens=_joined(ONES[:rows], self.q_lens),
            tokens=_joined(LASTS[:rows], self.tokens),
            num_new_pages=_joined(num_new_pages, self.num_new_pages),
            new_pages=np.array(new_pages, dtype=np.int64) if new_pages else NONE,
            sample=sample,
            decode_rows=rows,
            new_rows=self.new_rows,
        )
        load = StepLoad(rows, len(self.tokens), self.kv_tokens, self.pairs)
        return SchedulerOutput(batch, first, self.prompts, load, [])


def _joined(first: Int64Array, then: list[int]) -> Int64Array:
    return np.concatenate((first, np.array(then, dtype=np.int64))) if then else first
