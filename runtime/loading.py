"""Loading: from the operator's wish to an executor that has run its first step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from attention.backend import Backend, Capacity, Choice, Machine, Shape, build, dispatch
from attention.kv_pool import KVPool
from model_zoo.config import ModelConfig, read_config
from model_zoo.kv_scales import read_kv_scales
from model_zoo.loader import load_model
from runtime.batch import Batch, NewRow
from runtime.config import EngineConfig, ModelFacts, Resolved, resolve
from runtime.device import (
    CPU_KV_BYTES,
    DTYPES,
    KV_DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_threads,
    free_bytes,
)
from runtime.executor import Local
from runtime.messages import Ready, SamplingParams
from runtime.runner import Model, Runner

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    executor: Local
    resolved: Resolved
    ready: Ready


def load(wanted: EngineConfig, progress: ProgressCallback, *, epoch: int = 0) -> Loaded:
    """Load the model, size the KV pool and warm up.

    Raises ConfigError, ModelError or UnsupportedAttention if the wish cannot be met here.
    """
    began = time.monotonic()
    device = choose_device(wanted.device)
    threads = choose_threads(wanted.threads)
    torch.set_num_threads(threads)
    torch.manual_seed(wanted.seed)
    directory = Path(wanted.model)
    config = read_config(directory)
    dtype = choose_dtype(wanted.dtype, config.dtype, device)
    kv_dtype = choose_kv_dtype(wanted.kv_dtype, dtype)
    shape = _shape(config, wanted.page_size, DTYPES[dtype], KV_DTYPES[kv_dtype])
    choice = dispatch(Machine.of(device), wanted.attention, shape, wanted.split_planner)
    start_bytes = free_bytes(device)
    model = load_model(
        config,
        directory,
        dtype=DTYPES[dtype],
        device=device,
        load_format=wanted.load_format,
        progress=progress,
    )
    weight_bytes = _weight_bytes(model)
    budget = _kv_budget(wanted, device, start_bytes, weight_bytes)

    def settle(budget: int) -> Resolved:
        return resolve(
            wanted,
            _facts(config, shape.kv_dtype),
            device="cuda" if device.type == "cuda" else "cpu",
            dtype=dtype,
            kv_dtype=kv_dtype,
            attention=choice.backend,
            kv_budget_bytes=max(budget, 0),
            threads=threads,
        )

    resolved = settle(budget)
    if device.type == "cuda":
        progress("memory", 0, 1)
        needed = _working_bytes(model, config, resolved, choice, shape, device)
        resolved = settle(budget - needed)
    progress("warm-up", 0, 1)
    kv = _allocate(config, resolved, resolved.num_pages, device)
    if wanted.load_format != "dummy":
        _take_scales(kv, config, directory)
    backend = build(choice, shape, _capacity(resolved), device)
    runner = _runner(model, config, resolved, kv, backend, device)
    warm_up(runner, resolved)
    progress("warm-up", 1, 1)
    seconds = time.monotonic() - began
    ready = _ready(epoch, config, resolved, backend, device, weight_bytes, kv.num_bytes, seconds)
    return Loaded(Local(runner), resolved, ready)


def _ready(
    epoch: int,
    config: ModelConfig,
    resolved: Resolved,
    backend: Backend,
    device: torch.device,
    weight_bytes: int,
    kv_bytes: int,
    load_seconds: float,
) -> Ready:
    """What the clients are told of the engine."""
    return Ready(
        epoch=epoch,
        model_type=config.model_type,
        device=_device_name(device),
        dtype=resolved.dtype,
        attention=_attention(resolved, backend),
        vocab_size=config.vocab_size,
        max_model_len=resolved.max_model_len,
        page_size=resolved.page_size,
        num_pages=resolved.num_pages,
        max_num_seqs=resolved.max_num_seqs,
        max_batched_tokens=resolved.max_batched_tokens,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        load_seconds=load_seconds,
        hidden_size=config.hidden_size,
    )


def _attention(resolved: Resolved, backend: Backend) -> str:
    """For the start report: the back end, its kernels, and what its pages hold."""
    pages = "" if resolved.kv_dtype == resolved.dtype else f", pages {resolved.kv_dtype}"
    return f"{backend.name} ({backend.details}{pages})"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _shape(config: ModelConfig, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Shape:
    return Shape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def _capacity(resolved: Resolved) -> Capacity:
    return Capacity(rows=resolved.max_num_seqs, tokens=resolved.max_batched_tokens)


def _facts(config: ModelConfig, kv_dtype: torch.dtype) -> ModelFacts:
    return ModelFacts(
        model_type=config.model_type,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        kv_bytes_per_token=config.kv_bytes_per_token(kv_dtype.itemsize),
    )


def _weight_bytes(model: nn.Module) -> int:
    """Of parameters, buffers and what layers made of them (packed weights), each counted once."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def _kv_budget(
    wanted: EngineConfig, device: torch.device, start_bytes: int, weight_bytes: int
) -> int:
    """Bytes for keys and values, before the working memory of a step is taken off.

    GPU: the fraction of what was free before loading, less the weights.  CPU: the fraction of
    half of what is free after loading, and no more than 4 GiB unless --kv-tokens asks for more.
    """
    if device.type == "cuda":
        return int(start_bytes * wanted.gpu_memory) - weight_bytes
    budget = int(free_bytes(device) * wanted.gpu_memory / 2)
    return budget if wanted.kv_tokens else min(budget, CPU_KV_BYTES)


