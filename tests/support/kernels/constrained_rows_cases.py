"""Constrained rows for tests of runtime/sampling, sampled without the step that precedes them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.sampling.constrained_rows import ConstrainedRows, DeferredRows
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.state import ROW_WORDS, SamplerState, is_constrained
from tests.support.kernels.sampler_cases import SamplerRow

Masks = dict[int, NDArray[np.bool_]]  # by row, what it may take


class ConstrainedSampler:
    """Rows in slots of their order, behind a step that has chosen the tokens of some."""

    def __init__(self, rows: list[SamplerRow], vocab: int, device: str) -> None:
        where = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
        self.rows = rows
        self.last_token = torch.zeros(len(rows), dtype=torch.int64, device=where)
        self.state = SamplerState(len(rows), vocab, where)
        self.constrained_rows = ConstrainedRows(self.state, self.last_token)
        new_rows = [row.new(slot) for slot, row in enumerate(rows)]
        block = np.zeros((len(rows), ROW_WORDS), dtype=np.int32)
        self.state.pack(new_rows, block)
        self.state.apply(torch.from_numpy(block).to(where))
        for new in new_rows:
            self.constrained_rows.reset(new)
            if new.params.has_penalties:
                self.state.count(new.slot, new.history, new.prompt_len)

    def sample_tokens(
        self, logits: Tensor, ends: list[int], masks: Masks, slots: list[int] | None = None
    ) -> tuple[SamplerOutput, list[int]]:
        """The output, and the rows of the logits that its entries are of."""
        slots = list(range(len(self.rows))) if slots is None else slots
        constrained = [is_constrained(self.rows[slot].params) for slot in slots]
        scored = [
            self.rows[slot].params.logprobs is not None and not mine
            for slot, mine in zip(slots, constrained, strict=True)
        ]
        deferred = DeferredRows(np.flatnonzero(constrained), np.flatnonzero(scored))
        places = [deferred.constrained.tolist().index(row) for row in masks]
        bits = [np.packbits(flags, bitorder="little") for flags in masks.values()]
        allowed = AllowedMasks(np.array(places), np.stack(bits)) if masks else None
        found = self.constrained_rows.sample(
            logits.to(self.state.device), np.array(slots), np.array(ends), deferred, allowed
        )
        return found, deferred.rows.tolist()
