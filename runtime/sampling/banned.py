"""Banned sequences: token ids that the sequence in a slot may not output in a row.

Whether a row is about to complete one depends on its last tokens, which the host does not know yet
when it queues a step: they are kept on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.executor.transfers import upload
from runtime.messages import MAX_BANNED_TOKENS
from runtime.scheduler.batch import NewRow

# A banned token keeps a finite logit: where nothing else is allowed, the ban yields.
BANNED = -1e30
ANY = -1  # in BannedTable.before: matches every token
NO_TOKEN = -2  # in BannedSequences.recent: the output is not that long yet
WINDOW = MAX_BANNED_TOKENS - 1


class BannedTable(NamedTuple):
    """before [B, width] int64, right-aligned: after these tokens, last [B] int64 may not come."""

    before: Tensor
    last: Tensor


class BannedSequences:
    """The banned sequences of each slot, and the last WINDOW output tokens of those that have any,
    as device tensors."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._tables: list[BannedTable | None] = [None] * num_slots
        self._recent: Tensor | None = None

    @property
    def recent(self) -> Tensor:
        """[slots, WINDOW] int64; allocated when the first sequence with banned words arrives."""
        if self._recent is None:
            shape = (len(self._tables), WINDOW)
            self._recent = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self._device)
        return self._recent

    def reset(self, row: NewRow) -> None:
        """Upload the banned sequences of a new sequence and its last output tokens so far."""
        banned = row.params.banned
        self._tables[row.slot] = self._table(banned) if banned else None
        if banned:
            last = row.history[row.prompt_len :][-WINDOW:]
            self.recent[row.slot] = self._upload([NO_TOKEN] * (WINDOW - len(last)) + last)

    def table(self, slot: int) -> BannedTable | None:
        return self._tables[slot]

    def _table(self, banned: Sequence[Sequence[int]]) -> BannedTable:
        width = max(map(len, banned)) - 1
        before = [[ANY] * (width + 1 - len(ids)) + list(ids[:-1]) for ids in banned]
        table = upload(np.asarray(before, dtype=np.int64).reshape(len(banned), width), self._device)
        return BannedTable(table, self._upload([ids[-1] for ids in banned]))

    def _upload(self, ids: Sequence[int]) -> Tensor:
        return upload(np.asarray(ids, dtype=np.int64), self._device)

    def apply(self, logits: Tensor, slot: int) -> None:
        """Add BANNED to the logits [vocab] of tokens that would complete a banned sequence."""
        table = self._tables[slot]
        if table is None:
            return
        recent = self.recent[slot, WINDOW - table.before.shape[1] :]
        matches = ((table.before == recent) | (table.before == ANY)).all(dim=1)
        logits.index_add_(0, table.last, matches * logits.new_full((), BANNED))

    def record_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Append tokens [N] to the recent tokens of slots [N], whose rows ban sequences."""
        self.recent[slots] = torch.cat([self.recent[slots, 1:], tokens[:, None]], dim=1)
