"""Tokens that a row must or must not take, or whose log-probabilities it reports.

Whether a row is about to complete a banned sequence depends on its last tokens, which the host
does not know yet when it queues a step: they are kept on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.executor.transfers import upload
from runtime.messages import MAX_BANNED_TOKENS, SamplingParams
from runtime.sampling.logprobs import LogprobsTensors

# A banned token keeps a finite logit: where nothing else is allowed, the ban yields.
BANNED = -1e30
ANY = -1  # in Banned.before: whatever stands there
NOTHING = -2  # in TokenSets._recent: the answer is not that long yet
WINDOW = MAX_BANNED_TOKENS - 1


class Banned(NamedTuple):
    """before [B, width] int64, right-aligned: after these tokens, last [B] int64 may not come."""

    before: Tensor
    last: Tensor


class TokenSets:
    """What the rows of the slots allow, ban and report."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._allowed: list[Tensor | None] = [None] * num_slots
        self._banned: list[Banned | None] = [None] * num_slots
        self._reported: list[Tensor | None] = [None] * num_slots
        self._recent: Tensor | None = None  # [slots, WINDOW]: the last tokens of each answer

    @property
    def recent(self) -> Tensor:
        """Made when the first sequence with banned words comes."""
        if self._recent is None:
            shape = (len(self._banned), WINDOW)
            self._recent = torch.full(shape, NOTHING, dtype=torch.int64, device=self._device)
        return self._recent

    def reset(self, slot: int, params: SamplingParams) -> None:
        """A sequence moves in: what it allows and reports."""
        self._allowed[slot] = self._upload(params.allowed_ids) if params.allowed_ids else None
        self._reported[slot] = self._upload(params.logprob_ids) if params.logprob_ids else None

    def start_banning(self, slot: int, params: SamplingParams, answer: Sequence[int]) -> None:
        """The same, of what it bans; `answer` is what it has said so far."""
        self._banned[slot] = self._table(params.banned) if params.banned else None
        if params.banned:
            last = list(answer[-WINDOW:])
            self.recent[slot] = self._upload([NOTHING] * (WINDOW - len(last)) + last)

    def banned(self, slot: int) -> Banned | None:
        return self._banned[slot]

    def _table(self, banned: Sequence[Sequence[int]]) -> Banned:
        width = max(map(len, banned)) - 1
        before = [[ANY] * (width + 1 - len(ids)) + list(ids[:-1]) for ids in banned]
        table = upload(np.asarray(before, dtype=np.int64).reshape(len(banned), width), self._device)
        return Banned(table, self._upload([ids[-1] for ids in banned]))

    def _upload(self, ids: Sequence[int]) -> Tensor:
        return upload(np.asarray(ids, dtype=np.int64), self._device)

    def keep_allowed(self, row: Tensor, slot: int) -> None:
        """Mask, in the logits of one row [vocab], all but the allowed ids."""
        allowed = self._allowed[slot]
        if allowed is not None:
            kept = row[allowed]
            row.clamp_(max=-torch.inf)  # NaN stays
            row[allowed] = kept

    def ban(self, row: Tensor, slot: int) -> None:
        """Push down, in the logits of one row [vocab], what would complete a banned sequence."""
        banned = self._banned[slot]
        if banned is None:
            return
        width = banned.before.shape[1]
        recent = self.recent[slot, WINDOW - width :]
        meets = ((banned.before == recent) | (banned.before == ANY)).all(dim=1)
        row.index_add_(0, banned.last, meets * row.new_full((), BANNED))

    def report(self, scores: LogprobsTensors, logits: Tensor, slots: Sequence[int]) -> None:
        """Put the ids that were asked for in the place of the likeliest; row i is slots[i]'s."""
        for row, slot in enumerate(slots):
            ids = self._reported[slot]
            if ids is not None:
                scores.top_ids[row, : len(ids)] = ids
                scores.top_logprobs[row, : len(ids)] = logits[row].log_softmax(-1)[ids]

    def record_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """The slots [N] of rows that ban something have been given tokens [N]."""
        self.recent[slots] = torch.cat([self.recent[slots, 1:], tokens[:, None]], dim=1)