def _allocate(config: ModelConfig, resolved: Resolved, pages: int, device: torch.device) -> KVPool:
    return KVPool.allocate(
        layers=config.num_layers,
        pages=pages,
        kv_heads=config.num_kv_heads,
        page_size=resolved.page_size,
        head_dim=config.head_dim,
        dtype=KV_DTYPES[resolved.kv_dtype],
        device=device,
    )


def _take_scales(kv: KVPool, config: ModelConfig, directory: Path) -> None:
    """Of fp8 pages: what the checkpoint says; they are 1 where it says nothing."""
    if kv.k_scale is not None and kv.v_scale is not None:
        k_scale, v_scale = read_kv_scales(directory, config)
        kv.k_scale.copy_(k_scale)
        kv.v_scale.copy_(v_scale)


def _runner(
    model: nn.Module,
    config: ModelConfig,
    resolved: Resolved,
    kv: KVPool,
    backend: Backend,
    device: torch.device,
) -> Runner:
    return Runner(
        cast(Model, model),
        resolved=resolved,
        vocab_size=config.vocab_size,
        kv=kv,
        backend=backend,
        device=device,
    )


def _working_bytes(
    model: nn.Module,
    config: ModelConfig,
    resolved: Resolved,
    choice: Choice,
    shape: Shape,
    device: torch.device,
) -> int:
    """GPU memory that the largest step needs beside weights and KV, measured by running it.

    One page stands for all pages of the longest sequence: its contents do not matter.
    """
    kv = _allocate(config, resolved, 1, device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    backend = build(choice, shape, _capacity(resolved), device)
    runner = _runner(model, config, resolved, kv, backend, device)
    largest_prefill = min(resolved.max_batched_tokens, resolved.max_model_len - 1)
    params = SamplingParams(max_tokens=1, top_p=0.9)
    before_it = resolved.max_model_len - 1 - largest_prefill
    _run(runner, _one_row(before_it, largest_prefill, resolved, params))
    _run(runner, _decode_rows(resolved.max_num_seqs, resolved, params))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def warm_up(runner: Runner, resolved: Resolved) -> None:
    """Run a prompt and decode steps, so that the first request meets code that has run.

    On a GPU, some kernels are compiled for ranges of numbers of rows, no longer than from a power
    of two to the next.
    """
    params = SamplingParams(max_tokens=1, top_p=0.9, temperature=0.5)
    prompt = min(8, resolved.max_batched_tokens, resolved.max_model_len - 1)
    _run(runner, _one_row(0, prompt, resolved, params))
    most = resolved.max_num_seqs if resolved.device == "cuda" else 1
    for power in range(most.bit_length()):
        _run(runner, _decode_rows(1 << power, resolved, params))
    _run(runner, _decode_rows(most, resolved, params))


def _run(runner: Runner, batch: Batch) -> None:
    runner.forward(batch)
    runner.sample(batch).wait()


def _one_row(start: int, tokens: int, resolved: Resolved, params: SamplingParams) -> Batch:
    """Some tokens of a prompt, all of whose pages are page 0."""
    pages = -(-(start + tokens) // resolved.page_size)
    return Batch(
        slots=[0],
        starts=[start],
        q_lens=[tokens],
        tokens=[0] * tokens,
        num_new_pages=[pages],
        new_pages=[0] * pages,
        sample=[True],
        decode_rows=0,
        new_rows=[NewRow(0, params, 0, start + tokens, [])],
    )


def _decode_rows(rows: int, resolved: Resolved, params: SamplingParams) -> Batch:
    return Batch(
        slots=list(range(rows)),
        starts=[0] * rows,
        q_lens=[1] * rows,
        tokens=[0] * rows,
        num_new_pages=[1] * rows,
        new_pages=[0] * rows,
        sample=[True] * rows,
        decode_rows=rows,
        new_rows=[NewRow(slot, params, 0, 1, []) for slot in range(rows)],
    )
