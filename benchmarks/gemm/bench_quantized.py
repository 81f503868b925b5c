"""GEMMs of quantized weights on a GPU: Hopper's kernels beside the others.

    python -m benchmarks.gemm.bench_quantized --kinds "int4 g128" nvfp4 --rows 1 8 64 256

For each kind of weight, GEMM of a layer and number of rows: microseconds, and the share of the
memory's bandwidth at which the weight was read, of:

  dequantize in registers (Hopper)  SkinnyQuantizedGemm; of 8 bits above 64 rows, 64 at a time
  dequantize in registers, many rows (Hopper)  of 4 bits above 64 rows: PackedManyRowsGemm
  dequantize in registers           plain Triton
  dequantize then cuBLAS            above 64 rows: the weight as bf16 into memory, then cuBLAS
  fp8 tensor cores                  of fp8: torch._scaled_mm, and the pass that quantizes x
  fp8 tensor cores, scaled by the next kernel  the same without scales of rows, and that pass
  fp8 tensor cores, few rows (Hopper)  of fp8: SkinnyFp8Gemm, and that pass
  int8 tensor cores                 of int8: Int8Gemm, and the pass that quantizes x
  cuBLAS                            the same shape with bf16 weights

Products follow one another in a CUDA graph with dependent launches, over weights of which none is
in the L2 cache when it is read again.  The last table has the fastest of each.  If $OUT is set,
quantized.json is written there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.attention.timing import GraphTimer, measure_bandwidth
from benchmarks.gemm.gemm_chain import MODELS
from model_zoo.layers.gemm.implementations import MAX_ROWS, CublasGemm, GemmImpl, block_m
from model_zoo.layers.gemm.timing import COLD_BYTES
from model_zoo.layers.quantized_gemm.candidates import (
    HOPPER,
    fp8_many_rows,
    scaled_mm,
    unscaled_mm,
)
from model_zoo.layers.quantized_gemm.dequant_gemm import DequantizeInRegisters, dequant_gemms
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.fp8.skinny import SkinnyFp8Gemm, skinny_fp8_candidates
from model_zoo.layers.quantized_gemm.fp8_gemm import (
    DequantizeThenCublas,
    ScaledMM,
    UnscaledMM,
    reserve_scratch,
)
from model_zoo.layers.quantized_gemm.int8.gemm import Int8Gemm, activation_kind, int8_gemms
from model_zoo.layers.quantized_gemm.packed_many_rows import PackedManyRowsGemm, many_rows_gemms
from model_zoo.layers.quantized_gemm.packed_weight import E5M3_BIAS, PackedWeight
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.quantization.quantized_weight import BITS, CodeKind
from model_zoo.quantization.weight_scheme import WeightScheme
from runtime.precompile.compiling import compiling_only
from runtime.precompile.pool import Compilers

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
READ_BYTES = 1 << 30  # to measure the bandwidth
BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8
ROW = 1 << 30  # columns of a group: one scale a row
# name -> (kind, rows and columns of a group, dtype of scales)
KINDS: dict[str, tuple[CodeKind, int, int, torch.dtype]] = {
    "int4 g128": ("int4", 1, 128, BF16),
    "int4 g128 zeros": ("int4", 1, 128, BF16),
    "int4 g32": ("int4", 1, 32, BF16),
    "int8 row": ("int8", 1, ROW, BF16),
    "nvfp4": ("fp4", 1, 16, UINT8),
    "mxfp4": ("fp4", 1, 32, UINT8),
    "fp8 row": ("fp8", 1, ROW, FP32),
    "fp8 block": ("fp8", 128, 128, FP32),
}
TIMED = ("int4 g128", "fp8 row", "fp8 block", "nvfp4", "mxfp4")

IMPLEMENTATIONS = (
    SkinnyQuantizedGemm,
    PackedManyRowsGemm,
    DequantizeInRegisters,
    DequantizeThenCublas,
    ScaledMM,
    UnscaledMM,
    Fp8ManyRowsGemm,
    SkinnyFp8Gemm,
    Int8Gemm,
)
GEMMS = [kind.name for kind in (*IMPLEMENTATIONS, CublasGemm)]  # columns of the table


@dataclass(frozen=True, slots=True)
class Timed:
    """What was measured of one GEMM."""

    kind: str
    shape: str
    rows: int
    gemm: str  # as in the table above
    configuration: str
    us: float
    share: float  # of the memory's bandwidth


def scheme_of(name: str, inputs: int) -> WeightScheme:
    kind, row_group, column_group, scales = KINDS[name]
    return WeightScheme(
        kind=kind, row_group=row_group, column_group=min(column_group, inputs), scale_dtype=scales,
        zeros=name.endswith("zeros"), row_scales=name == "nvfp4",
        activation_bits=8 if kind in ("fp8", "int8") else 16,
    )  # fmt: skip


def random_weight(name: str, outputs: int, inputs: int, device: str = "cuda") -> PackedWeight:
    """Codes at random, and scales for values of about the size of a model's."""
    scheme = scheme_of(name, inputs)
    shapes = scheme.parameters(outputs, inputs)
    made = {
        key: torch.empty(*of, dtype=dtype, device=device) for key, (of, dtype) in shapes.items()
    }
    words, scales = made["words"].random_(-(1 << 31), 1 << 31), made["scales"]
    if scheme.kind == "fp8":
        words.bitwise_and_(~0x40404040)  # numbers below 2, of which none is NaN
    if scales.dtype == UINT8:
        code = E5M3_BIAS << 3 if scheme.column_group == 16 else 120
        scales.random_(code - 4, code + 4)
    else:
        scales.uniform_(0.001, 0.003)
    if "zeros" in made:
        made["zeros"].random_(1 << BITS[scheme.kind])
    if "row_scales" in made:
        made["row_scales"].uniform_(0.001, 0.003)
    return PackedWeight(
        kind=scheme.kind, words=words, scales=scales, row_group=scheme.row_group,
        column_group=scheme.column_group, zeros=made.get("zeros"),
        row_scales=made.get("row_scales"),
    )  # fmt: skip


