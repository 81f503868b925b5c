"""RMSNorm and LayerNorm, fused with the residual sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.all_reduce.partial_sum import Addend, PartialSum
from model_zoo.layers.normed_rows import NormedRows, NormOutput
from model_zoo.layers.quantized_rows import Consumer, QuantizedRows, ScaleKind, UnscaledRows


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean is taken in float32.

    plus_one  as in Gemma: weight + 1 multiplies, in float32, before the result is rounded.  The sum
              is not stored: in bfloat16 it would lose up to seven of a small weight's bits
    Source: arXiv 1910.07467.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def add(
        self,
        x: Addend | None,
        residual: Tensor,
        post: RMSNorm | None = None,
        *,
        consumer: Consumer | None = None,
    ) -> tuple[NormOutput, Tensor]:
        """x, residual [T, size] -> (norm of their sum, the sum); both may be overwritten.

        x         a PartialSum is added over all ranks, too; None: residual already is the sum;
                  NormedRows: it is, and they are this norm of it
        post      norm of x, before it is added; with the same eps and plus_one
        consumer  of the norm, which is quantized or not yet divided by the rms if it takes that;
                  None: takes a Tensor
        """
        if isinstance(x, NormedRows):
            assert post is None
            if consumer is not None and consumer.takes_normed(len(residual)):
                assert x.norm is self, "a GEMM has prepared another norm"
                return x, residual
            x = None
        is_partial = isinstance(x, PartialSum)
        if not is_partial and not fused_kernels.use_fused_kernels(residual.device):
            x = x.scaled() if isinstance(x, UnscaledRows) else x
            if x is not None:
                residual = residual + (x if post is None else post(x))
            return self(residual), residual
        scales = None if consumer is None else consumer.input_scales(len(residual))
        post_weight = None
        if post is not None:
            assert (post.eps, post.plus_one) == (self.eps, self.plus_one)
            post_weight = post.weight
        if is_partial:
            options = {"post_weight": post_weight, "plus_one": self.plus_one, "scales": scales}
            return x.add_rms_norm(residual, self.weight, self.eps, **options), residual
        return self._add_fused(x, residual, post_weight, scales), residual

    def _add_fused(
        self,
        x: Tensor | UnscaledRows | None,
        residual: Tensor,
        post_weight: Tensor | None,
        scales: ScaleKind | None,
    ) -> Tensor | QuantizedRows:
        """The norm, quantized to fp8 or int8 as `scales` says, unless it is None."""
        options = {"post_weight": post_weight, "plus_one": self.plus_one}
        if scales is not None:
            from model_zoo.layers.quantized_gemm.quantize_rows import add_rms_norm_quantize

            return add_rms_norm_quantize(x, residual, self.weight, self.eps, scales, **options)
        from model_zoo.layers.kernels.add_rms_norm import add_rms_norm, norm_of_sum

        if x is None:
            return norm_of_sum(residual, self.weight, self.eps, plus_one=self.plus_one)
        return add_rms_norm(x, residual, self.weight, self.eps, **options)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self.eps
        )

    def add(self, x: Tensor | UnscaledRows | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] -> (norm of their sum, the sum); x None: residual is it."""
        x = x.scaled() if isinstance(x, UnscaledRows) else x
        total = residual if x is None else residual + x
        return self(total), total
