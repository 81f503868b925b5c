"""What is tried for a product of a kind of shape, by measurements on an H100."""

from __future__ import annotations

import math

import torch

from model_zoo.layers.gemm.implementations import CublasGemm, GemmImpl, SkinnyGemm, SplitK

PLAIN = CublasGemm()
# By the largest number of rows: block_n, block_k, stages, x_stages.  Rings that fill shared memory,
# of runs of at least 512 bytes of each row of weights: with shorter ones memory is slower.
SKINNY_CONFIGS = {
    8: ((32, 512, 6, 3), (16, 1024, 5, 3), (64, 256, 6, 3)),
    16: ((32, 512, 5, 3), (64, 256, 6, 3)),
    32: ((32, 512, 3, 3), (64, 256, 5, 3)),
    64: ((64, 256, 3, 3),),
}


def candidates(device: torch.device, rows: int, outputs: int, inputs: int) -> list[GemmImpl]:
    """gemm_candidates() the device."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return gemm_candidates(properties.multi_processor_count, capability, rows, outputs, inputs)


def gemm_candidates(
    programs: int, capability: tuple[int, int], rows: int, outputs: int, inputs: int
) -> list[GemmImpl]:
    """cuBLAS first, then what may be faster for x [rows, inputs] and W [outputs, inputs].

    rows        MAX_ROWS at most
    programs    multiprocessors of the device, of compute capability `capability`
    """
    if capability == (9, 0):
        rings = next(rings for limit, rings in SKINNY_CONFIGS.items() if rows <= limit)
        tried = [whole_tiles(*ring, programs, outputs, inputs) for ring in rings]
        block_n, block_k, stages, x_stages = rings[-1]
        tried.append(SkinnyGemm(block_n, block_k, stages, programs, x_stages=x_stages))
    else:
        tried = [CublasGemm(rows=8)] if rows == 1 else []
        for block_n in (32, 64):
            tiles = math.ceil(outputs / block_n)
            parts = max(1, min(4, round(2 * programs / tiles)))
            tried.append(SplitK(block_n, 128, parts))
    return [PLAIN, *(gemm for gemm in tried if gemm.serves(rows, outputs, inputs))]


def whole_tiles(
    block_n: int, block_k: int, stages: int, x_stages: int, programs: int, outputs: int, inputs: int
) -> SkinnyGemm:
    """A product that cuts no tile, by as few programs as are as fast: the parts of a tile are
    summed when all are there, which takes longer than a program's waiting for others."""
    tiles = math.ceil(outputs / block_n)
    used = math.ceil(tiles / math.ceil(tiles / programs))
    split_units = math.ceil(inputs / block_k)
    return SkinnyGemm(block_n, block_k, stages, used, split_units=split_units, x_stages=x_stages)
