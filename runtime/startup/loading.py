"""Loading: from the operator's wish to an executor that has run its first step.

On a GPU, weights are read while the kernels of a step are compiled; then the largest steps are run
on a few pages, and keys and values get the memory that is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attention.backend import Backend
from attention.kv_pool import KVPool
from model_zoo.config import ModelConfig
from model_zoo.kv_scales import read_kv_scales
from model_zoo.layers.gemm.autotune import autotune_gemms
from model_zoo.loader import ProgressCallback
from model_zoo.model import Model
from runtime.config import EngineConfig, ResolvedConfig
from runtime.executor.torch_executor import ModelRunner
from runtime.memory_plan import MemoryPlan
from runtime.messages import Ready
from runtime.precompile.pool import Compilers
from runtime.startup.deterministic import use_deterministic_gemms
from runtime.startup.device import free_bytes
from runtime.startup.engine_spec import EngineSpec, resolve_engine_spec
from runtime.startup.memory_estimate import cpu_memory_plan
from runtime.startup.memory_profile import MemoryProfiler, explain_out_of_memory
from runtime.startup.timeline import Timeline
from runtime.startup.warm_up import warm_up


@dataclass(frozen=True, slots=True)
class Loaded:
    executor: ModelRunner
    resolved: ResolvedConfig
    ready: Ready


def load(
    requested: EngineConfig,
    progress: ProgressCallback,
    *,
    epoch: int = 0,
    timeline: Timeline | None = None,
    compilers: Compilers | None = None,
) -> Loaded:
    """Load the model, size the KV pool and warm up.

    timeline: goes on from what its owner has marked; compilers: may be used, and closed.
    Raises ConfigError, ModelError or UnsupportedAttention if the wish cannot be met here.
    """
    timeline = timeline or Timeline()
    engine_spec = resolve_engine_spec(requested)
    if engine_spec.on_gpu:
        made = _on_gpu(engine_spec, progress, timeline, compilers)
    else:
        made = _on_cpu(engine_spec, progress, timeline)
    if requested.load_format != "dummy":
        _take_scales(made.kv, engine_spec.config, Path(requested.model))
    with explain_out_of_memory(engine_spec, made.plan):
        progress("warm-up", 0, 1)
        with made.model.shortened():
            warm_up(made.runner, made.resolved)
        timeline.mark("warm-up")
        if made.profiler is not None:
            progress("graphs", 0, 1)
            if made.runner.steps is not None:
                made.runner.steps.graphs.capture_startup_set()
            made.profiler.keep_peak_memory()
            timeline.mark("graphs")
    return Loaded(made.runner, made.resolved, _ready(epoch, engine_spec, made, timeline))


@dataclass(frozen=True, slots=True)
class _LoadedParts:
    """What both kinds of device end with."""

    model: Model
    resolved: ResolvedConfig
    runner: ModelRunner
    backend: Backend
    kv: KVPool
    memory: list[tuple[str, int]]
    plan: MemoryPlan
    profiler: MemoryProfiler | None = None


def _on_gpu(
    engine_spec: EngineSpec,
    progress: ProgressCallback,
    timeline: Timeline,
    compilers: Compilers | None = None,
) -> _LoadedParts:
    free = free_bytes(engine_spec.device)
    timeline.mark("device")
    loading = engine_spec.begin_loading(free)
    use_deterministic_gemms(engine_spec.requested, loading.model)
    plan = MemoryPlan(
        free=free, share=engine_spec.requested.gpu_memory, weights=_weight_bytes(loading.model)
    )
    with explain_out_of_memory(engine_spec, plan):
        profiler = MemoryProfiler(plan, engine_spec, loading.model)
        timeline.mark("model")
        progress("kernels", 0, 1)
        profiler.compile(compilers)
        timeline.mark("kernels")
        loading.finish(progress)
        timeline.mark("weights")
        progress("products", 0, 1)
        autotune_gemms(loading.model)
        timeline.mark("products")
        progress("memory", 0, 1)
    plan = profiler.measure()
    resolved = engine_spec.resolve_config(plan)
    with explain_out_of_memory(engine_spec, plan):
        kv = engine_spec.kv_pool(resolved.num_pages, resolved)
    profiler.runner.use(kv)
    timeline.mark("memory")
    memory = plan.lines(kv.num_bytes)
    return _LoadedParts(
        loading.model, resolved, profiler.runner, profiler.backend, kv, memory, plan, profiler
    )


def _on_cpu(
    engine_spec: EngineSpec, progress: ProgressCallback, timeline: Timeline
) -> _LoadedParts:
    timeline.mark("device")
    loading = engine_spec.begin_loading(free_bytes(engine_spec.device))
    loading.finish(progress)
    timeline.mark("weights")
    plan = cpu_memory_plan(engine_spec.requested, free_bytes(engine_spec.device))
    resolved = engine_spec.resolve_config(plan)
    kv = engine_spec.kv_pool(resolved.num_pages, resolved)
    backend = engine_spec.backend(resolved)
    runner = engine_spec.runner(loading.model, resolved, kv, backend)
    memory = [("weights", _weight_bytes(loading.model)), ("KV", kv.num_bytes)]
    return _LoadedParts(loading.model, resolved, runner, backend, kv, memory, plan)


def _ready(epoch: int, engine_spec: EngineSpec, made: _LoadedParts, timeline: Timeline) -> Ready:
    """What the clients are told of the engine."""
    config, resolved, sizes = engine_spec.config, made.resolved, dict(made.memory)
    return Ready(
        epoch=epoch,
        model_type=config.model_type,
        device=_device_name(engine_spec.device),
        dtype=resolved.dtype,
        attention=_attention(resolved, made.backend),
        vocab_size=config.vocab_size,
        max_model_len=resolved.max_model_len,
        page_size=resolved.page_size,
        num_pages=resolved.num_pages,
        max_num_seqs=resolved.max_num_seqs,
        max_batched_tokens=resolved.max_batched_tokens,
        weight_bytes=sizes["weights"],
        kv_bytes=sizes["KV"],
        load_seconds=timeline.seconds,  # so far, as are the phases
        hidden_size=config.hidden_size,
        memory=made.memory,
        phases=timeline.phases(),
    )


def _attention(resolved: ResolvedConfig, backend: Backend) -> str:
    """For the start report: the back end, its kernels, and what its pages hold."""
    pages = "" if resolved.kv_dtype == resolved.dtype else f", pages {resolved.kv_dtype}"
    return f"{backend.name} ({backend.details}{pages})"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _weight_bytes(model: nn.Module) -> int:
    """Of parameters, buffers and what layers made of them (packed weights), each counted once."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def _take_scales(kv: KVPool, config: ModelConfig, directory: Path) -> None:
    """Of fp8 pages: what the checkpoint says; they are 1 where it says nothing."""
    if kv.k_scale is not None and kv.v_scale is not None:
        k_scale, v_scale = read_kv_scales(directory, config)
        kv.k_scale.copy_(k_scale)
        kv.v_scale.copy_(v_scale)
