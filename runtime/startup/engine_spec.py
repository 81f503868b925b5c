"""EngineSpec: device, data types and attention for the requested configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from msgspec import structs
from torch import nn

from attention.backend import Backend, BackendChoice, Capacity, Shape
from attention.dispatch import Machine, build, dispatch
from attention.encoder.encoder_attention import kernel_for
from attention.kv_pool import KVPool
from attention.state_pool import StatePool
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelConfig, read_config
from model_zoo.layers.delta_net.pool import allocate_states
from model_zoo.layers.quantized_gemm.int8.cpu import Packs, packs_of
from model_zoo.loader import ModelLoader
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.parallel.sharded_config import sharded_config
from model_zoo.vision.embed import ReadsImages
from runtime.config import (
    DEFAULT_SNAPSHOT_BYTES,
    ConfigError,
    DeviceName,
    DTypeName,
    EngineConfig,
    KVDTypeName,
    ResolvedConfig,
    check,
    resolve,
)
from runtime.cuda_graph.encoder_graphs import EncoderGraphs, graph_rows
from runtime.executor.images import RowImages
from runtime.executor.protocols import DeviceExecutor, ModelProtocol
from runtime.executor.torch_executor import TorchExecutor
from runtime.memory_plan import MemoryPlan, size
from runtime.ranks.group import ALONE, Ranks
from runtime.startup.deterministic import requested_attention
from runtime.startup.device import (
    DTYPES,
    KV_DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_state_dtype,
    choose_threads,
    free_bytes,
    is_out_of_memory,
    keep_freed_memory,
)
from runtime.startup.memory_estimate import copy_bytes, facts_of, layout_of, weight_bytes

if TYPE_CHECKING:
    from runtime.cuda_graph.executor import GraphExecutor

# A GEMM of many rows is computed in tiles of TILE tokens by TILE columns, one on a multiprocessor
# at a time, and the last wave of tiles is rarely full: of an 8B model's 12,288 gates and 4,096
# hidden values on 132 multiprocessors, 1408 tokens fill 100 % and 89 % of their waves, 1536 tokens
# 97 % of both.  Sizes that fill the waves of all GEMMs take up to 9 % less time a token than
# others.
TILE = 128
FULL = 0.96  # of all waves


def full_wave_sizes(widths: tuple[int, ...], processors: int, most: int) -> tuple[int, ...]:
    """Token counts up to `most` for which GEMMs of these widths fill their waves; ascending."""
    columns = [-(-width // TILE) for width in widths]
    return tuple(
        tokens
        for tokens in range(TILE, most + 1, TILE)
        if all(_filled(tokens // TILE * count, processors) >= FULL for count in columns)
    )


def gemm_widths(config: ModelConfig) -> tuple[int, ...]:
    """Outputs of a layer's GEMMs that are computed for all tokens of a step.

    Those of experts have some of the tokens each, and fill the device at any size; `config.json`
    has an intermediate_size all the same.
    """
    if config.moe is None:
        return config.intermediate_size, config.hidden_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return qkv, config.hidden_size


def _filled(tiles: int, processors: int) -> float:
    return tiles / (-(-tiles // processors) * processors)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What is resolved of the requested configuration before memory is measured."""

    requested: EngineConfig
    config: ModelConfig
    device: torch.device
    dtype: DTypeName
    shape: Shape
    choice: BackendChoice
    threads: int
    ranks: Ranks = ALONE  # `config` is what this one has of the model

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kv_dtype(self) -> KVDTypeName:
        return choose_kv_dtype(self.requested.kv_dtype, self.dtype)

    def resolve_config(self, memory: MemoryPlan) -> ResolvedConfig:
        """The configuration with all sizes, for this plan.  Raises ConfigError."""
        resolved = resolve(
            self.requested,
            facts_of(
                self.config,
                self.kv_dtype,
                self.requested.max_model_len,
                dtype=self.dtype,
                state_dtype=self.requested.state_dtype,
            ),
            device="cuda" if self.on_gpu else "cpu",
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            attention=self.choice.backend,
            memory=memory,
            threads=self.threads,
        )
        rows, vision = self.encoder_rows, self.config.vision
        return structs.replace(
            resolved,
            full_wave_sizes=self._full_wave_sizes(resolved.max_batched_tokens),
            whole_image_tokens=rows[-1] // vision.merge_size**2 if vision and rows else 0,
        )

    @property
    def encoder_rows(self) -> tuple[int, ...]:
        """Of patches: what small images are padded to, which have CUDA graphs; empty without.

        Steps have to have graphs, and the encoder's attention to read lengths on the device.
        """
        vision = self.config.vision
        if vision is None or not self.on_gpu or self.choice.backend == "mha":
            return ()
        if kernel_for(self.device, vision.head_dim, DTYPES[self.dtype]) == "sdpa":
            return ()
        return graph_rows(vision, self.requested.max_image_pixels)

    def _full_wave_sizes(self, most: int) -> tuple[int, ...]:
        if not self.on_gpu:
            return ()
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return full_wave_sizes(gemm_widths(self.config), processors, most)

    def begin_loading(self, free: int, processes: int = 1) -> ModelLoader:
        """A loader that has allocated the weights.  Raises ConfigError if `free` is too little.

        processes: of a CPU, that take as much memory each
        """
        # Host memory is overcommitted: a process that uses too much is killed later.
        if not self.on_gpu and self.loaded_bytes() * processes > free:
            raise self._too_heavy(free, processes)
        try:
            return ModelLoader(
                self.config,
                Path(self.requested.model),
                dtype=DTYPES[self.dtype],
                device=self.device,
                load_format=self.requested.load_format,
                quantization=self.requested.quantization,
                communicator=self.ranks.communicator,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_heavy(free) from None

    def loaded_bytes(self) -> int:
        """Of the weights, with copies that a CPU makes of them."""
        dtype = DTYPES[self.dtype]
        copies = 0 if self.on_gpu else copy_bytes(self.config, dtype)
        packs = packs_of(self.device, dtype)
        layers = layers_of(self.requested, packs=packs, config=self.config)
        return weight_bytes(self.config, dtype, layers.scheme_of) + copies

    def _too_heavy(self, free: int, processes: int = 1) -> ConfigError:
        half = "--dtype bfloat16, " if self.dtype == "float32" else ""
        each = f" in each of {processes} processes" if processes > 1 else ""
        half += "fewer engines (--data-parallel), " if self.requested.data_parallel > 1 else ""
        return ConfigError(
            f"memory: weights in {self.dtype} take {size(self.loaded_bytes())}{each}, "
            f"{size(free)} are free on this device, and no --gpu-memory, --max-model-len or "
            f"--max-num-seqs changes that: end other programs on it, or use {half}a smaller model "
            "or another device (`wavefill plan` says what fits)"
        )

    def backend(self, resolved: ResolvedConfig) -> Backend:
        capacity = Capacity(
            rows=resolved.max_num_seqs,
            tokens=resolved.max_batched_tokens,
            row_tokens=resolved.max_tokens_per_row,
        )
        windows = {spec.window for spec in self.config.attention_specs}
        return build(self.choice, self.shape, capacity, self.device, windows=tuple(sorted(windows)))

    def kv_pool(self, pages: int, resolved: ResolvedConfig, states: int = 0) -> KVPool:
        """With the pool of recurrent states; states: how many, 0 for all that are resolved."""
        return KVPool.allocate(
            layers=layout_of(self.config, self.requested.max_model_len),
            pages=pages,
            kv_heads=self.config.num_kv_heads,
            page_size=resolved.page_size,
            head_dim=self.config.head_dim,
            dtype=self.shape.kv_dtype,
            device=self.device,
            states=self._state_pool(states or resolved.num_states),
        )

    def _state_pool(self, states: int) -> StatePool | None:
        if self.config.delta_net is None:
            return None
        return allocate_states(
            self.config.delta_net,
            states,
            dtype=DTYPES[self.dtype],
            state_dtype=choose_state_dtype(self.requested.state_dtype),
            device=self.device,
        )

    def executor(
        self, model: nn.Module, resolved: ResolvedConfig, kv: KVPool, backend: Backend
    ) -> DeviceExecutor:
        """GraphExecutor on a GPU, if the back end reads all lengths there."""
        kind: type[TorchExecutor] | type[GraphExecutor] = TorchExecutor
        if self.on_gpu and backend.reads_lengths_on_device:
            from runtime.cuda_graph.executor import GraphExecutor  # needs Triton

            kind = GraphExecutor
        images = None
        if isinstance(model, ReadsImages):
            rows = self.encoder_rows
            images = RowImages(
                EncoderGraphs(model.vision, rows, self.device) if rows else model.vision,
                token_side=resolved.image_token_side,
                num_slots=resolved.max_num_seqs,
                max_tokens=resolved.max_batched_tokens,
                device=self.device,
            )
        executor = kind(
            cast(ModelProtocol, model),
            images=images,
            resolved=resolved,
            vocab_size=self.config.vocab_size,
            kv=kv,
            backend=backend,
            device=self.device,
        )
        if not isinstance(executor, TorchExecutor):
            executor.must_capture = self.ranks.size > 1
        return executor


def resolve_engine_spec(requested: EngineConfig, ranks: Ranks = ALONE) -> EngineSpec:
    """Device, types and attention.  Raises ConfigError, ModelError or UnsupportedAttention."""
    device = choose_device(requested.device)
    threads = choose_threads(requested.threads, requested.data_parallel * ranks.size)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(requested.seed)
    whole = read_config(Path(requested.model), images=requested.max_image_pixels > 0)
    config = sharded_config(
        whole, ranks.rank, ranks.size, expert_parallel=requested.expert_parallel
    )
    dtype = choose_dtype(requested.dtype, config, device)
    if requested.calculate_kv_scales and choose_kv_dtype(requested.kv_dtype, dtype) != "fp8_e4m3":
        raise ConfigError(
            "--calculate-kv-scales is for pages of fp8, the others have no scales: add --kv-dtype "
            "fp8_e4m3, or leave it out"
        )
    shape, choice = choose_attention(requested, config, dtype, Machine.of(device))
    if config.delta_net is not None and requested.prefix_cache and not requested.snapshot_bytes:
        processes = requested.data_parallel * ranks.size
        [room] = ranks.least(free_bytes(torch.device("cpu")) // (2 * processes))
        kind: DeviceName = "cuda" if device.type == "cuda" else "cpu"
        wanted = max(1, min(DEFAULT_SNAPSHOT_BYTES[kind], room))
        requested = structs.replace(requested, snapshot_bytes=wanted)
    return EngineSpec(requested, config, device, dtype, shape, choice, threads, ranks)


def layers_of(requested: EngineConfig, *, packs: Packs, config: ModelConfig) -> CheckpointLayers:
    """How the linear layers are stored and will run, as CheckpointLayers.open.

    By the files' headers if they are there, else by config.json alone.  config: of one rank, if the
    model is divided
    """
    directory = Path(requested.model)
    checkpoint = None
    if requested.load_format != "dummy" and any(directory.glob("*.safetensors")):
        checkpoint = open_checkpoint(directory, config)
    return CheckpointLayers.open(
        directory, checkpoint, quantization=requested.quantization, packs=packs
    )


def choose_attention(
    requested: EngineConfig, config: ModelConfig, dtype: DTypeName, machine: Machine
) -> tuple[Shape, BackendChoice]:
    """The shape and back end of attention on a machine, checked against the configuration.

    Raises ConfigError or UnsupportedAttention.
    """
    kv_dtype = choose_kv_dtype(requested.kv_dtype, dtype)
    shape = Shape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=requested.page_size,
        dtype=DTYPES[dtype],
        kv_dtype=KV_DTYPES[kv_dtype],
    )
    name = requested_attention(requested, machine.capability)
    choice = dispatch(machine, name, shape, requested.split_planner)
    check(
        requested,
        facts_of(
            config,
            kv_dtype,
            requested.max_model_len,
            dtype=dtype,
            state_dtype=requested.state_dtype,
        ),
        choice.backend,
        choice.max_rows,
    )
    return shape, choice
