"""Columns: the Batch of one step while it is being made."""

from __future__ import annotations

from typing import NamedTuple

from runtime.batch import LAST, Batch, NewRow
from runtime.sequence import Sequence
from runtime.step_time import StepLoad


class Launch(NamedTuple):
    """A step, whom its rows belong to, and how much there is to do."""

    batch: Batch
    sequences: list[Sequence]
    load: StepLoad


class Columns:
    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.q_lens: list[int] = []
        self.tokens: list[int] = []
        self.num_new_pages: list[int] = []
        self.new_pages: list[int] = []
        self.sample: list[bool] = []
        self.decode_rows = 0
        self.new_rows: list[NewRow] = []
        self.kv_tokens = 0  # that the rows that decode read
        self.pairs = 0.0  # of a prompt token with those before it

    def decode(self, rows: list[Sequence], crossing: list[int], taken: list[int]) -> None:
        """One token for each of `rows`; those with an index in `crossing` get a page of `taken`."""
        # Written as whole columns: at 256 rows this is most of what a step costs the host.
        self.sequences = rows
        self.slots = [row.slot for row in rows]
        self.starts = [row.launched for row in rows]
        self.tokens = [LAST if row.ahead else row.tokens[-1] for row in rows]
        self.q_lens = [1] * len(rows)
        self.sample = [True] * len(rows)
        self.num_new_pages = [0] * len(rows)
        self.decode_rows = len(rows)
        self.kv_tokens = sum(self.starts)
        self.new_pages = taken
        for index, page in zip(crossing, taken, strict=True):
            rows[index].pages.append(page)
            self.num_new_pages[index] = 1
        for row in rows:
            row.launched += 1
            row.ahead += 1

    def feed(self, row: Sequence, count: int, new_pages: list[int]) -> bool:
        """`count` known tokens of `row`.  True if it has caught up."""
        caught_up = count == row.todo
        samples = caught_up and row.request.params.pooling is None
        start = row.launched
        self.sequences.append(row)
        self.slots.append(row.slot)
        self.starts.append(start)
        self.q_lens.append(count)
        self.tokens += row.tokens[start : start + count]
        self.num_new_pages.append(len(new_pages))
        self.new_pages += new_pages
        self.sample.append(samples)
        self.pairs += count * (start + count / 2)
        row.launched += count
        row.ahead += samples
        return caught_up

    def start(self, row: Sequence) -> None:
        """`row` has moved into a slot that must start over."""
        params = row.request.params
        history = list(row.tokens) if params.needs_history else []
        self.new_rows.append(NewRow(row.slot, params, row.seed, row.prompt_len, history))

    def launch(self) -> Launch:
        batch = Batch(
            slots=self.slots,
            starts=self.starts,
            q_lens=self.q_lens,
            tokens=self.tokens,
            num_new_pages=self.num_new_pages,
            new_pages=self.new_pages,
            sample=self.sample,
            decode_rows=self.decode_rows,
            new_rows=self.new_rows,
        )
        rows, prompt_tokens = self.decode_rows, len(self.tokens) - self.decode_rows
        load = StepLoad(rows, prompt_tokens, self.kv_tokens, self.pairs)
        return Launch(batch, self.sequences, load)
