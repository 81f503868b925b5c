"""What is tried for a product of a kind of shape, by measurements on an H100."""

from __future__ import annotations

import math

import torch

from model_zoo.layers.gemm.implementations import Plain, Product, SplitK, Stream

PLAIN = Plain()
# By the largest number of rows: block_n, block_k, stages, x_stages.  Rings that fill shared memory,
# of runs of at least 512 bytes of each row of weights: with shorter ones memory is slower.
STREAMS = {
    8: ((32, 512, 6, 3), (16, 1024, 5, 3), (64, 256, 6, 3)),
    16: ((32, 512, 5, 3), (64, 256, 6, 3)),
    32: ((32, 512, 3, 3), (64, 256, 5, 3)),
    64: ((64, 256, 3, 3),),
}


def candidates(device: torch.device, rows: int, outputs: int, inputs: int) -> list[Product]:
    """products_for() the device."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return products_for(properties.multi_processor_count, capability, rows, outputs, inputs)


def products_for(
    programs: int, capability: tuple[int, int], rows: int, outputs: int, inputs: int
) -> list[Product]:
    """cuBLAS first, then what may be faster for x [rows, inputs] and W [outputs, inputs].

    rows        MOST_ROWS at most
    programs    multiprocessors of the device, of compute capability `capability`
    """
    if capability == (9, 0):
        rings = next(rings for limit, rings in STREAMS.items() if rows <= limit)
        tried = [whole_tiles(*ring, programs, outputs, inputs) for ring in rings]
        block_n, block_k, stages, x_stages = rings[-1]
        tried.append(Stream(block_n, block_k, stages, programs, x_stages=x_stages))
    else:
        tried = [Plain(rows=8)] if rows == 1 else []
        for block_n in (32, 64):
            tiles = math.ceil(outputs / block_n)
            parts = max(1, min(4, round(2 * programs / tiles)))
            tried.append(SplitK(block_n, 128, parts))
    return [PLAIN, *(product for product in tried if product.serves(rows, outputs, inputs))]


def whole_tiles(
    block_n: int, block_k: int, stages: int, x_stages: int, programs: int, outputs: int, inputs: int
) -> Stream:
    """A product that cuts no tile, by as few programs as are as fast: the parts of a tile are
    summed when all are there, which takes longer than a program's waiting for others."""
    tiles = math.ceil(outputs / block_n)
    used = math.ceil(tiles / math.ceil(tiles / programs))
    grain = math.ceil(inputs / block_k)
    return Stream(block_n, block_k, stages, used, grain=grain, x_stages=x_stages)
