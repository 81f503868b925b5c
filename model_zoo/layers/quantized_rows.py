"""QuantizedRows: activations as codes of 8 bits and scales, and the GEMMs that multiply them.

A GEMM that multiplies fp8 by fp8, or int8 by int8, quantizes its x, or takes it quantized from the
kernel that computes x, which saves a launch and the 16-bit x.  The codes are the same.

UnscaledRows: the output of such a GEMM before scales, which the kernel that reads it multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

# fp8 with scales of rows or of blocks of GROUP columns; int8 with scales of rows, and in addition
# with a zero point a row.
ScaleKind = Literal["row", "block", "int8", "int8 zeros"]
GROUP = 128  # columns of a scale of kind "block"
# The kernels that can quantize the x they compute: add_rms_norm, and silu_mul or gelu_tanh_mul.
Producer = Literal["norm", "silu_mul"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """x [M, K] as codes; row m, column k is (codes[m, k'] - zeros[m]) * scales[m, 0 or k // 128].

    k' is k in the order of packed 8-bit blocks.
    """

    codes: Tensor  # [rows, K] float8_e4m3fn or int8
    scales: Tensor  # [rows, 1] or [rows, K / 128] float32
    kind: ScaleKind
    count: int  # M; at most rows
    dtype: torch.dtype  # of x
    zeros: Tensor | None = None  # [rows] int32; of kind "int8 zeros"

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class UnscaledRows:
    """y [M, N] = values * row_scales * column_scales, rounded to the type of values."""

    values: Tensor  # [M, N]
    # [rows, 1] float32; rows is M as room_for rounds it up, since kernels that write codes read as
    # many as they write
    row_scales: Tensor
    column_scales: Tensor  # [N], of any floating-point type

    def __len__(self) -> int:
        return len(self.values)

    def scaled(self) -> Tensor:
        """y, in operations of their own."""
        factors = self.row_scales[: len(self)] * self.column_scales.float()
        return (self.values.float() * factors).to(self.values.dtype)


def parts_of(y: Tensor | UnscaledRows) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """-> (values, row scales, column scales), as kernels take them; None: there are none."""
    if isinstance(y, UnscaledRows):
        return y.values, y.row_scales, y.column_scales
    return y, None, None


class QuantizedRowsGemm(ABC):
    """A GEMM of activations in 8 bits; its `run`, as every GEMM's, quantizes x first."""

    kind: ScaleKind

    @abstractmethod
    def product(self, x: QuantizedRows, weight: Any, bias: Tensor | None) -> Tensor:
        """x [M, K] of the same kind, weight [N, K], bias [N] -> x W^T + bias [M, N]."""


class UnscaledGemm(QuantizedRowsGemm):
    """One that leaves the scales to what reads its output, where a layer says that it may."""

    @abstractmethod
    def unscaled(self, x: Tensor | QuantizedRows, weight: Any) -> UnscaledRows:
        """x [M, K], quantized to the same kind or not, weight [N, K] -> x W^T [M, N]."""

    def product(self, x: QuantizedRows, weight: Any, bias: Tensor | None) -> Tensor:
        """As QuantizedRowsGemm.product, in operations of their own; there is no bias."""
        assert bias is None
        return self.unscaled(x, weight).scaled()


class Consumer(Protocol):
    """What the output of a norm goes to."""

    def input_scales(self, rows: int) -> ScaleKind | None:
        """The scales of the QuantizedRows that it takes for x [rows, in]; None: only a Tensor."""
        ...

    def takes_normed(self, rows: int) -> bool:
        """Whether it takes NormedRows [rows, in]."""
        ...

    def multiply_first(self, x: Any) -> object:
        """The first GEMM of what it computes of x, a norm's output, with a gate: for timing."""
        ...

    @property
    def loads_ahead(self) -> bool:
        """Whether its GEMM of few rows loads weights before x is there.

        The first product of experts does not: it waits for the router.
        """
        ...
