"""What is tried for a product of a kind of shape, by measurements on an H100."""

from __future__ import annotations

import math

import torch

from model_zoo.layers.gemm.products import Plain, Product, SplitK, Stream

PLAIN = Plain()


def candidates(device: torch.device, rows: int, outputs: int, inputs: int) -> list[Product]:
    """products_for() the device."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return products_for(properties.multi_processor_count, capability, rows, outputs, inputs)


def products_for(
    programs: int, capability: tuple[int, int], rows: int, outputs: int, inputs: int
) -> list[Product]:
    """cuBLAS first, then what may be faster for x [rows, inputs] and W [outputs, inputs].

    programs    multiprocessors of the device, of compute capability `capability`
    """
    tried: list[Product] = [PLAIN]
    if rows == 1:
        tried.append(Plain(rows=8))
    if capability == (9, 0):
        # As many units as shared memory holds, with runs of 512 bytes of each row: shorter ones
        # take longer, whatever their number.
        tried.append(Stream(64, 256, 6 if rows <= 8 else 5 if rows <= 32 else 3, programs))
    else:
        for block_n in (32, 64):
            tiles = math.ceil(outputs / block_n)
            parts = max(1, min(4, round(2 * programs / tiles)))
            tried.append(SplitK(block_n, 128, parts))
    return [product for product in tried if product.serves(rows, outputs, inputs)]
