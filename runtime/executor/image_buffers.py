"""StepImageBuffers: where a step finds what it needs of images, at the same addresses in each.

So a CUDA graph can hold such a step.  The copies are queued on the stream of the steps, behind the
one that reads what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_zoo.inputs import StepImages
from runtime.scheduler.batch import Int64Array

NUMBERS = 4  # of a token: its position is a triple, and its row of the features


def step_bytes(num_tokens: int, feature_bytes: int) -> int:
    """Bytes of the StepImages of a step; feature_bytes: of a token, as its image's encoder has."""
    return num_tokens * (feature_bytes + NUMBERS * torch.int64.itemsize)


class StepImageBuffers:
    """Of the largest step; smaller ones use the front."""

    def __init__(
        self, max_tokens: int, features: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """features: their shape, of one token.  On a CPU memory is taken as steps write to it."""
        self._features = torch.empty(max_tokens, *features, dtype=dtype, device=device)
        # One block for one copy; a step's own lie side by side.
        self._numbers = torch.empty(NUMBERS * max_tokens, dtype=torch.int64, device=device)
        self._pinned = device.type == "cuda"

    @property
    def num_bytes(self) -> int:
        return self._features.nbytes + self._numbers.nbytes

    def of_step(self, num_tokens: int) -> StepImages:
        """Views of what a step of so many tokens reads."""
        numbers = self._numbers[: NUMBERS * num_tokens].view(NUMBERS, num_tokens)
        # The positions come first: kernels are compiled for addresses that are multiples of 16.
        return StepImages(self._features[:num_tokens], numbers[3], numbers[:3])

    def write(
        self, features: Sequence[Tensor], index: Int64Array, positions: Int64Array
    ) -> StepImages:
        """Queue the copies of a step's numbers, and of its features one behind the other.

        features: each [tokens, 1 + deepstack, hidden] on the device; index, positions: as in
        StepImages, of all tokens of the step
        """
        first = 0
        for one in features:
            self._features[first : first + len(one)].copy_(one)
            first += len(one)
        staging = torch.empty(NUMBERS * len(index), dtype=torch.int64, pin_memory=self._pinned)
        numbers = staging.numpy().reshape(NUMBERS, len(index))
        numbers[:3], numbers[3] = positions, index
        self._numbers[: len(staging)].copy_(staging, non_blocking=True)
        return self.of_step(len(index))

    def clear(self, num_tokens: int) -> None:
        """Make a step of so many tokens one of padding alone."""
        none = np.full(num_tokens, -1, dtype=np.int64)
        self.write([], none, np.zeros((3, num_tokens), dtype=np.int64))
