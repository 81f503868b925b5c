"""quantize_fp8: from an unquantized weight to e4m3 with a scale for each row.

Scales are bfloat16 numbers, as compressed-tensors stores those of a model in bfloat16, so that
kernels that read one for each column of an output read half the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros; 2^-126
CHUNK_ELEMENTS = 1 << 24  # the float32 copy of a whole weight would take twice its memory


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """weight [N, K] of any float dtype; the largest of each row becomes 448, e4m3's largest, or a
    little less."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        scale = rounded_up(part.abs().amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
        values = (part / scale).clamp(-LARGEST, LARGEST)
        codes[first : first + step] = values.to(torch.float8_e4m3fn).view(torch.uint8)
        scales[first : first + step] = scale
    return QuantizedWeight(kind="fp8", codes=codes, scales=scales, column_group=columns)


def rounded_up(x: Tensor) -> Tensor:
    """The smallest bfloat16 numbers that are at least x, float32 and not negative, as float32."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
