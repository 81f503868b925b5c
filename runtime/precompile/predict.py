"""Predicted kernels: those of a model's steps, before there is a step, weights, or PyTorch.

The compiler process, which does not import PyTorch, calls the functions that launch the kernels
with fake tensors, and launches nothing.  This is worth it for the few kernels that take seconds to
compile.  A wrong prediction costs a core these seconds and nothing else: the engine looks up the
kernels that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from model_zoo.config import read_config
from model_zoo.parallel.sharded_config import sharded_config
from runtime.config import EngineConfig, dtype_for
from runtime.precompile.fake_tensors import GPU, FakeTensor, compile_only
from runtime.precompile.predict_gemms import (
    GEMM_KERNELS,
    compile_gemms,
    processes,
    usual_layers,
)

HALVES = ("bfloat16", "float16")
ROWS, TOKENS, PAGES = 16, 64, 1024  # arbitrary

Half = Literal["bfloat16", "float16"]


class PredictedKernels(NamedTuple):
    compile: Callable[[], None]
    kernels: tuple[str, ...]  # the names of what it compiles


def predicted_kernels(config: EngineConfig, capability: tuple[int, int]) -> list[PredictedKernels]:
    """Predictions for this configuration and compute capability.

    Raises ModelError or ConfigError.
    """
    whole = read_config(Path(config.model), images=config.max_image_pixels > 0)
    model = sharded_config(whole, 0, config.tensor_parallel, expert_parallel=config.expert_parallel)
    dtype = dtype_for(config.dtype, model.dtype, "cuda", fits_float16=model.fits_float16)
    if capability[0] != 9 or dtype not in HALVES or config.deterministic:
        return []
    found = [
        PredictedKernels(
            partial(compile_sampler, model.vocab_size, dtype), ("filter_rows", "finish_rows")
        ),
        # For constrained rows.  No request waits for it: most rows need the first one.
        PredictedKernels(partial(compile_sampler, model.vocab_size, "float32"), ()),
    ]
    has_float8_pages = config.kv_dtype == "fp8_e4m3"
    head_dims = range(32, 257, 16) if has_float8_pages else range(24, 257, 8)
    if (
        config.attention in ("auto", "flash2")
        and config.split_planner in ("auto", "stream-k")
        and model.head_dim in head_dims
    ):
        heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        sinks = model.attention_sinks
        for window, softcap in sorted({(s.window, s.softcap) for s in model.attention_specs}):
            shape = heads, kv_heads, head_dim, config.page_size
            attention = partial(
                compile_attention, *shape, dtype, window, softcap, sinks, has_float8_pages
            )
            found.insert(0, PredictedKernels(attention, ("_prefill_hopper",)))
    if processes():
        layers, quantization = usual_layers(model), config.quantization
        gemms = partial(compile_gemms, config.model, quantization, dtype, layers)
        found.append(PredictedKernels(gemms, tuple(GEMM_KERNELS)))
    return found


def compile_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: Half,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    has_float8_pages: bool = False,
) -> None:
    """Compile the prefill attention of mixed steps, as attention/triton_backend.py launches it."""
    compile_only()
    import torch

    from attention.common.kernel_inputs import KernelInputs
    from attention.kv_pool import FP8
    from attention.planner.prefill_tiles import TilePlan, TileSpec
    from attention.prefill.prefill_hopper import HALF, hopper_config, prefill_hopper

    kv_dtype: Any = FP8 if has_float8_pages else getattr(torch, dtype)
    spec = TileSpec(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        programs=ROWS,
        window=window,
        block_m=2 * HALF.value,
        block_n=hopper_config(head_dim, kv_dtype).block_n,
    )
    device: Any = GPU
    tiles = TilePlan.allocate(
        spec, max_tokens=TOKENS, max_rows=ROWS, head_dim=head_dim, device=device
    )
    q: Any = FakeTensor(TOKENS, heads, head_dim, dtype=getattr(torch, dtype))
    kv: Any = FakeTensor(PAGES, kv_heads, page, head_dim, dtype=kv_dtype)
    table: Any = FakeTensor(ROWS, PAGES, dtype=torch.int32)
    sinks: Any = FakeTensor(heads, dtype=torch.float32) if has_sinks else None
    scales: Any = FakeTensor(kv_heads, dtype=torch.float32) if has_float8_pages else None
    inputs = KernelInputs(
        q, kv, kv, table, q, scale=head_dim**-0.5, softcap=softcap, sinks=sinks, k_scale=scales,
        v_scale=scales,
    )  # fmt: skip
    prefill_hopper(inputs, tiles, overlap=True)


def compile_sampler(vocab: int, dtype: Half | Literal["float32"]) -> None:
    """Compile the sampler, as cuda_graph/step.py and constrained_rows.py launch it."""
    compile_only()
    import torch

    from runtime.sampling.kernels.sample import sample
    from runtime.sampling.state import SamplerState

    device: Any = GPU
    state = SamplerState(ROWS, vocab, device)
    logits: Any = FakeTensor(ROWS, vocab, dtype=getattr(torch, dtype))
    numbers: Any = FakeTensor(ROWS, dtype=torch.int32)
    usable: Any = FakeTensor(ROWS, dtype=torch.int8)
    last_token: Any = FakeTensor(ROWS, dtype=torch.int64)
    sample(logits, numbers, numbers, state, last_token, numbers, usable)
