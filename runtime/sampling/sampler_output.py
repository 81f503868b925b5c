"""SamplerOutput: the sampled tokens of rows of logits, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling.logprobs import LogprobsTensors

ALIGNMENT = 16  # bytes: keeps pointers aligned, so that Triton specializes each kernel once


class PackedTensors:
    """Tensors of given types and shapes in one buffer, which one copy transfers."""

    def __init__(self, *specs: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._places: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self.num_bytes = 0
        for dtype, shape in specs:
            length = math.prod(shape) * dtype.itemsize
            self._places.append((self.num_bytes, length, dtype, shape))
            self.num_bytes += -(-length // ALIGNMENT) * ALIGNMENT

    def of(self, memory: Tensor) -> list[Tensor]:
        """The tensors as views of memory [num_bytes] uint8, on any device."""
        return [
            memory[first : first + length].view(dtype).view(shape)
            for first, length, dtype, shape in self._places
        ]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """tokens [R], integers, and usable [R], bool or int8, on the device; scores of rows
    `scored`.  If all of these are views of one `memory`, `packed` is their layout."""

    tokens: Tensor  # LAST: no token is allowed
    usable: Tensor  # False: some logit is NaN or +inf, and the token means nothing
    scored: list[int]
    widths: list[int]  # alternatives that each scored row requests
    scores: LogprobsTensors | None
    packed: PackedTensors | None = None
    memory: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What has to be copied to the host."""
        if self.memory is not None:
            return [self.memory]
        return [self.tokens, self.usable, *(self.scores.tensors() if self.scores else ())]

    def arrived(self, tensors: list[Tensor]) -> list[Tensor]:
        """tokens, usable and the scores' tensors, from the host copies of tensors()."""
        return tensors if self.packed is None else self.packed.of(tensors[0])
