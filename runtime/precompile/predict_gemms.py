"""Predicted kernels of GEMMs: of few rows, and of 4-bit and fp8 weights also of many.

A start on Hopper times some dozens of them, each of which takes one to three seconds to compile.
The compiler process calls the candidates of a model's usual layers with fake tensors, each in a
fork, while the engine imports PyTorch.  Which of them a layer has, and with what arguments, is told
by the functions that the engine calls; what a prediction misses, the engine requests.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.precompile.fake_tensors import PROCESSORS, FakeTensor, compile_only

if TYPE_CHECKING:
    from model_zoo.config import ModelConfig

# What is predicted -> its module.
GEMM_KERNELS = {
    "_skinny_gemm": "model_zoo.layers.gemm.hopper.skinny_gemm",
    "_skinny_quantized_gemm": "model_zoo.layers.quantized_gemm.skinny_hopper",
    "packed_many_rows": "model_zoo.layers.quantized_gemm.hopper.packed_many_rows",
    "skinny_fp8_gemm": "model_zoo.layers.quantized_gemm.hopper.fp8_gemm_kernel",
    "fp8_many_rows": "model_zoo.layers.quantized_gemm.hopper.fp8_many_rows",
}
HEAD = "lm_head"
MANY_ROWS = 512
# Of the cores: those that are left to the engine, and to predictions that take longer, and the
# fewest that are worth a prediction.  Requests for the kernels wait until all are compiled.
ENGINES_CORES, LEAST_CORES = 4, 4
WATCH_SECONDS = 1.0
GRID = "programs", "split_units", "parts"  # fields of GEMMs that no kernel is compiled for


class Layer(NamedTuple):
    """A Linear of the model; name: of one of its layers in the checkpoint."""

    name: str
    outputs: int
    inputs: int
    gate: str | None = None
    bias: bool = False


def usual_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """The Linears of a transformer's block, and its head."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
    values, block = heads * config.head_dim, "model.layers.0"
    qkv = values + 2 * config.num_kv_heads * config.head_dim
    found = [
        Layer(f"{block}.self_attn.q_proj", qkv, hidden, bias=config.qkv_bias),
        Layer(f"{block}.self_attn.o_proj", hidden, values, bias=config.out_bias),
        Layer(HEAD, config.vocab_size, hidden),
    ]
    if config.moe is None and config.model_type != "gpt2":  # whose MLP has no gate
        gate = "gelu" if config.model_type.startswith("gemma") else "silu"
        found += [
            Layer(f"{block}.mlp.up_proj", 2 * inner, hidden, gate, bias=config.mlp_bias),
            Layer(f"{block}.mlp.down_proj", hidden, inner, bias=config.mlp_bias),
        ]
    return tuple(found)


def processes() -> int:
    """That may compile GEMMs at once; 0: too few to predict them."""
    from runtime.precompile.worker import MAX_FORKS

    spare = min(MAX_FORKS, len(os.sched_getaffinity(0)) - ENGINES_CORES)
    return spare if spare >= LEAST_CORES else 0


def compile_gemms(folder: str, quantization: str, dtype: str, layers: tuple[Layer, ...]) -> None:
    """Compile what a start times for these layers of the model in `folder`, and return then.

    quantization  of EngineConfig
    dtype         "bfloat16" or "float16", of activations
    """
    from runtime.precompile.worker import CompileRequest, ForkPool, kernel

    compile_only()
    for name, module in GEMM_KERNELS.items():
        _ = kernel(module, name).cache_key  # read from the sources once, for all forks
    worker = os.getppid()
    forks = ForkPool(max(1, processes()), lambda number: None)
    for number, call in enumerate(_calls(folder, quantization, dtype, layers)):
        forks.add(number, CompileRequest(call))
    while forks.ends:
        for end in select.select(forks.ends, [], [], WATCH_SECONDS)[0]:
            forks.take(end)
        if os.getppid() != worker:  # it has died: no engine waits for these kernels
            forks.kill()
            return


def _calls(
    folder: str, quantization: str, dtype: str, layers: tuple[Layer, ...]
) -> Iterator[Callable[[], object]]:
    """The candidates' calls, one for each kernel; those of the most rows, which take longest, come
    first."""
    import torch

    from model_zoo.layers.gemm.implementations import BUCKETS
    from model_zoo.quantization.config import read_quantization
    from model_zoo.quantization.stored_format import ONLINE
    from model_zoo.quantization.weight_scheme import scheme_for

    config = read_quantization(Path(folder))
    seen: set[tuple[object, ...]] = set()
    for rows in (MANY_ROWS, *reversed(BUCKETS)):
        for layer in layers:
            stored = None if config is None else config.stored(layer.name)
            if config is None and quantization == "fp8" and layer.name != HEAD:
                stored = ONLINE
            scheme = None if stored is None else scheme_for(stored, layer.inputs)
            if scheme is not None and not scheme.fits(layer.outputs, layer.inputs):
                scheme = None  # the weight is dequantized when it is loaded
            for gemm, x, weight in _gemms(scheme, getattr(torch, dtype), rows, layer):
                for gate in (None, layer.gate):
                    kernel = *_compiled_for(gemm), max(rows, 8), gate, layer.bias, scheme
                    call = _call(gemm, x, weight, layer, gate)
                    if call is not None and kernel not in seen:
                        seen.add(kernel)
                        yield call


