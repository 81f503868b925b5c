"""Random quantized weights of every kind, for tests of the kernels that read them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import CodeKind, QuantizedWeight
from tests.support.interpreter.gluon_interpreter import interpreted

# name -> (kind, columns of a group or 0 for a row, rows of a group, has zeros)
KINDS: dict[str, tuple[CodeKind, int, int, bool]] = {
    "int4 g128": ("int4", 128, 1, False),
    "int4 g32 zeros": ("int4", 32, 1, True),
    "int4 g64 zeros": ("int4", 64, 1, True),
    "int4 row": ("int4", 0, 1, False),
    "int4 row zeros": ("int4", 0, 1, True),
    "int8 g128 zeros": ("int8", 128, 1, True),
    "int8 row": ("int8", 0, 1, False),
    "nvfp4": ("fp4", 16, 1, False),
    "mxfp4": ("fp4", 32, 1, False),
    "fp8 row": ("fp8", 0, 1, False),
    "fp8 block": ("fp8", 128, 128, False),
    "mxfp8": ("fp8", 32, 1, False),
}


def interpreted_skinny_gemm() -> AbstractContextManager[None]:
    """SkinnyQuantizedGemm on a CPU."""
    gemm, folder = "model_zoo.layers.gemm", "model_zoo.layers.quantized_gemm"
    return interpreted(
        "_skinny_quantized_gemm",
        f"{gemm}.hopper.rings",
        f"{gemm}.hopper.gate",
        f"{gemm}.hopper.norm",
        f"{gemm}.hopper.stream_k",
        f"{folder}.hopper.convert",
        f"{folder}.hopper.scales",
        f"{folder}.hopper.multiply",
        f"{folder}.hopper.multiply_apart",
        f"{folder}.skinny_hopper",
    )


def interpreted_fp8_gemm() -> AbstractContextManager[None]:
    """SkinnyFp8Gemm on a CPU."""
    gemm, folder = "model_zoo.layers.gemm", "model_zoo.layers.quantized_gemm.hopper"
    return interpreted(
        "skinny_fp8_gemm",
        f"{gemm}.hopper.rings",
        f"{gemm}.hopper.gate",
        f"{gemm}.hopper.stream_k",
        f"{folder}.fp8_gemm_kernel",
    )


def quantized(
    name: str,
    rows: int,
    columns: int,
    *,
    device: str = "cpu",
    scales: torch.dtype = torch.float16,
    permuted: bool = False,
) -> QuantizedWeight:
    """A weight whose values are mostly below 1; `scales` is the type of integers' scales."""
    kind, column_group, row_group, has_zeros = KINDS[name]
    column_group = column_group or columns
    generator = torch.Generator().manual_seed(rows * columns)
    shape = (-(-rows // row_group), -(-columns // column_group))

    def codes(largest: int, *shape: int) -> Tensor:
        return torch.randint(0, largest, shape, generator=generator).to(torch.uint8)

    spread = torch.rand(shape, generator=generator) + 0.5
    bits = 4 if kind in ("int4", "fp4") else 8
    values = codes(1 << bits, rows, columns)
    if kind == "fp8":
        values[(values & 0x7F) == 0x7F] = 0x7E  # no NaN
    return QuantizedWeight(
        kind=kind,
        codes=values.to(device),
        scales=_scales(name, spread, scales).to(device),
        row_group=row_group,
        column_group=column_group,
        zeros=codes(1 << bits, *shape).to(device) if has_zeros else None,
        row_scales=(torch.rand(rows, generator=generator) / 8).to(device)
        if name == "nvfp4"
        else None,
        permutation=torch.randperm(columns, generator=generator).to(device) if permuted else None,
    )


def _scales(name: str, spread: Tensor, dtype: torch.dtype) -> Tensor:
    """spread of 0.5 to 1.5 -> scales."""
    if name == "nvfp4":
        return spread.to(torch.float8_e4m3fn)
    if name.startswith("mx"):
        exponents = 120 + (spread * 6).to(torch.uint8)
        exponents.view(-1)[0] = 0  # 2^-127, which float32 has as a subnormal number
        return exponents.view(torch.float8_e8m0fnu)
    if name.startswith("fp8"):
        return spread / 256
    return (spread / (8 if name.startswith("int4") else 128)).to(dtype)