def gemms_of(
    device: torch.device, name: str, shape: tuple[int, int], rows: int
) -> Iterator[GemmImpl]:
    """Each that is timed, but for cuBLAS."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    scheme = scheme_of(name, shape[1])
    many = many_rows_gemms(device, BF16, rows, *shape, scheme) if rows > MAX_ROWS else []
    yield from many
    if rows > MAX_ROWS:
        yield DequantizeThenCublas()
    if not many:
        for gemm in skinny_candidates(programs, rows, *shape, BITS[scheme.kind]):
            if gemm.serves(rows, *shape, scheme):
                yield gemm
        yield from dequant_gemms(device, programs, rows, *shape)
    product = scaled_mm(device, BF16, *shape, scheme)
    if product is not None:
        yield product
        unscaled = unscaled_mm(device, BF16, *shape, scheme)
        if unscaled is not None:
            yield unscaled
        if rows <= MAX_ROWS and torch.cuda.get_device_capability(device) == HOPPER:
            yield from skinny_fp8_candidates(product.kind, programs, rows, *shape)
        of_codes = fp8_many_rows(device, BF16, *shape, scheme)
        if rows > MAX_ROWS and of_codes is not None:
            yield of_codes
    kind = activation_kind(scheme)
    if kind is not None:
        yield from int8_gemms(device, kind, rows, *shape)


def label(gemm: GemmImpl) -> str:
    if isinstance(gemm, SkinnyFp8Gemm):
        split = "split" if gemm.split_units == 1 else "whole"
        ring = f"{gemm.stages}+{gemm.x_stages}"
        return f"{gemm.block_n}x{gemm.block_k} ring {ring} {split} {gemm.programs} programs"
    if isinstance(gemm, SkinnyQuantizedGemm):
        split = "split" if gemm.split_units == 1 else "whole"
        by = "mma.sync" if gemm.sync else "wgmma"
        by += ", columns apart" if gemm.apart else ""
        return (
            f"{gemm.block_n}x{gemm.block_k} {by} ring {gemm.stages}+{gemm.x_stages} {split} "
            f"{gemm.programs} programs"
        )
    if isinstance(gemm, PackedManyRowsGemm):
        return f"{gemm.width} rows a tile in {gemm.parts} parts"
    if isinstance(gemm, DequantizeInRegisters):
        return f"{gemm.block_m}x{gemm.block_n}x{gemm.block_k} parts {gemm.parts}"
    if isinstance(gemm, Int8Gemm):
        tma = " TMA" if gemm.tma else ""
        return f"{gemm.block_m}x{gemm.block_n}x{gemm.block_k} parts {gemm.parts}{tma}"
    return ""


def compile_all(
    shapes: dict[str, tuple[int, int]], kinds: Iterable[str], rows: Sequence[int]
) -> None:
    """Compile what will be launched, on all cores."""
    heights = sorted({block_m(of, 8) for of in rows})
    with compiling_only(Compilers()):
        for name in kinds:
            for shape in shapes.values():
                weight = random_weight(name, *shape)
                for of in heights:
                    x = torch.empty(of, shape[1], dtype=BF16, device="cuda")
                    for gemm in gemms_of(x.device, name, shape, of):
                        if not isinstance(gemm, ScaledMM | UnscaledMM):
                            gemm.run(x, weight, None)


def multiply(gemm: GemmImpl, x: torch.Tensor, weight: PackedWeight) -> None:
    """The product, without scales if another kernel multiplies them."""
    if isinstance(gemm, UnscaledMM):
        gemm.unscaled(x, weight)
    else:
        gemm.run(x, weight, None)


def time_kind(
    name: str, shape: tuple[str, tuple[int, int]], rows: Sequence[int], timer: GraphTimer,
    read: float,
) -> Iterator[Timed]:  # fmt: skip
    """read: the memory's bandwidth in TB/s"""
    one = random_weight(name, *shape[1])
    several = 1 + COLD_BYTES // one.nbytes
    weights = [one] + [random_weight(name, *shape[1]) for _ in range(several)]
    for of in rows:
        x = torch.randn(of, shape[1][1], dtype=BF16, device="cuda")
        gemms = list(gemms_of(x.device, name, shape[1], of))
        graphs = [
            timer.capture(lambda i, gemm=gemm, x=x: multiply(gemm, x, weights[i]), len(weights))
            for gemm in gemms
        ]
        for gemm, sample in zip(gemms, timer.replay(graphs), strict=True):
            share = one.nbytes / sample.us / 1e6 / read
            yield shown(Timed(name, shape[0], of, gemm.name, label(gemm), sample.us, share))


