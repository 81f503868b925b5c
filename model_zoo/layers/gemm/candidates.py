"""Candidate GEMMs for a shape, selected by measurements on an H100 and an H200."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from model_zoo.layers.gemm.implementations import CublasGemm, GemmImpl, SkinnyGemm, SplitK

CUBLAS = CublasGemm()
# Largest number of rows -> (block_n, block_k, stages, x_stages).  Rings that fill shared memory,
# with at least 512 contiguous bytes of each weight row: shorter reads lower the memory bandwidth.
SKINNY_CONFIGS = {
    8: ((32, 512, 6, 3), (16, 1024, 5, 3), (64, 256, 6, 3)),
    16: ((32, 512, 5, 3), (64, 256, 6, 3)),
    32: ((32, 512, 3, 3), (64, 256, 5, 3)),
    64: ((64, 256, 3, 3),),
}


def candidates(device: torch.device, rows: int, outputs: int, inputs: int) -> list[GemmImpl]:
    """gemm_candidates() for the device."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return gemm_candidates(properties.multi_processor_count, capability, rows, outputs, inputs)


def gemm_candidates(
    programs: int, capability: tuple[int, int], rows: int, outputs: int, inputs: int
) -> list[GemmImpl]:
    """cuBLAS first, then candidates for x [rows, inputs] and W [outputs, inputs].

    rows        at most MAX_ROWS
    programs    SMs of the device, of compute capability `capability`
    """
    if capability == (9, 0):
        rings = next(rings for limit, rings in SKINNY_CONFIGS.items() if rows <= limit)
        others = [whole_tiles(*ring, programs, outputs, inputs) for ring in rings]
        if others[0].programs < programs < math.ceil(outputs / others[0].block_n):
            # On all SMs, of which some have a tile less: an H200's memory waits for idle ones.
            others.insert(1, replace(others[0], programs=programs))
        block_n, block_k, stages, x_stages = rings[-1]
        others.append(SkinnyGemm(block_n, block_k, stages, programs, x_stages=x_stages))
    else:
        others = [CublasGemm(rows=8)] if rows == 1 else []
        for block_n in (32, 64):
            tiles = math.ceil(outputs / block_n)
            parts = max(1, min(4, round(2 * programs / tiles)))
            others.append(SplitK(block_n, 128, parts))
    return [CUBLAS, *(gemm for gemm in others if gemm.serves(rows, outputs, inputs))]


def whole_tiles(
    block_n: int, block_k: int, stages: int, x_stages: int, programs: int, outputs: int, inputs: int
) -> SkinnyGemm:
    """A SkinnyGemm without split-K, on the fewest programs with the same number of waves: the
    reduction of a split tile takes longer than idle programs at the end."""
    tiles = math.ceil(outputs / block_n)
    used = math.ceil(tiles / math.ceil(tiles / programs))
    split_units = math.ceil(inputs / block_k)
    return SkinnyGemm(block_n, block_k, stages, used, split_units=split_units, x_stages=x_stages)
