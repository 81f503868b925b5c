"""Where the patches of an image are: their learned positions and their rope."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

THETA = 10_000.0


def coordinates(rows: int, columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, int64, square by square."""

    def ordered(grid: Tensor) -> Tensor:
        squares = grid.reshape(rows // merge, merge, columns // merge, merge)
        return squares.transpose(1, 2).flatten()

    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None].expand(rows, columns)
    return ordered(row), ordered(column)


def interpolated_positions(
    table: Tensor, side: int, row: Tensor, column: Tensor, grid: tuple[int, int]
) -> Tensor:
    """A table [side * side, hidden] of learned positions -> those of patches [N, hidden].

    Interpolated linearly, so that corners of the grid fall on corners of the table.
    """
    total = None
    taps = [_taps(row, grid[0], side), _taps(column, grid[1], side)]
    for row_at, row_weight in taps[0]:
        for column_at, column_weight in taps[1]:
            found = F.embedding(row_at * side + column_at, table)
            part = found * (row_weight * column_weight)[:, None]
            total = part if total is None else total + part
    assert total is not None
    return total


def _taps(at: Tensor, length: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Where `at` of `length` lies on an axis of `side`: two places, and the weight of each."""
    place = at.float() * ((side - 1) / max(length - 1, 1))
    low = place.floor().long().clamp(max=side - 1)
    share = place - low
    return [(low, 1 - share), ((low + 1).clamp(max=side - 1), share)]


def axial_rope(row: Tensor, column: Tensor, head_dim: int) -> Tensor:
    """cos and sin [N, head_dim] float32: half of the angles are of the row, half of the column."""
    half = head_dim // 2
    exponent = torch.arange(0, half, 2, device=row.device).float() / half
    frequencies = 1.0 / THETA**exponent
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], -1)
    return torch.cat([angles.cos(), angles.sin()], -1)
