"""Seqlens: where the packed sequences of a call begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Seqlens:
    """Sequence i has the rows cu_seqlens[i]:cu_seqlens[i + 1]; lengths are at least 1.

    lens        on the host
    cu_seqlens  [sequences + 1] int32 on the device of the rows
    padded      all rows, with those behind the last sequence, which nothing attends to and whose
                outputs may be anything; 0: there are none.  Kernels then take every length from
                the device, so that a CUDA graph serves any
    """

    lens: tuple[int, ...]
    cu_seqlens: Tensor
    padded: int = 0

    @classmethod
    def of(cls, lens: tuple[int, ...], device: torch.device) -> Seqlens:
        assert lens and min(lens) > 0
        ends = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        return cls(lens, ends.to(device, non_blocking=True))

    @property
    def total(self) -> int:
        """Rows."""
        return self.padded or sum(self.lens)

    @property
    def longest(self) -> int:
        """What kernels are launched for: no sequence has more rows."""
        return self.padded or max(self.lens)
