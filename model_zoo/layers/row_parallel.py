"""RowParallelLinear: a Linear whose inputs are divided among ranks, which add their products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend, PartialSum
from model_zoo.layers.all_reduce.symmetric_buffers import RankSum, buffer_shape, buffers_in
from model_zoo.layers.gemm.implementations import MAX_ROWS, NormingGemm, is_hopper
from model_zoo.layers.gemm.sending import SendingGemm
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.quantized_rows import Producer
from model_zoo.parallel.communicator import Communicator
from model_zoo.parallel.shard import Part
from model_zoo.quantization.weight_scheme import WeightScheme

NEVER = 1 << 62  # rows


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
        # What the GEMMs do of the sums over ranks (all_reduce/choose_layer_sums.py), in place of
        # the norms' kernels: of at most so many rows all, and from so many rows on the sending.
        self.adds_up_to, self.sends_from = 0, NEVER

    def add(self, x: NormOutput, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """As Linear.add; every rank has all of the residual, which is added after the sum."""
        norm, where = self.norm_in_gemm(x), None
        if norm is not None and len(x) <= self.adds_up_to and self.can_add(len(x)):
            where = self._communicator.rank_sum(len(x))
        if norm is None or where is None:
            return self.for_norm(x), residual
        return self.add_to(residual, x, norm, rank_sum=where), residual

    def can_add(self, rows: int) -> bool:
        """Whether its GEMM of so many rows can add over ranks, by `adds_up_to`."""
        gemm = self.norming_gemm(rows)
        takes = self.next is not None and self.next[1].takes_normed(rows)
        return takes and gemm is not None and gemm.adds_ranks(rows)

    @property
    def can_send(self) -> bool:
        """Whether a GEMM of many rows can send its product, by `sends_from`."""
        may = self.packed is None and self.bias is None and not self.is_batch_invariant
        sixteen_bits = self.dtype in (torch.bfloat16, torch.float16)
        serves = SendingGemm().serves(1, self.outputs, self.inputs)
        return may and sixteen_bits and serves and is_hopper(self.device)

    def launch_over_ranks(self, gemm: NormingGemm, rows: int) -> None:
        """Launch this GEMM with the sum over ranks, if it computes that and a norm follows.

        In memory of no other rank, so that it may only be compiled.
        """
        if self.next is None or self.dtype == torch.float16 or not gemm.adds_ranks(rows):
            return
        norm, _ = self.next
        x, residual, where = self._of_no_rank(rows)
        gemm.add_to(residual, x, self.operand, self.bias, norm, rank_sum=where)

    def launch_sending(self) -> None:
        """As launch_over_ranks, of the GEMM that sends, and the norm after it."""
        if self.next is None or not self.can_send:
            return
        norm, consumer = self.next
        assert isinstance(norm, RMSNorm)
        x, residual, where = self._of_no_rank(MAX_ROWS + 1)
        part = self._sent(x, where)
        norm.add(part, residual, consumer=consumer)

    def _of_no_rank(self, rows: int) -> tuple[Tensor, Tensor, RankSum]:
        """-> x, a residual, and where parts would go, which others do not read."""
        communicator, new = self._communicator, {"dtype": self.dtype, "device": self.device}
        memory = torch.empty(buffer_shape(rows, self.outputs, communicator.size), **new)
        x, residual = (torch.empty(rows, size, **new) for size in (self.inputs, self.outputs))
        buffers = buffers_in([memory] * communicator.size, communicator.rank)
        return x, residual, RankSum(buffers, 0)

    def for_norm(self, x: NormOutput) -> Addend:
        """As forward, or this rank's part of the sum, where the norm computes it."""
        if isinstance(x, Tensor) and len(x) >= self.sends_from and self.can_send:
            where = self._communicator.rank_sum(len(x))
            if where is not None:
                return self._sent(x, where)
        return self._communicator.for_norm(super().forward(x))

    def _sent(self, x: Tensor, where: RankSum) -> PartialSum:
        part = x.new_empty(len(x), self.outputs)
        outs = [part, *(out[: len(x)] for out in where.outgoing())]
        SendingGemm().run_into(x.contiguous(), self.weight, outs)
        return PartialSum(where, part, is_sent=True)

    def forward(self, x: NormOutput) -> Tensor:
        """x [T, in], this rank's inputs -> [T, out], the sum over all ranks."""
        return self._communicator.all_reduce(super().forward(x))
