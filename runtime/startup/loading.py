"""Loading: from the requested configuration to an executor that has run its first steps.

On a GPU, weights are read while the kernels of a step are compiled; then the largest steps run on a
few KV pages for memory profiling, and the KV pool gets the memory that remains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attention.backend import Backend
from attention.kv_pool import KVPool
from model_zoo.config import ModelConfig
from model_zoo.kv_scales import has_kv_scales, read_kv_scales
from model_zoo.layer_report import describe_layers, slow_layers
from model_zoo.layers.delta_net.hopper.choose import choose_delta_net
from model_zoo.layers.gemm.autotune import autotune_gemms
from model_zoo.layers.moe.autotune import autotune_experts
from model_zoo.loader import ProgressCallback
from model_zoo.model import Model
from runtime.config import EngineConfig, ResolvedConfig
from runtime.executor.protocols import DeviceExecutor
from runtime.memory_plan import MemoryPlan
from runtime.messages import Ready
from runtime.precompile.pool import Compilers
from runtime.ranks.group import ALONE, Ranks
from runtime.snapshot import WavePicture
from runtime.startup.all_reduce import choose_all_reduce
from runtime.startup.calculated_scales import calculate_kv_scales
from runtime.startup.deterministic import use_deterministic_gemms
from runtime.startup.device import choose_state_dtype, free_bytes
from runtime.startup.engine_spec import EngineSpec, resolve_engine_spec
from runtime.startup.memory_estimate import cpu_memory_plan
from runtime.startup.memory_profile import MemoryProfiler, explain_out_of_memory
from runtime.startup.timeline import Timeline
from runtime.startup.warm_up import warm_up
from runtime.startup.waves import wave_planner

log = logging.getLogger("wavefill.startup")


@dataclass(frozen=True, slots=True)
class Loaded:
    executor: DeviceExecutor
    resolved: ResolvedConfig
    ready: Ready
    plan_waves: Callable[[list[int]], WavePicture | None] | None = None  # see waves.py


def load(
    requested: EngineConfig,
    progress: ProgressCallback,
    *,
    epoch: int = 0,
    timeline: Timeline | None = None,
    compilers: Compilers | None = None,
    ranks: Ranks = ALONE,
    host_free: int = 0,
) -> Loaded:
    """Load the model, size the KV pool and warm up.

    timeline: continued from the caller's last mark; compilers: used if possible, and closed.
    ranks: those that share the model, each of which calls this
    host_free: bytes that all engines of a server may take of a CPU's memory, where several start at
    the same time, of which each rank has to know; 0: this one starts alone
    Raises ConfigError, ModelError or UnsupportedAttention if the configuration cannot run here.
    """
    timeline = timeline or Timeline()
    progress("device", 0, 1)
    engine_spec = resolve_engine_spec(requested, ranks)
    if engine_spec.on_gpu:
        parts = _on_gpu(engine_spec, progress, timeline, compilers)
    else:
        parts = _on_cpu(engine_spec, progress, timeline, host_free)
    calculated = requested.calculate_kv_scales
    if requested.load_format != "dummy":
        _load_kv_scales(parts.kv, engine_spec.config, Path(requested.model))
        calculated = calculated and not has_kv_scales(requested.model)
    with explain_out_of_memory(engine_spec, parts.plan):
        progress("warm-up", 0, 1)
        if calculated:
            vocab_size = engine_spec.config.vocab_size
            calculate_kv_scales(parts.executor, parts.kv, parts.resolved, vocab_size)
        with parts.model.shortened():
            warm_up(parts.executor, parts.resolved)
        timeline.mark("warm-up")
        if parts.profiler is not None:
            progress("graphs", 0, 1)
            parts.executor.capture_startup_set()
            parts.profiler.keep_peak_memory()
            timeline.mark("graphs")
    parts.executor.graph_counts.reset()  # of the steps above
    parts.executor.image_counts.reset()
    ready = _ready(epoch, engine_spec, parts, timeline, calculated)
    return Loaded(parts.executor, parts.resolved, ready, wave_planner(engine_spec))


@dataclass(frozen=True, slots=True)
class _LoadedParts:
    """The result of loading on either kind of device."""

    model: Model
    resolved: ResolvedConfig
    executor: DeviceExecutor
    backend: Backend
    kv: KVPool
    memory: list[tuple[str, int]]
    plan: MemoryPlan
    profiler: MemoryProfiler | None = None
    all_reduce: str = ""  # how ranks add their products, for the start report
    delta_nets: str = ""  # which kernels compute gated delta nets, likewise


def _on_gpu(
    engine_spec: EngineSpec,
    progress: ProgressCallback,
    timeline: Timeline,
    compilers: Compilers | None = None,
) -> _LoadedParts:
    free = free_bytes(engine_spec.device)
    timeline.mark("device")
    progress("model", 0, 1)
    ranks = engine_spec.ranks
    loading = engine_spec.begin_loading(free)
    use_deterministic_gemms(engine_spec.requested, loading.model)
    weights = _weight_bytes(loading.model)
    share = engine_spec.requested.gpu_memory
    plan = ranks.agree(MemoryPlan(free=free, share=share, weights=weights))
    with explain_out_of_memory(engine_spec, plan):
        profiler = MemoryProfiler(plan, engine_spec, loading.model)
        timeline.mark("model")
        progress("kernels", 0, 1)
        with ranks.apart():
            profiler.compile(compilers)
        timeline.mark("kernels")
        loading.finish(progress)
        timeline.mark("weights")
        progress("gemms", 0, 1)
        close = [*autotune_experts(loading.model), *autotune_gemms(loading.model)]
        states = choose_state_dtype(engine_spec.requested.state_dtype)
        delta_nets = choose_delta_net(loading.model, states)
        profiler.choose_in_steps(close)
        for sentence in slow_layers(loading.model):
            log.warning("%s", sentence)
        tokens = engine_spec.resolve_config(plan).max_batched_tokens
        all_reduce = choose_all_reduce(engine_spec, loading.model, tokens)
        ranks.exchange("")  # the others may still load their weights
        timeline.mark("gemms")
        progress("memory", 0, 1)
    plan = ranks.agree(profiler.measure())
    resolved = engine_spec.resolve_config(plan)
    with explain_out_of_memory(engine_spec, plan):
        kv = engine_spec.kv_pool(resolved.num_pages, resolved)
    profiler.executor.use(kv)
    timeline.mark("memory")
    memory = plan.lines(kv.num_bytes, _state_bytes(kv))
    return _LoadedParts(
        loading.model,
        resolved,
        profiler.executor,
        profiler.backend,
        kv,
        memory,
        plan,
        profiler,
        all_reduce,
        delta_nets,
    )


def _on_cpu(
    engine_spec: EngineSpec, progress: ProgressCallback, timeline: Timeline, host_free: int
) -> _LoadedParts:
    timeline.mark("device")
    progress("model", 0, 1)
    [free] = engine_spec.ranks.least(free_bytes(engine_spec.device))  # before any of them loads
    engines = engine_spec.requested.data_parallel if host_free else 1
    processes = engines * engine_spec.ranks.size
    loading = engine_spec.begin_loading(host_free or free, processes)
    loading.finish(progress)
    timeline.mark("weights")
    free = free_bytes(engine_spec.device)
    if host_free:  # the other engines may not have loaded their weights yet
        free = min(free, max(0, host_free - processes * engine_spec.loaded_bytes()))
    [free] = engine_spec.ranks.least(free)
    plan = cpu_memory_plan(engine_spec.requested, free // engine_spec.ranks.size)
    resolved = engine_spec.resolve_config(plan)
    all_reduce = choose_all_reduce(engine_spec, loading.model, resolved.max_batched_tokens)
    kv = engine_spec.kv_pool(resolved.num_pages, resolved)
    backend = engine_spec.backend(resolved)
    executor = engine_spec.executor(loading.model, resolved, kv, backend)
    memory = [("weights", _weight_bytes(loading.model)), ("KV", kv.num_bytes)]
    memory += [("states", _state_bytes(kv))] if kv.states is not None else []
    parts = loading.model, resolved, executor, backend, kv, memory, plan
    return _LoadedParts(*parts, all_reduce=all_reduce)


def _ready(
    epoch: int, engine_spec: EngineSpec, parts: _LoadedParts, timeline: Timeline, calculated: bool
) -> Ready:
    """The engine's description for its clients; calculated: scales of keys and values are."""
    config, resolved, sizes = engine_spec.config, parts.resolved, dict(parts.memory)
    return Ready(
        epoch=epoch,
        model_type=config.model_type,
        device=_device_name(engine_spec.device, engine_spec.ranks.size),
        dtype=resolved.dtype,
        attention=_attention(resolved, parts.backend, calculated),
        vocab_size=config.vocab_size,
        max_model_len=resolved.max_model_len,
        page_size=resolved.page_size,
        num_pages=resolved.num_pages,
        max_num_seqs=resolved.max_num_seqs,
        max_batched_tokens=resolved.max_batched_tokens,
        weight_bytes=sizes["weights"],
        kv_bytes=sizes["KV"],
        load_seconds=timeline.seconds,  # up to here, as are the phases
        hidden_size=config.hidden_size,
        memory=parts.memory,
        phases=timeline.phases(),
        layers=describe_layers(parts.model),
        group_windows=resolved.group_windows,
        num_states=resolved.num_states,
        text_part=config.text_part,
        num_snapshots=resolved.num_snapshots,
        reads_images=bool(resolved.image_token_side),
        ranks=engine_spec.ranks.size,
        encoder_costs=resolved.encoder_stages,
        all_reduce=parts.all_reduce,
        delta_nets=parts.delta_nets,
    )


def _attention(resolved: ResolvedConfig, backend: Backend, calculated: bool) -> str:
    """For the start report: the back end, its kernels, and what its pages hold."""
    pages = "" if resolved.kv_dtype == resolved.dtype else f", pages {resolved.kv_dtype}"
    pages += " with calculated scales" if calculated else ""
    return f"{backend.name} ({backend.details}{pages})"


def _device_name(device: torch.device, ranks: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name if ranks == 1 else f"{ranks} x {name}"


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters, buffers and tensors derived from them (packed weights), each once."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def _state_bytes(kv: KVPool) -> int:
    return 0 if kv.states is None else kv.states.num_bytes


def _load_kv_scales(kv: KVPool, config: ModelConfig, directory: Path) -> None:
    """Load the scales of fp8 pages from the checkpoint; they are 1 where it has none."""
    if kv.k_scale is not None and kv.v_scale is not None:
        k_scale, v_scale = read_kv_scales(directory, config)
        kv.k_scale.copy_(k_scale)
        kv.v_scale.copy_(v_scale)
