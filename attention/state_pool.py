"""StatePool: the recurrent states of sequences, for layers that have these and no keys and values.

A state has one size, however long its sequence is.  It is at the index that the scheduler has given
its sequence, the same in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a sequence: in each of so many layers, for every head a matrix [key_dim,
    value_dim], and for every channel of a causal convolution its last inputs."""

    layers: int
    channels: int
    conv_inputs: int
    heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, conv_dtype: torch.dtype, matrix_dtype: torch.dtype) -> int:
        """Of one sequence, in all layers."""
        conv = self.channels * self.conv_inputs * conv_dtype.itemsize
        matrix = self.heads * self.key_dim * self.value_dim * matrix_dtype.itemsize
        return self.layers * (conv + matrix)


@dataclass(frozen=True, slots=True)
class StatePool:
    """conv [layers, states, channels, inputs], matrix [layers, states, heads, K, V]."""

    conv: Tensor
    matrix: Tensor

    @classmethod
    def allocate(
        cls,
        shape: StateShape,
        count: int,
        *,
        conv_dtype: torch.dtype,
        matrix_dtype: torch.dtype,
        device: torch.device,
    ) -> StatePool:
        """`count` zeroed states."""
        return cls(
            torch.zeros(
                (shape.layers, count, shape.channels, shape.conv_inputs),
                dtype=conv_dtype,
                device=device,
            ),
            torch.zeros(
                (shape.layers, count, shape.heads, shape.key_dim, shape.value_dim),
                dtype=matrix_dtype,
                device=device,
            ),
        )

    @property
    def num_states(self) -> int:
        return self.conv.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + self.matrix.nbytes
