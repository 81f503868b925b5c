"""Configurations of TiledFp8Gemm for the GEMMs of a layer."""

from __future__ import annotations

import math
from typing import Literal

from model_zoo.layers.quantized_gemm.tiled.gemm import TiledFp8Gemm

# What a GEMM does with its output: it is stored in 16 bits; its gated activation is, as codes; it
# is added to the residual, and the norm of that is stored as codes.
Output = Literal["plain", "gated", "added"]
# Weight rows of a tile: those of an output that is stored as codes are as a scale of it needs them.
BLOCK_N: dict[Output, tuple[int, ...]] = {"plain": (64, 32), "gated": (128,), "added": (64,)}
UNIT_BYTES = 32 << 10
# By the largest number of rows: x has the rest of the memory.  Sums of more rows, and the products
# that are added to them, are more than the registers hold.
STAGES = {8: 6, 16: 5, 32: 4}
FEW_ROWS = 8  # of which tiles of 32 weight rows hold the sums of two runs
X_STAGES = 3


def tiled_candidates(
    processors: int, rows: int, outputs: int, inputs: int, output: Output
) -> list[TiledFp8Gemm]:
    """Candidates for x [rows, inputs] and W [outputs, inputs] on a device of so many SMs.

    Whole tiles on the fewest programs with the same number of waves; and tiles that are cut in two
    where those would leave half of the SMs idle, or among all where the last wave is not full.
    """
    stages = next((stages for most, stages in STAGES.items() if rows <= most), 0)
    found: list[TiledFp8Gemm] = []
    for block_n in BLOCK_N[output] if stages else ():
        if block_n < 64 and rows > FEW_ROWS:
            continue
        block_k = UNIT_BYTES // block_n
        tiles, blocks = math.ceil(outputs / block_n), math.ceil(inputs / block_k)
        waves = math.ceil(tiles / processors)
        used = math.ceil(tiles / waves)
        found.append(TiledFp8Gemm(block_n, block_k, stages, used, blocks, X_STAGES))
        if 2 * tiles <= processors and blocks % 2 == 0:
            found.append(TiledFp8Gemm(block_n, block_k, stages, 2 * tiles, blocks // 2, X_STAGES))
        elif used < processors and block_n >= 64:
            found.append(TiledFp8Gemm(block_n, block_k, stages, processors, 1, X_STAGES))
    return [gemm for gemm in found if gemm.serves(rows, outputs, inputs)]
