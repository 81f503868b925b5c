"""RowParallelLinear: a Linear whose inputs are divided among ranks, which add their products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend, PartialSum
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_rows import Producer, QuantizedRows
from model_zoo.parallel.communicator import Communicator
from model_zoo.parallel.shard import Part
from model_zoo.quantization.weight_scheme import WeightScheme


class RowParallelLinear(Linear):
    """The checkpoint's bias is that of rank 0, since all ranks' products are added."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        communicator: Communicator,
        parts: Mapping[str, int],
        scheme: WeightScheme | None,
        cuts: Mapping[str, Part],
        transposed: bool = False,
        after: Producer | None = None,
    ) -> None:
        super().__init__(
            inputs,
            outputs,
            bias=bias,
            dtype=dtype,
            parts=parts,
            scheme=scheme,
            transposed=transposed,
            after=after,
            cuts=cuts,
        )
        self._communicator = communicator

    def add(self, x: Tensor | QuantizedRows, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """As Linear.add; every rank has all of the residual, which is added after the sum."""
        return self.for_norm(x), residual

    def for_norm(self, x: Tensor | QuantizedRows) -> Addend:
        """As forward, or this rank's part of the sum, where the norm computes it."""
        if isinstance(x, Tensor) and self.packed is None and self.gemm_of(len(x)) is None:
            partial = self._communicator.in_pieces(x)
            if partial is not None:
                self._multiply_in_pieces(x, partial)
                return partial
        return self._communicator.for_norm(super().forward(x))

    def _multiply_in_pieces(self, x: Tensor, partial: PartialSum) -> None:
        """The other ranks get a piece while the next one is multiplied."""
        for rows in partial.slices():
            piece = partial.part[rows]
            if self._reordered is not None:
                piece.copy_(super().forward(x[rows]))
            elif self.bias is None:
                torch.mm(x[rows], self.weight.t(), out=piece)
            else:
                torch.addmm(self.bias, x[rows], self.weight.t(), out=piece)
            partial.send(rows)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [T, in], this rank's inputs -> [T, out], the sum over all ranks."""
        return self._communicator.all_reduce(super().forward(x))
