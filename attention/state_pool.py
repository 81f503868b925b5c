"""StatePool: recurrent states of sequences, for layers that have these and no keys and values.

A state has one size, however long its sequence is, and is at the same index in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StatePool:
    """conv    [layers, states, inputs, channels]: the last inputs of a causal convolution
    matrix  [layers, states, heads, value_dim, key_dim]
    """

    conv: Tensor
    matrix: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        states: int,
        conv: tuple[int, int],
        matrix: tuple[int, int, int],
        conv_dtype: torch.dtype,
        matrix_dtype: torch.dtype,
        device: torch.device,
    ) -> StatePool:
        """A zeroed pool; conv, matrix: the shapes of one state in one layer."""
        return cls(
            zeros((layers, states, *conv), conv_dtype, device),
            zeros((layers, states, *matrix), matrix_dtype, device),
        )

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole states, (from, to), in order."""
        for source, target in pairs:
            for pool in (self.conv, self.matrix):
                pool[:, target].copy_(pool[:, source])

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.conv, self.matrix

    def of(self, state: int) -> tuple[Tensor, Tensor]:
        """One state in all layers: views [layers, ...]."""
        return self.conv[:, state], self.matrix[:, state]

    @property
    def num_states(self) -> int:
        return self.conv.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + self.matrix.nbytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, so that what no token has reached is never touched.

    `torch.zeros` writes all of it: 2.4 s for 512 MiB on a small virtual machine.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
