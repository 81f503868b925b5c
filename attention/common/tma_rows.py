"""Room for more rows behind a tensor's own, which the Tensor Memory Accelerator may read.

GEMMs of few rows on Hopper load x in boxes of at least eight rows.  The Tensor Memory Accelerator
fills rows outside of the tensor with zeros, which takes longer than to read rows that are there.
Products of further rows are not stored, so it does not matter what these rows hold.  The output of
attention, and of a GEMM, is x of the next GEMM.  There is no room for larger boxes, most of whose
rows are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 8  # of the smallest box


def empty_with_room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor, contiguous, in memory for at least ROWS rows."""
    rows, *of_row = shape
    return torch.empty(max(rows, ROWS), *of_row, dtype=dtype, device=device)[:rows]


def with_rows_behind(x: Tensor, rows: int) -> Tensor:
    """x [M, K], contiguous, with up to `rows` rows as far as its memory reaches."""
    assert x.is_contiguous()
    columns = x.shape[1]  # from row to row, also where x is one row of a wider tensor
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((max(len(x), min(rows, there // columns)), columns), (columns, 1))
