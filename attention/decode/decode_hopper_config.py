"""HopperDecodeConfig: tile sizes of decode_hopper, which also decide where its plans may cut.

Without Triton, because plans for an H100 are also made where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE_TILE = 32 * 128  # elements of a tile of queries; a larger one has smaller blocks
RING_BYTES = 64 << 10  # of float8 K and V in flight per CTA, enough to saturate the bandwidth


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig:
    """Tile size and compile options."""

    block_n: int
    stages: int
    registers: int  # per thread


def hopper_decode_config(head_dim: int, queries: int, item_bytes: int = 2) -> HopperDecodeConfig:
    """The configuration for tiles of `queries` packed rows, by measurement on an H100.

    item_bytes: of a stored element
    """
    small = head_dim <= 128 and queries <= 16
    registers = 128 if small else 240
    block_d = max(64, _next_power_of_2(head_dim))
    if max(16, _next_power_of_2(queries)) * block_d > LARGE_TILE:
        # Queries and output take the registers of the scores; as many bytes are in flight.
        return HopperDecodeConfig(32, stages=4 if item_bytes == 2 else 8, registers=registers)
    if item_bytes == 2:
        return HopperDecodeConfig(64, stages=2, registers=registers)
    # As many bytes per block as for 16 bits, where registers suffice.
    block_n = 128 if small else 64
    return HopperDecodeConfig(
        block_n, stages=RING_BYTES // (2 * block_n * block_d), registers=registers
    )


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
