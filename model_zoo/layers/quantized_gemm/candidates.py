"""Candidate GEMMs of quantized weights, for few rows and for many."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import nn

from model_zoo.layers.gemm.implementations import (
    BUCKETS,
    MANY_BUCKETS,
    MAX_ROWS,
    GemmImpl,
    is_hopper,
)
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.dequant_gemm import (
    DequantizeInRegistersUnsplit,
    dequant_gemms,
)
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.fp8.skinny import skinny_fp8_candidates
from model_zoo.layers.quantized_gemm.fp8_gemm import (
    DequantizeThenCublas,
    ScaledMM,
    UnscaledMM,
    reserve_scratch,
)
from model_zoo.layers.quantized_gemm.int8.gemm import (
    Int8GemmByRows,
    activation_kind,
    int8_gemms,
)
from model_zoo.layers.quantized_gemm.packed_many_rows import many_rows_gemms, usual_gemm
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm, multiplies
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.layers.quantized_rows import GROUP, QuantizedRows
from model_zoo.quantization.quantized_weight import BITS
from model_zoo.quantization.weight_scheme import WeightScheme

HOPPER = (9, 0)
# Numbers of rows for which UnscaledMM is tried.  Of fewer, the GEMMs of few rows are faster on an
# H200: a step of 64 rows took 4.55 ms in place of 4.65.  Of more its lead is gone: 2 % at 512.
UNSCALED_BUCKETS = (128, 256, 384)
# Numbers of rows for which Fp8ManyRowsGemm is tried; more use ScaledMM.
FP8_BUCKETS = (*UNSCALED_BUCKETS, 512, 768, 1024, 1536, 2048, 4096, 8192)
# Numbers of rows for which a PackedManyRowsGemm is chosen; more have whole tiles of 256 rows.
PACKED_BUCKETS = (128, 256, 384, 512, 768, 1024, 2048, 4096)
# Numbers of rows up to which no other way to dequantize in registers is tried than one to compare
# with, where SkinnyQuantizedGemm runs: on an H200 it was always faster.
SKINNY_ROWS = 32
log = logging.getLogger(__name__)


def quantized_candidates(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    scheme: WeightScheme,
    *,
    bias: bool = True,
    leaves_scales: bool = False,
) -> list[GemmImpl]:
    """Candidates for x [rows, inputs] and W [outputs, inputs], first one that others are compared
    with: one that dequantizes W, ScaledMM or an int8 GEMM.

    dtype  of x
    rows   one of BUCKETS or of tuned_above()
    leaves_scales  whether what reads the product can multiply its scales, by UnscaledMM
    """
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    kind = activation_kind(scheme)
    integers = int8_gemms(device, kind, rows, outputs, inputs) if kind else ()
    if integers and rows > MAX_ROWS:
        return list(integers)
    found: list[GemmImpl] = []
    many = None if bias else fp8_many_rows(device, dtype, outputs, inputs, scheme)
    if rows > MAX_ROWS and (leaves_scales or many is not None):
        found = [ScaledMM("row", fast_accum=True)]
        found += [UnscaledMM()] if leaves_scales and rows <= UNSCALED_BUCKETS[-1] else []
        return found + ([] if many is None else [many])
    skinny = skinny_gemms(device, rows, outputs, inputs, scheme)
    if rows > MAX_ROWS:
        packed = many_rows_gemms(device, dtype, rows, outputs, inputs, scheme)
        if packed:
            return [DequantizeThenCublas(), *packed]
        found += [DequantizeThenCublas(), DequantizeInRegistersUnsplit()]
    else:
        plain = dequant_gemms(device, programs, rows, outputs, inputs)
        found += plain[:1] if skinny and rows <= SKINNY_ROWS else plain
        product = scaled_mm(device, dtype, outputs, inputs, scheme)
        if product is not None:
            found.append(product)
            if torch.cuda.get_device_capability(device) == HOPPER:
                found += skinny_fp8_candidates(product.kind, programs, rows, outputs, inputs)
        found += integers
    return found + skinny


def skinny_gemms(
    device: torch.device, rows: int, outputs: int, inputs: int, scheme: WeightScheme
) -> list[SkinnyQuantizedGemm]:
    """Those that serve x [rows, inputs] and W [outputs, inputs] there, the likely ones first."""
    if not runs_skinny(device, inputs, scheme):
        return []
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    tried = skinny_candidates(programs, rows, outputs, inputs, BITS[scheme.kind])
    return [gemm for gemm in tried if gemm.serves(rows, outputs, inputs, scheme)]


def runs_skinny(device: torch.device, inputs: int, scheme: WeightScheme) -> bool:
    """Whether SkinnyQuantizedGemm runs on the device, and knows the scheme's scales."""
    return torch.cuda.get_device_capability(device) == HOPPER and multiplies(scheme, inputs)


