"""GEMMs of quantized weights and many rows on a GPU.

    python -m benchmarks.gemm.bench_quantized_large --model qwen3-8b --rows 64 512 4096

For each number of rows and each GEMM of a layer, microseconds and TFLOP/s of:

  cublas              bf16 weights, which need no dequantizing
  row, block          torch._scaled_mm of fp8 weights, and the pass that quantizes x
  ... alone           the same without that pass
  row fast alone      with sums of fewer bits
  int8, int8 alone    Int8Gemm of int8 weights, with and without the pass that quantizes x
  int_mm alone        torch._int_mm, without scales: 32-bit sums are written
  then cuBLAS         "dequantize then cuBLAS": the weight as bf16 into memory, then cuBLAS
  in registers        "dequantize in registers", on the way to the tensor cores

Before each layer's table, once: dequantizing alone, with the bandwidth of what it reads and writes.
Weights are normal, quantized, and so many that none is in the L2 cache when it is read again.  If
$OUT is set, quantized_large.json is written there: one object a row of a table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.timing import GraphTimer, time_one
from benchmarks.gemm.gemm_chain import MODELS
from model_zoo.layers.gemm.timing import COLD_BYTES
from model_zoo.layers.quantized_gemm.dequant_gemm import tile_of
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizeThenCublas, ScaledMM, scratch
from model_zoo.layers.quantized_gemm.int8.gemm import Int8GemmByRows
from model_zoo.layers.quantized_gemm.packed_weight import E5M3_BIAS, PackedWeight, pack_codes
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.quantization.quantized_weight import CodeKind

ROWS = [64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192]
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between magnitudes: half-way
BF16 = torch.bfloat16
FORMATS = ("int4", "nvfp4", "fp8 row", "fp8 block", "int8 row")

Call = Callable[[int], object]  # the number of a weight
Weights = dict[str, list[PackedWeight]]


def random_weight(name: str, outputs: int, inputs: int, device: str) -> PackedWeight:
    """Normal numbers of standard deviation 1 / sqrt(inputs), quantized; the order is arbitrary.

    name  one of FORMATS
    """
    normal = torch.randn(outputs, inputs, device=device)
    unit = inputs**-0.5
    if name.startswith("fp8"):
        blocks = name == "fp8 block"
        words = normal.mul_(64).to(torch.float8_e4m3fn).view(torch.int32)
        shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (1, outputs)
        return PackedWeight(
            kind="fp8",
            words=words,
            scales=torch.full(shape, unit / 64, device=device),
            row_group=128 if blocks else 1,
            column_group=128 if blocks else inputs,
        )
    if name == "int8 row":
        return PackedWeight(
            kind="int8",
            words=normal.mul_(32).round_().clamp_(-128, 127).to(torch.int8).view(torch.int32),
            scales=torch.full((1, outputs), unit / 32, dtype=BF16, device=device),
            row_group=1,
            column_group=inputs,
        )
    if name == "int4":
        codes = normal.mul_(2.5).add_(8).round_().clamp_(0, 15).to(torch.uint8)
        scales = torch.full((inputs // 128, outputs), unit / 2.5, dtype=BF16, device=device)
    else:
        bounds = torch.tensor(E2M1_BOUNDS, device=device)
        magnitude = torch.bucketize(normal.abs().mul_(2), bounds, out_int32=True).to(torch.uint8)
        codes = magnitude | ((normal < 0).to(torch.uint8) << 3)
        shape = inputs // 128, outputs, 8
        scales = torch.full(shape, E5M3_BIAS << 3, dtype=torch.uint8, device=device)  # 1.0
    kind: CodeKind = "int4" if name == "int4" else "fp4"
    return PackedWeight(
        kind=kind,
        words=pack_codes(codes, kind),
        scales=scales,
        row_group=1,
        column_group=128 if name == "int4" else 16,
        row_scales=torch.full((outputs,), unit / 2, device=device) if name == "nvfp4" else None,
    )


def cold_weights(outputs: int, inputs: int, device: str) -> tuple[list[Tensor], Weights]:
    """-> (bf16 weights, quantized weights by format), each format more than the L2 cache holds."""
    several = {name: 4 if name in ("int4", "nvfp4") else 2 for name in FORMATS}
    least = -(-COLD_BYTES // (2 * outputs * inputs))
    plain = [
        torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5).to(BF16)
        for _ in range(max(3, least))
    ]
    quantized = {
        name: [
            random_weight(name, outputs, inputs, device)
            for _ in range(max(3, least * several[name]))
        ]
        for name in FORMATS
    }
    return plain, quantized


def subjects_of(plain: list[Tensor], weights: Weights, x: Tensor) -> dict[str, tuple[Call, int]]:
    """What is timed, and over how many weights."""
    row, block, fast = ScaledMM("row"), ScaledMM("block"), ScaledMM("row", fast_accum=True)
    rows, blocks = quantize_rows(x, "row"), quantize_rows(x, "block")
    by_row, by_block = weights["fp8 row"], weights["fp8 block"]
    then_cublas, in_registers = DequantizeThenCublas(), tile_of(x.device, len(x))
    found: dict[str, tuple[Call, int]] = {
        "cublas": (lambda i: F.linear(x, plain[i]), len(plain)),
        "row": (lambda i: row.run(x, by_row[i], None), len(by_row)),
        "row alone": (lambda i: row.product(rows, by_row[i], None), len(by_row)),
        "row fast alone": (lambda i: fast.product(rows, by_row[i], None), len(by_row)),
        "block": (lambda i: block.run(x, by_block[i], None), len(by_block)),
        "block alone": (lambda i: block.product(blocks, by_block[i], None), len(by_block)),
    }
    integers, int8, by_int8 = quantize_rows(x, "int8"), Int8GemmByRows("int8"), weights["int8 row"]
    found["int8"] = lambda i: int8.run(x, by_int8[i], None), len(by_int8)
    found["int8 alone"] = lambda i: int8.product(integers, by_int8[i], None), len(by_int8)
    plain_int8 = [weight.words.view(torch.int8).t() for weight in by_int8]
    found["int_mm alone"] = (
        lambda i: torch._int_mm(integers.codes, plain_int8[i]),
        len(by_int8),
    )
    for name in ("int4", "nvfp4"):
        several = weights[name]
        for title, gemm in {"then cuBLAS": then_cublas, "in registers": in_registers}.items():
            call = lambda i, gemm=gemm, w=several: gemm.run(x, w[i], None)  # noqa: E731
            found[f"{title} {name}"] = call, len(several)
    return found


def time_dequantizing(weights: Weights, timer: GraphTimer) -> dict[str, float]:
    """Microseconds for each format."""
    outputs, inputs = weights["int4"][0].shape
    device = weights["int4"][0].device
    out = scratch(device, BF16, outputs * inputs).view(outputs, inputs)
    found: dict[str, float] = {}
    for name, several in weights.items():
        call = lambda i, w=several: dequantize_into(w[i], out)  # noqa: E731
        found[name] = timer.replay([timer.capture(call, len(several))])[0].us
        touched = several[0].words.nbytes + several[0].scales.nbytes + out.nbytes
        print(
            f"  dequantize {name:9} {found[name]:7.1f} us {touched / found[name] / 1e6:5.2f} TB/s"
        )
    return found


def measure(
    name: str, shape: tuple[int, int], rows: list[int], timer: GraphTimer
) -> list[dict[str, object]]:
    outputs, inputs = shape
    print(f"{name}: {outputs} x {inputs}")
    plain, weights = cold_weights(outputs, inputs, "cuda")
    dequantizing = time_dequantizing(weights, timer)
    results: list[dict[str, object]] = []
    for count in rows:
        x = torch.randn(count, inputs, device="cuda").to(BF16)
        subjects = subjects_of(plain, weights, x)
        samples = timer.replay([timer.capture(*subject) for subject in subjects.values()])
        times = {title: sample.us for title, sample in zip(subjects, samples, strict=True)}
        if not results:
            print(f"{'rows':>6}" + "".join(f"{title:>20}" for title in times))
        work = 2 * count * outputs * inputs
        columns = (f"{us:>13.1f} ({work / us / 1e6:>4.0f})" for us in times.values())
        print(f"{count:>6}" + "".join(columns), flush=True)
        results.append(
            {"gemm": name, "outputs": outputs, "inputs": inputs, "rows": count}
            | {"microseconds": times, "dequantizing": dequantizing}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="whose shapes")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--replays", type=int, default=5, help="of each graph")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    print(f"{device}, PyTorch {torch.__version__}: microseconds (TFLOP/s)")
    busy = torch.randn(8192, 8192, device="cuda").to(BF16)
    time_one(GraphTimer(50), lambda _: busy @ busy)  # until clocks are those of work
    timer, results = GraphTimer(arguments.replays), []
    for name, shape in MODELS[arguments.model].shapes().items():
        if name != "lm_head":
            results += measure(name, shape, arguments.rows, timer)
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "quantized_large.json"
        path.write_text(json.dumps({"device": device, "results": results}, indent=1))


if __name__ == "__main__":
    main()
