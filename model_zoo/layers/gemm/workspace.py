"""Where the programs of a product leave parts of its tiles: one for all products of a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PARTS_BYTES = 32 << 20
TILES = 1 << 14


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """(parts float32, counts int32 of each tile's parts that are there).

    A product finds the counts at zero and leaves them so: products must follow each other, on one
    stream or by dependent launches, as the layers of a model do.
    """
    parts = torch.empty(PARTS_BYTES // 4, dtype=torch.float32, device=device)
    return parts, torch.zeros(TILES, dtype=torch.int32, device=device)
