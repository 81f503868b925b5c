"""BatchBuilder: collects the rows of one step and makes its Batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.config import MAX_SEQS
from runtime.scheduler.batch import LAST, Batch, Int64Array, NewRow
from runtime.scheduler.decode_columns import EMPTY, DecodeRows
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepLoad

# Constant columns of decode rows, of which every step takes a prefix; they are never written to.
ZEROS: Int64Array = np.zeros(MAX_SEQS, dtype=np.int64)
ONES: Int64Array = np.ones(MAX_SEQS, dtype=np.int64)
LASTS: Int64Array = np.full(MAX_SEQS, LAST, dtype=np.int64)
TRUES: NDArray[np.bool_] = np.ones(MAX_SEQS, dtype=np.bool_)


class SchedulerOutput(NamedTuple):
    """A scheduled step: its batch, the sequence of each row, and its load."""

    batch: Batch
    decoding: DecodeRows
    prefilling: list[Sequence]  # of the rows after the decode rows, in order
    load: StepLoad
    held_rows: list[int]  # rows that do not sample after all: their masks were late

    def without_sampling(self, rows: list[int]) -> SchedulerOutput:
        """This step, whose forward pass is queued already, with `rows` not sampling."""
        sample = self.batch.sample.copy()
        sample[rows] = False
        return self._replace(batch=structs.replace(self.batch, sample=sample), held_rows=rows)


class BatchBuilder:
    """Takes all decode rows at once, then chunks of prefill one by one."""

    def __init__(self, decoding: DecodeRows) -> None:
        self.decoding = decoding
        self.prefilling: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.q_lens: list[int] = []
        self.tokens: list[int] = []
        self.num_new_pages: list[int] = []
        self.new_pages: list[int] = []
        self.sample: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.kv_tokens = int(np.add.reduce(decoding.starts))  # read by the decode rows
        self.pairs = 0.0  # query-key pairs of the prefill tokens

    @property
    def decode_rows(self) -> int:
        return len(self.decoding.slots)

    @property
    def num_rows(self) -> int:
        return self.decode_rows + len(self.prefilling)

    def add_prefill(self, sequence: Sequence, count: int, new_pages: list[int]) -> bool:
        """Add a row of `count` known tokens.  True if this completes the prefill."""
        prefill_done = count == sequence.num_new_tokens
        start = sequence.num_computed_tokens
        self.prefilling.append(sequence)
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.q_lens.append(count)
        self.tokens += sequence.tokens[start : start + count]
        self.num_new_pages.append(len(new_pages))
        self.new_pages += new_pages
        self.sample.append(prefill_done and sequence.request.params.pooling is None)
        self.pairs += count * (start + count / 2)
        sequence.num_computed_tokens += count
        return prefill_done

    def init_slot(self, sequence: Sequence) -> None:
        """Reset the slot of a sequence that was just admitted to it."""
        params = sequence.request.params
        history = list(sequence.tokens) if params.needs_history else []
        self.new_rows.append(
            NewRow(sequence.slot, params, sequence.seed, sequence.prompt_len, history)
        )

    def build(self) -> SchedulerOutput:
        decoding, rows = self.decoding, self.decode_rows
        num_new_pages, sample = ZEROS[:rows], TRUES[:rows]
        if decoding.new_pages:
            num_new_pages = num_new_pages.copy()
            num_new_pages[decoding.new_page_rows] = 1
        new_pages = decoding.new_pages + self.new_pages
        if self.sample:
            sample = np.concatenate((sample, np.array(self.sample, dtype=np.bool_)))
        batch = Batch(
            slots=_joined(decoding.slots, self.slots),
            starts=_joined(decoding.starts, self.starts),
            q_lens=_joined(ONES[:rows], self.q_lens),
            tokens=_joined(LASTS[:rows], self.tokens),
            num_new_pages=_joined(num_new_pages, self.num_new_pages),
            new_pages=np.array(new_pages, dtype=np.int64) if new_pages else EMPTY,
            sample=sample,
            decode_rows=rows,
            new_rows=self.new_rows,
        )
        load = StepLoad(rows, len(self.tokens), self.kv_tokens, self.pairs)
        return SchedulerOutput(batch, decoding, self.prefilling, load, [])


def _joined(decode: Int64Array, prefill: list[int]) -> Int64Array:
    return np.concatenate((decode, np.array(prefill, dtype=np.int64))) if prefill else decode
