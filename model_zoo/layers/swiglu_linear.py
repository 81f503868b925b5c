"""SwigluLinear: silu(gate) * up, whose activation some GEMMs compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm.implementations import BUCKETS, Gate, GatingGemm, GemmImpl
from model_zoo.layers.gemm.swiglu import SIZES
from model_zoo.layers.linear import Linear
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.quantized_rows import (
    Consumer,
    Producer,
    QuantizedRows,
    QuantizedRowsGemm,
    UnscaledRows,
)
from model_zoo.parallel.shard import Part
from model_zoo.quantization.weight_scheme import WeightScheme


class SwigluLinear(Linear):
    """silu(gate) * up (arXiv 2002.05202); weight [2 * out, in]: gate rows, then up rows.

    gelu  gelu(gate) * up, by tanh, which no GEMM of many rows computes
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parts: Mapping[str, int] | None = None,
        scheme: WeightScheme | None = None,
        after: Producer | None = None,
        cuts: Mapping[str, Part] | None = None,
        gelu: bool = False,
    ) -> None:
        super().__init__(
            inputs,
            2 * outputs,
            bias=bias,
            dtype=dtype,
            parts=parts,
            scheme=scheme,
            after=after,
            cuts=cuts,
        )
        self.gate: Gate = "gelu" if gelu else "silu"
        self.may_leave_scales = True
        self.may_gate = True  # False: GEMMs of few rows leave the activation to a kernel of its own
        self._swiglu_gemms: list[GemmImpl | None] = []  # one for each of SIZES

    def use_swiglu(self, gemms: Mapping[int, GemmImpl]) -> None:
        """Set the fused GEMM for each number of rows in SIZES, which covers smaller numbers too.

        More rows use that of the largest size.  Sizes that are not in gemms, and rows up to the
        largest of BUCKETS, use Linear's GEMM, and silu_mul unless it is a GatingGemm.
        """
        assert self.gate == "silu"
        self._swiglu_gemms = [gemms.get(size) for size in SIZES]

    def swiglu(self, x: NormOutput, *, consumer: Consumer | None = None) -> Tensor | QuantizedRows:
        """x [T, in] -> [T, out], quantized if the consumer takes that; None: takes a Tensor.

        The output of a GEMM that computes the activation is not quantized.
        """
        if self._swiglu_gemms and len(x) > BUCKETS[-1] and isinstance(x, Tensor):
            gemm = self._swiglu_gemms[min(bisect_left(SIZES, len(x)), len(SIZES) - 1)]
            if gemm is not None:
                return gemm.run(x.contiguous(), self.weight, self.bias)
        scales = None if consumer is None else consumer.input_scales(len(x))
        gating = self.gating_gemm(len(x))
        # A consumer quantizes the output in less time than silu_mul_quantize takes: measured of
        # fp8, where the GEMM takes codes, too.
        if gating is not None and (scales is None or isinstance(gating, QuantizedRowsGemm)):
            x = x.contiguous() if isinstance(x, Tensor) else x
            return gating.multiply(x, self.operand, self.bias, self.gate)
        both = self.unscaled(x)
        if fused_kernels.use_fused_kernels(self.device):
            if scales is not None:
                from model_zoo.layers.quantized_gemm.quantize_rows import silu_mul_quantize

                return silu_mul_quantize(both, scales, gelu=self.gate == "gelu")
            from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul

            return gelu_tanh_mul(both) if self.gate == "gelu" else silu_mul(both)
        both = both.scaled() if isinstance(both, UnscaledRows) else both
        gate, up = both.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if self.gate == "gelu" else F.silu(gate)) * up

    def gating_gemm(self, rows: int) -> GatingGemm | None:
        """What multiplies so many rows and computes the activation, too.

        None of batch-invariant layers: more rows would be rounded otherwise.
        """
        gemm = self.gemm_of(rows)
        if not isinstance(gemm, GatingGemm) or not self.may_gate or self.is_batch_invariant:
            return None
        return gemm if gemm.gates(rows, self.operand) else None