def _compiled_for(gemm: Any) -> tuple[object, ...]:
    sizes = (getattr(gemm, field.name) for field in fields(gemm) if field.name not in GRID)
    return type(gemm), *sizes


def _call(gemm: Any, x: Any, weight: Any, layer: Layer, gate: Any) -> Callable[[], object] | None:
    """None: the GEMM does not compute the activation."""
    from model_zoo.layers.gemm.implementations import GatingGemm

    bias: Any = FakeTensor(layer.outputs, dtype=x.dtype) if layer.bias else None
    if isinstance(gemm, GatingGemm):
        gates = gate is None or gemm.gates(len(x), weight)
        return partial(gemm.multiply, x, weight, bias, gate) if gates else None
    return partial(gemm.run, x, weight, bias) if gate is None else None


def _gemms(scheme: Any, dtype: Any, rows: int, layer: Layer) -> Iterator[tuple[Any, Any, Any]]:
    """-> (candidate, x, weight); scheme: None: the weight is not quantized"""
    from model_zoo.layers.gemm.candidates import CUBLAS, gemm_candidates
    from model_zoo.layers.gemm.implementations import MAX_ROWS

    x: Any = FakeTensor(rows, layer.inputs, dtype=dtype)
    shape = rows, layer.outputs, layer.inputs
    if scheme is not None:
        yield from _quantized_gemms(scheme, x, layer)
    elif rows <= MAX_ROWS:
        weight = FakeTensor(layer.outputs, layer.inputs, dtype=dtype)
        for gemm in gemm_candidates(PROCESSORS, (9, 0), *shape):
            if gemm is not CUBLAS:
                yield gemm, x, weight


def _quantized_gemms(scheme: Any, x: Any, layer: Layer) -> Iterator[tuple[Any, Any, Any]]:
    from model_zoo.layers.gemm.implementations import MAX_ROWS
    from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
    from model_zoo.layers.quantized_gemm.fp8.skinny import skinny_fp8_candidates
    from model_zoo.layers.quantized_gemm.packed_many_rows import WIDTHS, PackedManyRowsGemm
    from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
    from model_zoo.layers.quantized_gemm.skinny import multiplies
    from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
    from model_zoo.quantization.quantized_weight import BITS

    rows, shape = len(x), (layer.outputs, layer.inputs)
    parameters: dict[str, Any] = {
        name: FakeTensor(*sizes, dtype=dtype)
        for name, (sizes, dtype) in scheme.parameters(*shape).items()
    }
    weight = PackedWeight(
        kind=scheme.kind, row_group=scheme.row_group, column_group=scheme.column_group, **parameters
    )
    codes = None
    if scheme.kind == "fp8" and scheme.activation_bits == 8:
        codes = _quantized(x, "block" if scheme.row_group > 1 else "row")
    if rows > MAX_ROWS:
        for width in WIDTHS:
            if PackedManyRowsGemm(width).serves(rows, x.dtype, *shape, scheme):
                yield PackedManyRowsGemm(width), x, weight
        if codes is not None and codes.kind == "row" and not layer.bias:
            yield Fp8ManyRowsGemm(), codes, weight
    elif multiplies(scheme, layer.inputs):
        for gemm in skinny_candidates(PROCESSORS, rows, *shape, BITS[scheme.kind]):
            if gemm.serves(rows, *shape, scheme):
                yield gemm, x, weight
        if codes is not None:
            for gemm in skinny_fp8_candidates(codes.kind, PROCESSORS, rows, *shape):
                yield gemm, codes, weight


def _quantized(x: Any, kind: Any) -> Any:
    """x as fp8 codes, of which there are whole tiles of 16 rows."""
    import torch

    from model_zoo.layers.quantized_rows import GROUP, QuantizedRows

    (rows, columns), dtype = x.shape, torch.float8_e4m3fn
    padded = -(-rows // 16) * 16
    codes: Any = FakeTensor(padded, columns, dtype=dtype)
    scales: Any = FakeTensor(padded, 1 if kind == "row" else columns // GROUP, dtype=torch.float32)
    return QuantizedRows(codes=codes, scales=scales, kind=kind, count=rows, dtype=x.dtype)
