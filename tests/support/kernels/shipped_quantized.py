"""Calls of the kernels of quantized weights as they are shipped, on tensors of no device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from model_zoo.layers.quantized_gemm.dequant_gemm import BatchInvariantDequantGemm, dequant_gemms
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_gemm.quantize_rows import (
    ScaleKind,
    add_rms_norm_quantize,
    quantize_rows,
    silu_mul_quantize,
)
from tests.support.kernels.quantized_cases import quantized
from tests.support.kernels.shipped_attention import BF16, META, TOKENS, tensor

OUTPUTS, INPUTS = 6144, 4096
# Of those in quantized_cases.py.
FORMATS = ("int4 g128", "int4 g32 zeros", "nvfp4", "fp8 row", "fp8 block")


def weight(name: str) -> PackedWeight:
    """Of the shape OUTPUTS x INPUTS, from the fields of a small one."""
    small = pack(quantized(name, 128, 256, scales=BF16))
    groups = -(-OUTPUTS // small.row_group) if small.row_group > 1 else OUTPUTS
    per_row = small.column_group == 256
    columns = 1 if per_row else INPUTS // small.column_group
    shape = (groups, columns) if small.row_group > 1 else (columns, groups)
    width = small.words.shape[1] * INPUTS // 256
    return PackedWeight(
        kind=small.kind,
        words=tensor(OUTPUTS, width, dtype=small.words.dtype),
        scales=tensor(*shape, dtype=small.scales.dtype),
        row_group=small.row_group,
        column_group=INPUTS if per_row else small.column_group,
        zeros=None if small.zeros is None else tensor(*shape, dtype=small.zeros.dtype),
        row_scales=None if small.row_scales is None else small.row_scales[:1].to(META),
    )


def call_dequantize(name: str) -> None:
    dequantize_into(weight(name), tensor(OUTPUTS, INPUTS))


def call_dequant_gemm(name: str, rows: int) -> None:
    *_, split = dequant_gemms(META, 132, rows, OUTPUTS, INPUTS)
    split.run(tensor(rows, INPUTS), weight(name), tensor(OUTPUTS))


def call_batch_invariant(rows: int) -> None:
    BatchInvariantDequantGemm().run(tensor(rows, INPUTS), weight("int4 g128"), None)


def call_quantize(kind: ScaleKind) -> None:
    x, wide = tensor(TOKENS, 4096), tensor(TOKENS, 2 * 12_288)
    quantize_rows(x, kind)
    add_rms_norm_quantize(x, x, x[0], 1e-6, kind)
    silu_mul_quantize(wide, kind)


QUANTIZED: dict[str, Callable[[], None]] = {
    "quantize row": partial(call_quantize, "row"),
    "quantize block": partial(call_quantize, "block"),
}
for name in FORMATS:
    QUANTIZED[f"dequantize {name}"] = partial(call_dequantize, name)
    QUANTIZED[f"dequant_gemm {name}"] = partial(call_dequant_gemm, name, 64)
for rows in (16, 128, 4096):
    QUANTIZED[f"batch_invariant_dequant at {rows}"] = partial(call_batch_invariant, rows)
