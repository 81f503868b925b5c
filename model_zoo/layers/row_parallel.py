"""RowParallelLinear: a Linear whose inputs are divided among ranks, which add their products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.linear import Linear
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.quantized_rows import Producer
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

    def add(self, x: NormOutput, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """As Linear.add; every rank has all of the residual, which is added after the sum."""
        return self.for_norm(x), residual

    def for_norm(self, x: NormOutput) -> Addend:
        """As forward, or this rank's part of the sum, where the norm computes it."""
        return self._communicator.for_norm(super().forward(x))

    def forward(self, x: NormOutput) -> Tensor:
        """x [T, in], this rank's inputs -> [T, out], the sum over all ranks."""
        return self._communicator.all_reduce(super().forward(x))
