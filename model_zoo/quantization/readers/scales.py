"""Scales as the files store them, checked, and in the form that QuantizedWeight has."""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.json_fields import ModelError


def check_scales(scales: Tensor, name: str, *, signed: bool = False) -> Tensor:
    """The same scales.

    signed: they may be negative, as those of AutoRound's symmetric integers are.  A scale of 0 is
    that of a group of zeros, unless all are 0.  Raises ModelError.
    """
    values = scales.float()
    if not values.isfinite().all():
        problem = "has values that are not finite"
    elif not signed and (values < 0).any():
        problem = "has negative values"
    elif not values.any():
        problem = "has no value but 0"
    else:
        return scales
    raise ModelError(f"{name} {problem}, which no scale is: download the file again")


def scale_per_row(scales: Tensor, rows: int) -> Tensor:
    """One value, or one a row, of any shape -> [rows, 1].

    So the rows of projections that are joined keep the scale of their own tensor.
    """
    return scales.reshape(-1, 1).expand(rows, 1).contiguous()


def e8m0(scales: Tensor) -> Tensor:
    """Powers of two that a file stores as plain bytes get the dtype that says so."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
