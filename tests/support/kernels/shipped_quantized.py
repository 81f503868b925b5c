"""Calls of the kernels of quantized weights as they are shipped, on tensors of no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from model_zoo.layers.gemm.implementations import Gate
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write
from model_zoo.layers.kernels.silu_mul import silu_mul
from model_zoo.layers.quantized_gemm.dequant_gemm import DequantizeInRegistersUnsplit, dequant_gemms
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.fp8.skinny import SkinnyFp8Gemm, skinny_fp8_candidates
from model_zoo.layers.quantized_gemm.int8.gemm import Int8Gemm
from model_zoo.layers.quantized_gemm.packed_many_rows import WIDTHS, PackedManyRowsGemm
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_gemm.quantize_rows import (
    add_rms_norm_quantize,
    quantize_rows,
    silu_mul_quantize,
)
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.layers.quantized_rows import GROUP, QuantizedRows, ScaleKind, UnscaledRows
from model_zoo.quantization.quantized_weight import BITS
from model_zoo.quantization.weight_scheme import WeightScheme
from tests.support.kernels.quantized_cases import quantized
from tests.support.kernels.shipped_attention import (
    BF16,
    KV_HEADS,
    META,
    TOKENS,
    ShippedStep,
    tensor,
)
from tests.support.kernels.shipped_attention import GROUP as GROUPS

OUTPUTS, INPUTS = 6144, 4096
# Of those in quantized_cases.py.
FORMATS = ("int4 g128", "int4 g32 zeros", "nvfp4", "fp8 row", "fp8 block")


def weight(name: str) -> PackedWeight:
    """Of the shape OUTPUTS x INPUTS, from the fields of a small one."""
    small = pack(quantized(name, 128, 256, scales=BF16))
    scheme = WeightScheme(
        kind=small.kind,
        row_group=small.row_group,
        column_group=INPUTS if small.column_group == 256 else small.column_group,
        scale_dtype=small.scales.dtype,
        zeros=small.zeros is not None,
        row_scales=small.row_scales is not None,
    )
    shapes = scheme.parameters(OUTPUTS, INPUTS)
    made = {name: tensor(*shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return PackedWeight(
        kind=scheme.kind,
        words=made["words"],
        scales=made["scales"],
        row_group=scheme.row_group,
        column_group=scheme.column_group,
        zeros=made.get("zeros"),
        row_scales=made.get("row_scales"),
    )


def call_dequantize(name: str) -> None:
    dequantize_into(weight(name), tensor(OUTPUTS, INPUTS))


def call_dequant_gemm(name: str, rows: int) -> None:
    *_, split = dequant_gemms(META, 132, rows, OUTPUTS, INPUTS)
    split.run(tensor(rows, INPUTS), weight(name), tensor(OUTPUTS))


def call_skinny(
    name: str,
    rows: int,
    block_n: int,
    sync: bool = False,
    gate: Gate | None = None,
    apart: bool = False,
) -> None:
    """The first candidate with tiles of so many weight rows, by mma.sync or by wgmma."""
    packed = weight(name)
    candidates = skinny_candidates(132, rows, OUTPUTS, INPUTS, BITS[packed.kind])
    sizes = block_n, sync, apart
    gemm = next(gemm for gemm in candidates if (gemm.block_n, gemm.sync, gemm.apart) == sizes)
    gemm.multiply(tensor(rows, INPUTS), packed, tensor(OUTPUTS), gate)


def call_one_per_sm(name: str) -> None:
    """The candidate of which one fits an SM, for a weight with a tile of rows for each."""
    gemm = next(gemm for gemm in skinny_candidates(132, 8, 4096, INPUTS, 4) if gemm.stages == 5)
    gemm.multiply(tensor(8, INPUTS), weight(name), tensor(OUTPUTS), None)


def call_packed_many(name: str, width: int) -> None:
    PackedManyRowsGemm(width).run(tensor(512, INPUTS), weight(name), tensor(OUTPUTS))


def call_batch_invariant(rows: int) -> None:
    DequantizeInRegistersUnsplit().run(tensor(rows, INPUTS), weight("int4 g128"), None)


def call_int8(gemm: Int8Gemm, rows: int) -> None:
    padded = -(-rows // 16) * 16
    zeros = gemm.kind == "int8 zeros"
    x = QuantizedRows(
        codes=tensor(padded, INPUTS, dtype=torch.int8),
        scales=tensor(padded, 1, dtype=torch.float32),
        kind=gemm.kind,
        count=rows,
        dtype=BF16,
        zeros=tensor(padded, dtype=torch.int32) if zeros else None,
    )
    sums = tensor(OUTPUTS, dtype=torch.int32) if zeros else None
    gemm.product(x, replace(weight("int8 row"), sums=sums), tensor(OUTPUTS))


def call_quantize(kind: ScaleKind) -> None:
    x, wide = tensor(TOKENS, 4096), tensor(TOKENS, 2 * 12_288)
    quantize_rows(x, kind)
    add_rms_norm_quantize(x, x, x[0], 1e-6, kind)
    silu_mul_quantize(wide, kind)


def unscaled(columns: int) -> UnscaledRows:
    rows = tensor(TOKENS, 1, dtype=torch.float32)
    return UnscaledRows(tensor(TOKENS, columns), rows, tensor(columns))


def call_unscaled() -> None:
    x, step, heads = tensor(TOKENS, 4096), ShippedStep(128, BF16), KV_HEADS * GROUPS
    add_rms_norm_quantize(unscaled(4096), x, x[0], 1e-6, "row")
    add_rms_norm(unscaled(4096), x, x[0], 1e-6)
    silu_mul_quantize(unscaled(2 * 12_288), "row")
    silu_mul(unscaled(2 * 12_288))
    weight = tensor(128)
    qk_norm_rope_write(
        unscaled((heads + 2 * KV_HEADS) * 128),
        step.k,
        step.k,
        tensor(TOKENS, dtype=torch.int64),
        heads=heads,
        cos_sin=tensor(TOKENS, 128),
        q_weight=weight,
        k_weight=weight,
        eps=1e-6,
    )


def call_fp8_product(
    gemm: SkinnyFp8Gemm | Fp8ManyRowsGemm, rows: int, gate: Gate | None, *, bias: bool = True
) -> None:
    """bias: if the GEMM takes one"""
    kind, takes = gemm.kind, bias and isinstance(gemm, SkinnyFp8Gemm)
    padded = -(-rows // 16) * 16
    columns = 1 if kind == "row" else INPUTS // GROUP
    x = QuantizedRows(
        codes=tensor(padded, INPUTS, dtype=torch.float8_e4m3fn),
        scales=tensor(padded, columns, dtype=torch.float32),
        kind=kind,
        count=rows,
        dtype=BF16,
    )
    gemm.multiply(x, weight(f"fp8 {kind}"), tensor(OUTPUTS) if takes else None, gate)


GATES: tuple[Gate | None, ...] = (None, "silu", "gelu")
QUANTIZED: dict[str, Callable[[], None]] = {
    **{
        f"fp8 many rows {gate}": partial(call_fp8_product, Fp8ManyRowsGemm(), 512, gate)
        for gate in GATES
    },
    "quantize row": partial(call_quantize, "row"),
    "quantize block": partial(call_quantize, "block"),
    "quantize int8": partial(call_quantize, "int8"),
    "quantize int8 zeros": partial(call_quantize, "int8 zeros"),
    "unscaled": call_unscaled,
    "int8 at 8": partial(call_int8, Int8Gemm("int8", 16, 64, 256, 4), 8),
    "int8 at 64": partial(call_int8, Int8Gemm("int8 zeros", 64, 64, 256, 3, stages=3), 64),
    "int8 at 512": partial(call_int8, Int8Gemm("int8", 128, 128, 128, warps=8, tma=True), 512),
    "int8 at 4096": partial(
        call_int8, Int8Gemm("int8 zeros", 128, 256, 128, warps=8, tma=True), 4096
    ),
}
for name in FORMATS:
    QUANTIZED[f"dequantize {name}"] = partial(call_dequantize, name)
    QUANTIZED[f"dequant_gemm {name}"] = partial(call_dequant_gemm, name, 64)
for name in (*FORMATS, "mxfp4"):
    if name.startswith(("int4", "nvfp4", "mxfp4")):
        QUANTIZED[f"skinny {name} at 32"] = partial(call_skinny, name, 32, 64)
    else:
        QUANTIZED[f"skinny {name} at 16"] = partial(call_skinny, name, 16, 64)
        QUANTIZED[f"skinny {name} sync at 8"] = partial(call_skinny, name, 8, 64, True)
    QUANTIZED[f"skinny {name} at 64"] = partial(call_skinny, name, 64, 64)
for name in ("fp8 row", "fp8 block"):
    QUANTIZED[f"skinny {name} sync at 16"] = partial(call_skinny, name, 16, 128, True)
    QUANTIZED[f"skinny {name} by 128 at 64"] = partial(call_skinny, name, 64, 128)
APART = ("int4 g128", "int4 g32 zeros", "int4 g64 zeros", "nvfp4", "mxfp4")
for name in APART:
    for rows, block_n in ((8, 64), (8, 32), (16, 32), (32, 32)):
        QUANTIZED[f"skinny {name} apart {block_n} at {rows}"] = partial(
            call_skinny, name, rows, block_n, sync=True, apart=True
        )
    QUANTIZED[f"one per SM {name}"] = partial(call_one_per_sm, name)
for rows in (1, 16, 32):
    QUANTIZED[f"gated skinny int4 g128 apart 32 at {rows}"] = partial(
        call_skinny, "int4 g128", rows, 32, True, "silu", True
    )
for name in ("int4 g128", "fp8 row"):
    QUANTIZED[f"gated skinny {name} at 1"] = partial(call_skinny, name, 1, 16, True, "silu")
    QUANTIZED[f"gated skinny {name} at 64"] = partial(call_skinny, name, 64, 64, False, "silu")
    QUANTIZED[f"skinny {name} two runs"] = partial(call_skinny, name, 16, 32)
    QUANTIZED[f"skinny {name} four runs sync"] = partial(call_skinny, name, 8, 16, True)
QUANTIZED["gated skinny fp8 row at 16"] = partial(call_skinny, "fp8 row", 16, 64, False, "silu")
QUANTIZED["gated skinny int4 g128 at 32"] = partial(call_skinny, "int4 g128", 32, 64, False, "silu")
QUANTIZED["skinny fp8 row two runs sync"] = partial(call_skinny, "fp8 row", 8, 32, True)
FP8_KINDS: tuple[ScaleKind, ...] = ("row", "block")
for name in ("int4 g128", "int4 g32 zeros", "nvfp4", "mxfp4"):
    for width in WIDTHS:
        QUANTIZED[f"packed many rows {name} by {width}"] = partial(call_packed_many, name, width)
for kind in FP8_KINDS:
    for rows in (8, 16, 32, 64):
        for gemm in skinny_fp8_candidates(kind, 132, rows, OUTPUTS, INPUTS):
            name = f"codes by {kind}, skinny {gemm.block_n} x {gemm.block_k} at {rows}"
            name += ", split" if gemm.split_units == 1 else ""
            QUANTIZED[name] = partial(call_fp8_product, gemm, rows, None)
            QUANTIZED[f"{name}, gated"] = partial(call_fp8_product, gemm, rows, "silu")
for rows in (16, 128, 4096):
    QUANTIZED[f"batch_invariant_dequant at {rows}"] = partial(call_batch_invariant, rows)
