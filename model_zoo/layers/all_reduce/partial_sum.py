"""PartialSum: a rank's part of a sum over all ranks, which the next norm computes.

The kernel of the norm after a row-parallel product sends the product to all ranks and adds what
they send: no all-reduce is launched, and the sum is not stored and read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from model_zoo.layers.all_reduce.symmetric_buffers import (
    OF_EMBEDDINGS,
    TURNS,
    RankSum,
    SymmetricBuffers,
)
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.layers.quantized_rows import UnscaledRows

if TYPE_CHECKING:
    from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind


@dataclass(frozen=True, slots=True)
class PartialSum:
    """part     [T, N]: what this rank adds
    is_sent  the other ranks have it, or will: a GEMM has sent it
    """

    rank_sum: RankSum
    part: Tensor
    is_sent: bool = False

    def __len__(self) -> int:
        return len(self.part)

    def add_rms_norm(
        self,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        post_weight: Tensor | None = None,
        plus_one: bool = False,
        scales: ScaleKind | None = None,
    ) -> Tensor | QuantizedRows:
        """residual [T, N] += the sum of all ranks' parts; returns rms_norm(residual) * weight [N].

        post_weight, plus_one: as in all_reduce_add_rms_norm; scales: of the norm as 8-bit codes
        """
        assert len(residual) == len(self)
        options = {"post_weight": post_weight, "plus_one": plus_one, "is_sent": self.is_sent}
        where = self.rank_sum
        arguments = where.buffers, where.turn, self.part, residual, weight, eps
        if scales is not None:
            from model_zoo.layers.all_reduce.add_rms_norm_quantize import (
                all_reduce_add_rms_norm_quantize,
            )

            return all_reduce_add_rms_norm_quantize(*arguments, scales, **options)
        from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm

        return all_reduce_add_rms_norm(*arguments, **options)


# What a norm adds to the residual: a whole output, or this rank's part of it.  NormedRows: a GEMM
# has added it, and this is the norm.
Addend = Tensor | UnscaledRows | PartialSum | NormedRows


class FusedSums:
    """The sums over ranks that kernels of layers compute: of how many rows, and in which buffers.

    max_rows  products of more rows are summed by the library; at most those of the buffers
    """

    def __init__(self, buffers: SymmetricBuffers) -> None:
        self.buffers, self.max_rows = buffers, buffers.max_rows
        self._turn = 0

    def begin(self, rows: int, *, of_embeddings: bool = False) -> RankSum | None:
        """The next sum, of so many rows, in which all ranks take part; None: the library adds.

        of_embeddings: a step begins with it.  Those of products begin with the first buffer after
        it, so that all ranks and all graphs take the same turns, whatever ran before
        """
        if not 0 < rows <= self.max_rows:  # of no rows no rank would wait for another
            return None
        if of_embeddings:
            self.restart()
            return RankSum(self.buffers, OF_EMBEDDINGS)
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        return RankSum(self.buffers, turn)

    def restart(self) -> None:
        """Begin with the first buffer: after a sum of embeddings, which has a buffer of its own, or
        of the library, in which all ranks take part, none reads what has been sent before."""
        self._turn = 0
