"""QuantizedWeight: the common form that the readers of all checkpoint formats produce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["int4", "int8", "fp4", "fp8"]
BITS: dict[CodeKind, int] = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8}
# The 4-bit float e2m1 by code (OCP Microscaling Formats 1.0): the highest bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K]: w[n, k] = (value(codes[n, k]) - zero) * scale * row_scale[n].

    The scale of (n, k) is scales[n // row_group, k // column_group], and so is the zero point.
    The value of an integer code is the code, that of a float code the float.
    """

    kind: CodeKind
    codes: Tensor  # [N, K] uint8: 0..15 or 0..255; floats as their bits
    scales: Tensor  # [ceil(N / row_group), ceil(K / column_group)] of any float dtype
    row_group: int = 1
    column_group: int  # K for one scale a row
    zeros: Tensor | None = None  # like scales, uint8; None: 8 for int4, 128 for int8, 0 for floats
    row_scales: Tensor | None = None  # [N] float32, the second scale of fp4
    # [K] int64: column j of codes multiplies column permutation[j] of x (GPTQ's act-order).
    permutation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.codes.shape
        return rows, columns

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """The rows begin..end, views of these tensors; begin is a multiple of row_group."""
        first, last = begin // self.row_group, -(-end // self.row_group)
        return replace(
            self,
            codes=self.codes[begin:end],
            scales=self.scales[first:last],
            zeros=None if self.zeros is None else self.zeros[first:last],
            row_scales=None if self.row_scales is None else self.row_scales[begin:end],
        )

    def slices(self, codes: int) -> list[tuple[int, int]]:
        """Ranges of rows of about so many codes each, cut at multiples of row_group."""
        rows, columns = self.shape
        step = max(1, codes // columns // self.row_group) * self.row_group
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K], computed in float32 and rounded once to `dtype`."""
        values = self._values()
        if self.kind in ("int4", "int8"):
            middle = 1 << (BITS[self.kind] - 1)
            values = values - (middle if self.zeros is None else self._spread(self.zeros))
        values = values * self._spread(self.scales)
        if self.row_scales is not None:
            values = values * self.row_scales.float()[:, None]
        if self.permutation is not None:
            values = torch.empty_like(values).index_copy_(1, self.permutation, values)
        return values.to(dtype)

    def _values(self) -> Tensor:
        """[N, K] float32."""
        if self.kind == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind == "fp4":
            return torch.tensor(E2M1, device=self.codes.device)[self.codes.int()]
        return self.codes.float()

    def _spread(self, grouped: Tensor) -> Tensor:
        """One value a group -> [N, K] float32."""
        rows, columns = self.shape
        wide = grouped.float()
        if self.row_group > 1:
            wide = wide.repeat_interleave(self.row_group, 0)[:rows]
        return wide.repeat_interleave(self.column_group, 1)[:, :columns]
