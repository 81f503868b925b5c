"""Allowed token ids, banned sequences, and ids whose log-probabilities a row reports.

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
ANY = -1  # in Banned.before: matches every token
NO_TOKEN = -2  # in TokenConstraints._recent: the output is not that long yet
WINDOW = MAX_BANNED_TOKENS - 1


class Banned(NamedTuple):
    """before [B, width] int64, right-aligned: after these tokens, last [B] int64 may not come."""

    before: Tensor
    last: Tensor


class TokenConstraints:
    """The token ids that each slot's sequence allows, bans and reports, as device tensors."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._allowed: list[Tensor | None] = [None] * num_slots
        self._banned: list[Banned | None] = [None] * num_slots
        self._reported: list[Tensor | None] = [None] * num_slots
        self._recent: Tensor | None = None  # [slots, WINDOW]: the last output tokens

    @property
    def recent(self) -> Tensor:
        """Allocated when the first sequence with banned words arrives."""
        if self._recent is None:
            shape = (len(self._banned), WINDOW)
            self._recent = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self._device)
        return self._recent

    def reset(self, slot: int, params: SamplingParams) -> None:
        """Upload the allowed and reported ids of a sequence that moves into the slot."""
        self._allowed[slot] = self._upload(params.allowed_ids) if params.allowed_ids else None
        self._reported[slot] = self._upload(params.logprob_ids) if params.logprob_ids else None

    def start_banning(self, slot: int, params: SamplingParams, output: Sequence[int]) -> None:
        """Upload the banned sequences of a new sequence and its last `output` tokens so far."""
        self._banned[slot] = self._table(params.banned) if params.banned else None
        if params.banned:
            last = list(output[-WINDOW:])
            self.recent[slot] = self._upload([NO_TOKEN] * (WINDOW - len(last)) + last)

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
        """Add BANNED to the logits [vocab] of tokens that would complete a banned sequence."""
        banned = self._banned[slot]
        if banned is None:
            return
        width = banned.before.shape[1]
        recent = self.recent[slot, WINDOW - width :]
        matches = ((banned.before == recent) | (banned.before == ANY)).all(dim=1)
        row.index_add_(0, banned.last, matches * row.new_full((), BANNED))

    def report(self, scores: LogprobsTensors, logits: Tensor, slots: Sequence[int]) -> None:
        """Replace the top ids by the requested ones in row i, whose sequence is in slots[i]."""
        for row, slot in enumerate(slots):
            ids = self._reported[slot]
            if ids is not None:
                scores.top_ids[row, : len(ids)] = ids
                scores.top_logprobs[row, : len(ids)] = logits[row].log_softmax(-1)[ids]

    def record_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Append tokens [N] to the recent tokens of slots [N], whose rows ban sequences."""
        self.recent[slots] = torch.cat([self.recent[slots, 1:], tokens[:, None]], dim=1)
