"""Fed: whether rows that sample nothing can be trusted, in steps that do not say so themselves.

What a part of a prompt stored is read by its last token in every layer: a NaN among its keys or
values is in that token's hidden state, too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import LAST, Batch
from runtime.copies import Download, upload


class Fed:
    """tokens [B] int32, all LAST; usable [B] int8, 1 in rows that sample.  Valid after wait()."""

    def __init__(self, batch: Batch, hidden: Tensor, device: torch.device) -> None:
        """hidden [B, hidden]: of each row's last token."""
        self.tokens: NDArray[np.int32] = np.full(len(batch.slots), LAST, dtype=np.int32)
        self.usable: NDArray[np.int8] = np.ones(len(batch.slots), dtype=np.int8)
        self._rows = (~batch.sample).nonzero()[0]
        states = hidden.index_select(0, upload(self._rows, device))
        self._download = Download([states.isfinite().all(-1)], device)

    def wait(self) -> None:
        """Block until the device has finished the step."""
        [finite] = self._download.wait()
        self.usable[self._rows] = finite.numpy()
