"""What a configuration would have on a device: its memory plan and all sizes, by estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import torch
from msgspec.structs import replace

from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelConfig, ModelError
from model_zoo.layers.linear_factory import SchemeOf, unquantized
from model_zoo.layers.quantized_gemm.int8.cpu import Packs, packs_of
from model_zoo.parallel.sharded_checkpoint import check_division
from model_zoo.parallel.sharded_config import sharded_config
from runtime.config import (
    ConfigError,
    DeviceName,
    DTypeName,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    check,
    dtype_for,
    resolve,
    step_limits,
)
from runtime.executor.state_store import LANES
from runtime.memory_plan import MemoryPlan, size
from runtime.startup.all_reduce import sum_bytes
from runtime.startup.device import (
    DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    free_bytes,
    gpu_free_bytes,
)
from runtime.startup.engine_spec import layers_of
from runtime.startup.memory_estimate import (
    CONTEXT_BYTES,
    StepSizes,
    copy_bytes,
    cpu_memory_plan,
    estimate,
    facts_of,
    layout_of,
    weight_bytes,
)


class FitQuery(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    card: int = 0  # bytes of a GPU that need not be present; 0: the device of this machine
    downloaded: bool = False  # the directory is the Hub's cache, and may lack weights


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """The device that the report is for; `free` in bytes."""

    kind: DeviceName
    name: str
    free: int
    dtype: DTypeName
    scheme_of: SchemeOf = unquantized


def target_device(query: FitQuery, config: ModelConfig) -> TargetDevice:
    """The device of this machine, or the GPU of --card.

    Raises UnusableGPU, another ConfigError or ModelError.
    """
    requested = query.config
    if query.card:
        dtype = dtype_for(requested.dtype, config.dtype, "cuda", fits_float16=config.fits_float16)
        free = max(0, query.card - CONTEXT_BYTES)
        name = f"a GPU of {size(query.card)}"
        return TargetDevice("cuda", name, free, dtype, _layers(query, dtype, config).scheme_of)
    device = choose_device(requested.device)
    dtype = choose_dtype(requested.dtype, config, device)
    layers = _layers(query, dtype, config)
    kind: DeviceName = "cuda" if device.type == "cuda" else "cpu"
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "this CPU"
    if kind == "cuda":  # of the rank that has least
        seen = range(min(requested.tensor_parallel, torch.cuda.device_count()))
        free = min(map(gpu_free_bytes, seen))
    else:
        free = free_bytes(device)
    return TargetDevice(kind, name, free, dtype, layers.scheme_of)


def cpu_processes(requested: EngineConfig) -> int:
    """That share the memory of a CPU: each has weights of its own."""
    return requested.data_parallel * requested.tensor_parallel


def memory_plan(requested: EngineConfig, config: ModelConfig, target: TargetDevice) -> MemoryPlan:
    """The memory plan of a start; on a GPU, estimates of what a start would measure."""
    dtype = DTYPES[target.dtype]
    if target.kind == "cpu":
        taken = weight_bytes(config, dtype) + copy_bytes(config, dtype)
        left = target.free - taken * cpu_processes(requested)
        return cpu_memory_plan(requested, max(0, left) // requested.tensor_parallel)
    rows, tokens = step_limits(requested, target.kind, target.free)
    longest = requested.max_model_len or config.max_position
    if requested.kv_tokens:
        longest = min(longest, requested.kv_tokens + requested.page_size)
    steps = StepSizes(
        tokens=tokens,
        rows=rows,
        max_len=longest,
        page_size=requested.page_size,
        num_groups=len(layout_of(config, requested.max_model_len).groups),
        image_pixels=requested.max_image_pixels,
    )
    plan = estimate(
        config,
        dtype,
        steps,
        free=target.free,
        share=requested.gpu_memory,
        scheme_of=target.scheme_of,
    )
    if requested.prefix_cache:  # recurrent states on their way to and from snapshots
        state_bytes = model_facts(requested, config, target).state_bytes
        plan = replace(plan, state=plan.state + LANES * state_bytes)
    return replace(plan, state=plan.state + sum_bytes(requested, config, dtype, tokens))


def resolve_config(
    requested: EngineConfig, config: ModelConfig, target: TargetDevice
) -> ResolvedConfig:
    """The configuration with all sizes.  Raises ConfigError."""
    kv_dtype = choose_kv_dtype(requested.kv_dtype, target.dtype)
    return resolve(
        requested,
        model_facts(requested, config, target),
        device=target.kind,
        dtype=target.dtype,
        kv_dtype=kv_dtype,
        attention="",
        memory=memory_plan(requested, config, target),
        threads=1,
    )


def model_facts(requested: EngineConfig, config: ModelConfig, target: TargetDevice) -> ModelFacts:
    return facts_of(
        config,
        choose_kv_dtype(requested.kv_dtype, target.dtype),
        requested.max_model_len,
        dtype=target.dtype,
        state_dtype=requested.state_dtype,
    )


def packs_for(query: FitQuery, dtype: DTypeName) -> Packs:
    """Which packed weights the device would multiply, as CheckpointLayers.open."""
    if query.card:
        return dtype != "float32"
    return packs_of(choose_device(query.config.device), DTYPES[dtype])


def _layers(query: FitQuery, dtype: DTypeName, config: ModelConfig) -> CheckpointLayers:
    """As layers_of; of a download that is not complete, by config.json alone."""
    packs = packs_for(query, dtype)
    try:
        layers = layers_of(query.config, packs=packs, config=config)
    except ModelError:
        if not query.downloaded:
            raise
        without = replace(query.config, load_format="dummy")
        layers = layers_of(without, packs=packs, config=config)
    if layers.checkpoint is None and config.whole is not None:
        check_division(layers, config)
    return layers


def rank_config(requested: EngineConfig, whole: ModelConfig) -> ModelConfig:
    """What rank 0 has of a model.  Raises ModelError if it cannot be divided so."""
    return sharded_config(
        whole, 0, requested.tensor_parallel, expert_parallel=requested.expert_parallel
    )


def least_ranks(query: FitQuery, whole: ModelConfig) -> int:
    """No fewer devices hold the weights: among N each has at least an N-th of them.

    Raises ConfigError or ModelError for what is wrong with any number of them.
    """
    requested = replace(query.config, tensor_parallel=1)
    target = target_device(replace(query, config=requested), whole)
    check(requested, model_facts(requested, whole, target), requested.attention, None)
    weights = weight_bytes(whole, DTYPES[target.dtype], target.scheme_of)
    return math.ceil(weights / max(1.0, target.free * requested.gpu_memory))


def with_ranks(
    query: FitQuery, whole: ModelConfig, ranks: int
) -> ResolvedConfig | ConfigError | ModelError:
    """The configuration with so many ranks; ModelError if the model cannot be divided so,
    ConfigError if it does not fit."""
    requested = replace(query.config, tensor_parallel=ranks)
    try:
        config = rank_config(requested, whole)
        target = target_device(replace(query, config=requested), config)
        return resolve_config(requested, config, target)
    except (ConfigError, ModelError) as error:
        return error
