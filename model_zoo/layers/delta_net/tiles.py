"""Which kernels a gated delta net is computed by, with their tile sizes and compile options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tile sizes and compile options.

    channels that a program of prompt_inputs has, at most
    block_v  columns of a state that a program of chunk_scan has
    local_hopper, scan_hopper
             whether hopper/local.py takes the place of chunk_local, and hopper/scan.py that of
             chunk_scan, where they serve
    """

    channels: int = 512
    input_warps: int = 2
    local_warps: int = 4
    local_registers: int = 168  # three programs a multiprocessor
    block_v: int = 64
    scan_warps: int = 4
    scan_stages: int = 2
    norm_warps: int = 4
    local_hopper: bool = False
    scan_hopper: bool = False


def power_of_two_within(number: int, most: int) -> int:
    """The largest power of two that divides it, `most` at most: of channels, whole heads, if both
    are multiples of a head."""
    return min(number & -number, most)
