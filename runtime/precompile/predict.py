"""Forecast: kernels that a model's steps will need, before there is a step, or weights, or PyTorch.

The compiler process, which goes without PyTorch, calls the functions that launch the kernels with
blanks in place of tensors, and launches nothing.  It is worth it for the few kernels that take
seconds.  A forecast that is wrong costs a core these seconds: the engine looks for what it needs,
not for what was forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from model_zoo.config import read_config
from runtime.config import EngineConfig

HALVES = ("bfloat16", "float16")
GPU = SimpleNamespace(type="cuda")
ROWS, TOKENS, PAGES = 16, 64, 1024  # any will do

Half = Literal["bfloat16", "float16"]


class PredictedKernels(NamedTuple):
    compile: Callable[[], None]
    kernels: tuple[str, ...]  # that it compiles


def predicted_kernels(config: EngineConfig, capability: tuple[int, int]) -> list[PredictedKernels]:
    """For a start of this kind on a device of this compute capability.  Raises ModelError."""
    model = read_config(Path(config.model))
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if capability[0] != 9 or dtype not in HALVES or config.deterministic:
        return []
    found = [
        PredictedKernels(partial(sample, model.vocab_size, dtype), ("trim_rows", "finish_rows")),
        # For special rows.  Nobody waits for it: most rows need the first one.
        PredictedKernels(partial(sample, model.vocab_size, "float32"), ()),
    ]
    if (
        config.attention in ("auto", "flash2")
        and config.split_planner in ("auto", "uneven")
        and config.kv_dtype in ("auto", dtype)
        and model.head_dim in range(24, 129, 8)
    ):
        heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        attention = partial(attend, heads, kv_heads, head_dim, config.page_size, dtype)
        found.insert(0, PredictedKernels(attention, ("_prefill_hopper",)))
    return found


def attend(heads: int, kv_heads: int, head_dim: int, page: int, dtype: Half) -> None:
    """Attention of prompts beside rows that decode, as attention/triton_backend.py calls it."""
    _compile_only()
    from attention.planner.prefill_tiles import TilePlan, TileSpec
    from attention.prefill.prefill_hopper import HALF, hopper_config, prefill_hopper

    spec = TileSpec(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        programs=ROWS,
        block_m=2 * HALF.value,
        block_n=hopper_config(head_dim).block_n,
    )
    device: Any = GPU
    tiles = TilePlan.allocate(
        spec, max_tokens=TOKENS, max_rows=ROWS, head_dim=head_dim, device=device
    )
    q: Any = _Blank(TOKENS, heads, head_dim, dtype=dtype)
    kv: Any = _Blank(PAGES, kv_heads, page, head_dim, dtype=dtype)
    table: Any = _Blank(ROWS, PAGES, dtype="int32")
    prefill_hopper(q, kv, kv, table, tiles, q, scale=head_dim**-0.5, overlap=True)


def sample(vocab: int, dtype: Half | Literal["float32"]) -> None:
    """Tokens from logits, as whole_step.py and constrained_rows.py have them chosen."""
    _compile_only()
    import torch

    from runtime.sampling.kernels.sample import sample
    from runtime.sampling.state import SamplerState

    device: Any = GPU
    state = SamplerState(ROWS, vocab, device)
    logits: Any = _Blank(ROWS, vocab, dtype=getattr(torch, dtype))
    numbers: Any = _Blank(ROWS, dtype=torch.int32)
    usable: Any = _Blank(ROWS, dtype=torch.int8)
    last_token: Any = _Blank(ROWS, dtype=torch.int64)
    sample(logits, numbers, numbers, state, last_token, numbers, usable)


class _Blank:
    """What a kernel's launch asks a tensor for."""

    device = GPU

    def __init__(self, *shape: int, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[after + 1 :]) for after in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def data_ptr(self) -> int:
        return 256


def _blank(*shape: Any, dtype: Any = "float32", device: object = None) -> _Blank:
    return _Blank(*(shape[0] if isinstance(shape[0], tuple) else shape), dtype=dtype)


def _compile_only() -> None:
    """Let this process compile for a Hopper what it would launch there."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from attention.common import dependent_launch

    torch.empty = torch.zeros = _blank  # type: ignore[assignment]  # PyTorch is not here
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
