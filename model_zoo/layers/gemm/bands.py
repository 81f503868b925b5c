"""Which tiles of a persistent GEMM of many rows run at the same time: hopper/many_rows.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

CACHED = 20 << 20  # bytes of x that stay in the L2 cache while weights are streamed
MAX_BAND = 16  # rows of tiles: with more, x is reused for too few columns at a time
FEW_MORE = 1.03  # accepted factor of waves for programs that keep to one row of tiles


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tiles of a GEMM, and how programs go through them."""

    programs: int
    m_tiles: int  # rows of tiles
    n_tiles: int  # columns of tiles
    k_blocks: int  # stages of a tile
    band: int  # rows of tiles that are computed at a time


def tile_grid(
    device: torch.device, rows: int, columns: int, inputs: int, *, width: int, itemsize: int = 2
) -> TileGrid:
    """Of an output [rows, columns] with tiles of so many columns, from x [rows, inputs].

    itemsize  bytes of a number of x
    """
    from model_zoo.layers.gemm.hopper.many_rows import DEPTH, GROUPS, ROWS

    height = GROUPS.value * ROWS.value
    m_tiles, n_tiles = -(-rows // height), -(-columns // width)
    cached = max(1, CACHED // (itemsize * height * inputs))
    programs, band = bands(m_tiles, n_tiles, cached, processors(device))
    depth = 2 * DEPTH.value // itemsize
    return TileGrid(programs, m_tiles, n_tiles, -(-inputs // depth), band)


@cache
def bands(m_tiles: int, n_tiles: int, cached: int, processors: int) -> tuple[int, int]:
    """-> (programs, rows of tiles in a band) for m_tiles by n_tiles.

    If the programs are a multiple of the band, each keeps to its row of tiles, and those in a
    column read the same weights at the same time.  On an H100 at its power limit a kernel with the
    same loop took 2 to 4 % less time so, for 2,048 to 8,192 rows, though 4 of 132 SMs are idle
    (docs/lab/gemm.md, "GEMMs of many rows").

    cached  rows of tiles of x that stay in the L2 cache
    """
    tiles, most = m_tiles * n_tiles, min(m_tiles, cached)
    fewest = -(-tiles // processors)  # waves
    highest = min(most, MAX_BAND, processors)
    for band in range(highest, highest // 2, -1):  # smaller bands reread the weights too often
        programs = processors // band * band
        if m_tiles % band == 0 and -(-tiles // programs) <= FEW_MORE * fewest:
            return min(programs, tiles), band
    return min(processors, tiles), most


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # compiled for no device: tests/support/kernels/compile_for_hopper.py
    return torch.cuda.get_device_properties(device).multi_processor_count
