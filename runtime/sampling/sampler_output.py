"""Drawn: what was chosen of rows of logits, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling.logprobs import LogprobsTensors

ALIGNMENT = 16  # bytes: no kernel is compiled twice because a tensor begins elsewhere


class PackedTensors:
    """Tensors of given types and shapes in one piece of memory, which one copy takes elsewhere."""

    def __init__(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._places: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self.num_bytes = 0
        for dtype, shape in wanted:
            length = math.prod(shape) * dtype.itemsize
            self._places.append((self.num_bytes, length, dtype, shape))
            self.num_bytes += -(-length // ALIGNMENT) * ALIGNMENT

    def of(self, memory: Tensor) -> list[Tensor]:
        """memory [num_bytes] uint8, on any device."""
        return [
            memory[first : first + length].view(dtype).view(shape)
            for first, length, dtype, shape in self._places
        ]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """tokens [R], integers, and usable [R], bool or int8, on the device; scores of `scored`, some
    of the rows.  Where all of these are `pieces` of one memory, that is here, too."""

    tokens: Tensor  # LAST: the row may take none
    usable: Tensor  # False: some logit is NaN or +inf, and the token means nothing
    scored: list[int]
    widths: list[int]  # alternatives each scored row asked for
    scores: LogprobsTensors | None
    packed: PackedTensors | None = None
    memory: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What has to reach the host."""
        if self.memory is not None:
            return [self.memory]
        return [self.tokens, self.usable, *(self.scores.tensors() if self.scores else ())]

    def arrived(self, tensors: list[Tensor]) -> list[Tensor]:
        """tokens, usable and those of the scores, of what tensors() has become there."""
        return tensors if self.packed is None else self.packed.of(tensors[0])
