"""Predicted kernels: those of a model's steps, before there is a step, weights, or PyTorch.

The compiler process, which does not import PyTorch, calls the functions that launch the kernels
with fake tensors, and launches nothing.  This is worth it for the few kernels that take seconds to
compile.  A wrong prediction costs a core these seconds and nothing else: the engine looks up the
kernels that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from model_zoo.config import read_config
from model_zoo.parallel.sharded_config import sharded_config
from runtime.config import EngineConfig, dtype_for

HALVES = ("bfloat16", "float16")
GPU = SimpleNamespace(type="cuda")
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
    if (
        config.attention in ("auto", "flash2")
        and config.split_planner in ("auto", "stream-k")
        and config.kv_dtype in ("auto", dtype)
        and model.head_dim in range(24, 257, 8)
    ):
        heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        sinks = model.attention_sinks
        for window, softcap in sorted({(s.window, s.softcap) for s in model.attention_specs}):
            shape = heads, kv_heads, head_dim, config.page_size
            attention = partial(compile_attention, *shape, dtype, window, softcap, sinks)
            found.insert(0, PredictedKernels(attention, ("_prefill_hopper",)))
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
) -> None:
    """Compile the prefill attention of mixed steps, as attention/triton_backend.py launches it."""
    _compile_only()
    import torch

    from attention.common.kernel_inputs import KernelInputs
    from attention.planner.prefill_tiles import TilePlan, TileSpec
    from attention.prefill.prefill_hopper import HALF, hopper_config, prefill_hopper

    spec = TileSpec(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        programs=ROWS,
        window=window,
        block_m=2 * HALF.value,
        block_n=hopper_config(head_dim).block_n,
    )
    device: Any = GPU
    tiles = TilePlan.allocate(
        spec, max_tokens=TOKENS, max_rows=ROWS, head_dim=head_dim, device=device
    )
    q: Any = _FakeTensor(TOKENS, heads, head_dim, dtype=dtype)
    kv: Any = _FakeTensor(PAGES, kv_heads, page, head_dim, dtype=dtype)
    table: Any = _FakeTensor(ROWS, PAGES, dtype=torch.int32)
    sinks: Any = _FakeTensor(heads, dtype=torch.float32) if has_sinks else None
    inputs = KernelInputs(q, kv, kv, table, q, scale=head_dim**-0.5, softcap=softcap, sinks=sinks)
    prefill_hopper(inputs, tiles, overlap=True)


def compile_sampler(vocab: int, dtype: Half | Literal["float32"]) -> None:
    """Compile the sampler, as cuda_graph/step.py and constrained_rows.py launch it."""
    _compile_only()
    import torch

    from runtime.sampling.kernels.sample import sample
    from runtime.sampling.state import SamplerState

    device: Any = GPU
    state = SamplerState(ROWS, vocab, device)
    logits: Any = _FakeTensor(ROWS, vocab, dtype=getattr(torch, dtype))
    numbers: Any = _FakeTensor(ROWS, dtype=torch.int32)
    usable: Any = _FakeTensor(ROWS, dtype=torch.int8)
    last_token: Any = _FakeTensor(ROWS, dtype=torch.int64)
    sample(logits, numbers, numbers, state, last_token, numbers, usable)


class _FakeTensor:
    """The attributes of a tensor that a kernel's launch reads."""

    device = GPU

    def __init__(self, *shape: int, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[after + 1 :]) for after in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def element_size(self) -> int:
        assert self.dtype in HALVES, "of other tensors no kernel asks for it"
        return 2

    def data_ptr(self) -> int:
        return 256


def _fake_tensor(*shape: Any, dtype: Any = "float32", device: object = None) -> _FakeTensor:
    return _FakeTensor(*(shape[0] if isinstance(shape[0], tuple) else shape), dtype=dtype)


def _compile_only() -> None:
    """Make kernel launches in this process compile for Hopper and launch nothing."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from attention.common import dependent_launch

    torch.empty = torch.zeros = _fake_tensor  # type: ignore[assignment]  # PyTorch is not imported
    dependent_launch.can_depend = lambda device: True  # type: ignore[assignment]
    nowhere: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(nowhere)
    run: Any = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
