"""NormedRows: the norm of the residual that the next GEMM computes.

Between two GEMMs of few rows, a kernel that adds the first one's output to the residual and
computes the norm would take longer to start than to run.  The first GEMM adds its output itself and
stores sums of squares, and the second one multiplies x by their inverse root and the norm's weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_zoo.layers.quantized_rows import QuantizedRows


@dataclass(frozen=True, slots=True)
class Squares:
    """What a GEMM that has added its output to the residual leaves for the norm.

    sums  float32 [tiles, T], whose columns add up to the sums of squares of the residual's rows
    """

    sums: Tensor

    def __len__(self) -> int:
        return self.sums.shape[1]


@dataclass(frozen=True, slots=True)
class NormedRows:
    """rms_norm(rows) * weight [T, K], which is not computed yet.

    rows     [T, K] the residual: valid until the next output is added to it
    squares  float32 [tiles, T], as of Squares
    """

    rows: Tensor
    squares: Tensor
    weight: Tensor  # [K]
    eps: float
    plus_one: bool  # as of RMSNorm

    def __len__(self) -> int:
        return len(self.rows)


NormOutput = Tensor | QuantizedRows | NormedRows  # what a norm gives to its consumer
