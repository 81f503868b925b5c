"""Configurations of SkinnyQuantizedGemm for a shape."""

from __future__ import annotations

import math
from typing import NamedTuple

from model_zoo.layers.gemm.implementations import MAX_ROWS
from model_zoo.layers.quantized_gemm.skinny import (
    APART_OUTPUTS,
    REGISTERS,
    SkinnyQuantizedGemm,
)


class Ring(NamedTuple):
    """Sizes of a program's units and rings."""

    block_n: int
    block_k: int
    stages: int
    x_stages: int
    resident: int = 1  # programs that fit an SM
    sync: bool = False
    apart: bool = False
    # Whole tiles, at most one for each SM: with the sums of `apart` no second program fits an SM,
    # although registers are for `resident`.
    one_per_sm: bool = False


# By bits of a code and the largest number of rows.  As many bytes of a weight row are twice the
# columns in 4 bits, and so is what a unit has of x, which comes from the L2 cache: units of more
# rows of x have more weight rows, or fewer columns.
RINGS = {
    4: {
        8: (
            Ring(64, 512, 3, 2, 3, sync=True, apart=True),
            Ring(64, 1024, 2, 2, 2, sync=True, apart=True),
            Ring(32, 1024, 4, 2, 2, sync=True, apart=True),
            Ring(32, 1024, 5, 2, 2, sync=True, apart=True, one_per_sm=True),
            Ring(16, 1024, 6, 2, 2, sync=True),
        ),
        16: (
            Ring(32, 1024, 2, 2, 2, sync=True, apart=True),
            Ring(32, 1024, 5, 3),
        ),
        32: (Ring(64, 512, 6, 3), Ring(32, 512, 6, 2, sync=True, apart=True)),
        64: (Ring(64, 256, 6, 3),),
    },
    8: {
        8: (
            Ring(64, 256, 5, 3, 2, sync=True),
            Ring(64, 512, 5, 3, sync=True),
            Ring(64, 256, 3, 2, 3, sync=True),
            Ring(128, 256, 5, 3, sync=True),
            Ring(64, 256, 5, 3, 2),
            Ring(32, 512, 4, 2, 2, sync=True),
            Ring(16, 512, 5, 3, 3, sync=True),
        ),
        16: (
            Ring(64, 256, 5, 3, 2, sync=True),
            Ring(64, 512, 5, 3, sync=True),
            Ring(128, 256, 5, 3, sync=True),
            Ring(64, 256, 5, 3, 2),
            Ring(128, 256, 5, 3),
            Ring(32, 512, 8, 3),
        ),
        32: (Ring(64, 256, 8, 4), Ring(64, 256, 4, 2, 2), Ring(128, 256, 5, 3)),
        64: (Ring(64, 256, 6, 3), Ring(128, 256, 4, 3)),
    },
}


def skinny_candidates(
    processors: int, rows: int, outputs: int, inputs: int, bits: int
) -> list[SkinnyQuantizedGemm]:
    """Candidates for x [rows, inputs] and W [outputs, inputs] on a device of so many SMs."""
    rows = min(rows, MAX_ROWS)  # at a time
    rings = next(rings for limit, rings in RINGS[bits].items() if rows <= limit)
    found = [
        candidate
        for ring in rings
        for candidate in _of_ring(ring, processors, outputs, inputs)
        if not ring.apart or outputs % APART_OUTPUTS == 0
    ]
    return list(dict.fromkeys(found))


def _of_ring(ring: Ring, processors: int, outputs: int, inputs: int) -> list[SkinnyQuantizedGemm]:
    """With tiles split among programs; and with whole tiles if that keeps most programs busy.

    While attention still runs, two programs of the next GEMM may begin on an SM that has room for
    two, and other SMs get none: so where SMs suffice for all programs, a ring of `one_per_sm` is
    tried, too.
    """
    programs = processors * (1 if ring.one_per_sm else ring.resident)
    registers = REGISTERS[ring.resident]
    tiles, blocks = math.ceil(outputs / ring.block_n), math.ceil(inputs / ring.block_k)
    waves = math.ceil(tiles / programs)
    used = math.ceil(tiles / waves)
    if ring.one_per_sm and waves > 1:
        return []

    def gemm(programs: int, split_units: int) -> SkinnyQuantizedGemm:
        return SkinnyQuantizedGemm(
            ring.block_n, ring.block_k, ring.stages, programs, split_units, ring.x_stages,
            registers, ring.sync, ring.apart,
        )  # fmt: skip

    splits = (ring.block_n >= 64 or ring.apart) and not ring.one_per_sm
    found = [gemm(programs, 1)] if splits else []
    if tiles >= 0.8 * waves * programs or ring.block_n < 64:
        found.append(gemm(used, blocks))
    return found