def time_cublas(
    shape: tuple[str, tuple[int, int]], rows: Sequence[int], timer: GraphTimer, read: float
) -> Iterator[Timed]:
    outputs, inputs = shape[1]
    nbytes = 2 * outputs * inputs
    several = max(2, 1 + COLD_BYTES // nbytes)
    weights = [torch.randn(outputs, inputs, device="cuda").to(BF16) for _ in range(several)]
    for of in rows:
        x = torch.randn(of, inputs, device="cuda").to(BF16)
        graph = timer.capture(lambda i, x=x: F.linear(x, weights[i]), len(weights))
        us = timer.replay([graph])[0].us
        yield shown(Timed("bf16", shape[0], of, CublasGemm.name, "", us, nbytes / us / 1e6 / read))


def shown(timed: Timed) -> Timed:
    print(
        f"{timed.kind:16} {timed.shape:8} {timed.rows:>3} rows {timed.us:8.2f} us "
        f"{timed.share:5.0%}  {timed.gemm}  {timed.configuration}",
        flush=True,
    )
    return timed


def summary(found: Sequence[Timed]) -> str:
    """Of each kind of GEMM the fastest: microseconds, and the share of the bandwidth."""
    best: dict[tuple[str, str, int, str], Timed] = {}
    for timed in sorted(found, key=lambda timed: -timed.us):
        best[timed.kind, timed.shape, timed.rows, timed.gemm] = timed
    lines = [f"{'':30}" + "".join(f"  {name:>{wide(name)}}" for name in GEMMS)]
    places = dict.fromkeys((t.kind, t.shape, t.rows) for t in found if t.kind != "bf16")
    for kind, shape, rows in places:
        line = f"{kind:16} {shape:8} {rows:>4} "
        for name in GEMMS:
            timed = best.get(("bf16" if name == CublasGemm.name else kind, shape, rows, name))
            cell = "" if timed is None else f"{timed.us:.1f} ({timed.share:.0%})"
            line += f"  {cell:>{wide(name)}}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def wide(name: str) -> int:
    return max(13, len(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="whose shapes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=TIMED, help="of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x")
    parser.add_argument("--replays", type=int, default=10, help="of each graph")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    start = time.perf_counter()
    shapes = MODELS[arguments.model].shapes()
    del shapes["lm_head"]
    largest = max(outputs * inputs for outputs, inputs in shapes.values())
    reserve_scratch(torch.device("cuda", torch.cuda.current_device()), BF16, largest)
    compile_all(shapes, arguments.kinds, arguments.rows)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    timer = GraphTimer(arguments.replays)
    data = torch.randn(READ_BYTES // 2, dtype=BF16, device="cuda")
    read = measure_bandwidth(data, timer).read
    print(f"reads {read:.2f} TB/s")
    found: list[Timed] = []
    for shape in shapes.items():
        found += time_cublas(shape, arguments.rows, timer, read)
    for name in arguments.kinds:
        for shape in shapes.items():
            found += time_kind(name, shape, arguments.rows, timer, read)
            write(found)
    print(f"\n{summary(found)}\n{time.perf_counter() - start:.0f} s in all")


def write(found: Iterable[Timed]) -> None:
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "quantized.json"
        path.write_text(json.dumps([asdict(timed) for timed in found], indent=1))


if __name__ == "__main__":
    main()