def tuned_above(
    device: torch.device,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    scheme: WeightScheme,
    *,
    bias: bool = True,
    leaves_scales: bool = False,
) -> tuple[int, ...]:
    """Numbers of rows above BUCKETS to tune: where W is dequantized first, on Hopper; of 4 bits
    there; of int8; of fp8 on Hopper; and where scales may be left to what reads the product."""
    if activation_kind(scheme) is not None:
        return (*MANY_BUCKETS, 2 * MANY_BUCKETS[-1])
    if not bias and fp8_many_rows(device, dtype, outputs, inputs, scheme) is not None:
        return FP8_BUCKETS
    if leaves_scales:
        return UNSCALED_BUCKETS
    if many_rows_gemms(device, dtype, MAX_ROWS + 1, outputs, inputs, scheme):
        return PACKED_BUCKETS
    if not runs_skinny(device, inputs, scheme):
        return ()
    return () if scaled_mm(device, dtype, outputs, inputs, scheme) is not None else MANY_BUCKETS


def scaled_mm(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> ScaledMM | None:
    """The fp8 product that the device has for weights of the scheme, meant for activations in fp8.

    dtype: of the activations before, and of the output
    """
    if scheme.kind != "fp8" or scheme.activation_bits != 8:
        return None
    gemm = ScaledMM("block") if scheme.row_group > 1 else ScaledMM("row", fast_accum=True)
    return gemm if gemm.serves(1, outputs, inputs) and runs(gemm, device, dtype) else None


def unscaled_mm(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> UnscaledMM | None:
    """UnscaledMM, if the device has ScaledMM of scales of rows, and the output is bf16."""
    if dtype != torch.bfloat16 or scaled_mm(device, dtype, outputs, inputs, scheme) is None:
        return None
    return None if scheme.row_group > 1 else UnscaledMM()


def fp8_many_rows(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> Fp8ManyRowsGemm | None:
    """Fp8ManyRowsGemm, which has no bias, if the device has ScaledMM of scales of rows, too."""
    if scaled_mm(device, dtype, outputs, inputs, scheme) != ScaledMM("row", fast_accum=True):
        return None
    gemm = Fp8ManyRowsGemm()
    hopper = torch.cuda.get_device_capability(device) == HOPPER
    return gemm if hopper and gemm.serves(1, outputs, inputs) else None


@cache
def runs(gemm: ScaledMM, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this GPU and build of PyTorch have the product: tried on a small one.

    They differ by compute capability, dtype of the output, and version of CUDA.
    """
    if torch.cuda.get_device_capability(device) < (8, 9):
        return False
    codes = torch.zeros(512, 512, dtype=torch.float8_e4m3fn, device=device)
    blocks = torch.ones(4, 4, device=device)
    rows = torch.ones(512, 1, device=device)
    x = QuantizedRows(
        codes=codes,
        scales=torch.ones(4, 512, device=device).t() if gemm.kind == "block" else rows,
        kind=gemm.kind,
        count=512,
        dtype=dtype,
    )
    weight = PackedWeight(
        kind="fp8",
        words=codes.view(torch.int32),
        scales=blocks if gemm.kind == "block" else rows.t(),
        row_group=GROUP if gemm.kind == "block" else 1,
        column_group=GROUP if gemm.kind == "block" else 512,
    )
    try:
        gemm.product(x, weight, torch.zeros(512, dtype=dtype, device=device))
    except RuntimeError as error:  # also what is not implemented
        log.info("no fp8 product by %s scales here: %s", gemm.kind, error)
        return False
    return True


def use_quantized_gemms(model: nn.Module) -> None:
    """Set a GEMM for any number of rows in every quantized Linear, before the model runs.

    autotune_gemms finds better ones for few rows, and on Hopper for up to some thousand.
    """
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.packed is None:
            continue
        scheme = layer.packed.scheme
        kind = activation_kind(scheme)
        if kind is not None:
            layer.use_gemms({}, Int8GemmByRows(kind))
            continue
        product = scaled_mm(layer.device, layer.dtype, layer.outputs, layer.inputs, scheme)
        if product is None:
            reserve_scratch(layer.device, layer.dtype, layer.outputs * layer.inputs)
            args = layer.device, layer.dtype, layer.outputs, layer.inputs, scheme
            layer.use_gemms(*untimed(*args))
        else:
            layer.use_gemms({}, product)


def untimed(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> tuple[dict[int, GemmImpl], GemmImpl]:
    """GEMMs until others are timed: by the largest number of rows, and for more.

    On Hopper those that usually are the faster.  On other devices more than 64 rows are dequantized
    into memory once, which takes less time than in the registers of every tile of 128 rows.
    """
    found: dict[int, GemmImpl] = dict.fromkeys(BUCKETS, DequantizeInRegistersUnsplit())
    fallback: GemmImpl = DequantizeThenCublas()
    if not is_hopper(device):
        return found, fallback
    for rows in BUCKETS:
        served = skinny_gemms(device, rows, outputs, inputs, scheme)
        found[rows] = next(iter(served), found[rows])
    for rows in PACKED_BUCKETS:
        gemm = usual_gemm(device, dtype, rows, outputs, inputs, scheme)
        if gemm is not None:
            found[rows] = fallback = gemm
    return found, fallback
