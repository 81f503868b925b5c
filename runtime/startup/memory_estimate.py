"""The memory plan estimated from the model's shape, before anything runs.

The sizes of weights and of KV per token are exact.  The rest of a GPU's is fitted to the
measurements of one start on an H100 (docs/lab/memory.md); every start measures it anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kv_groups import KVLayout, UnequalLayers, kv_layout
from model_zoo.config import ModelConfig, ModelError
from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.layers.delta_net.inputs import CHUNK, MAX_DECODE_TOKENS
from model_zoo.layers.linear import Linear, cpu_reorders
from model_zoo.layers.linear_factory import SchemeOf, unquantized
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from model_zoo.vision.vision_config import VisionConfig
from runtime.config import (
    IMAGE_CACHE_BYTES,
    MAX_IMAGE_PIXELS,
    DTypeName,
    EngineConfig,
    KVDTypeName,
    ModelFacts,
    StateDType,
)
from runtime.cuda_graph.buckets import MAX_MIXED, Buckets
from runtime.cuda_graph.encoder_graphs import graph_rows
from runtime.executor.image_buffers import step_bytes
from runtime.memory_plan import LIBRARY_BYTES, MemoryPlan
from runtime.startup.device import DTYPES, KV_DTYPES, choose_state_dtype

MIB = 2**20
CPU_KV_BYTES = 4 << 30  # unless --kv-tokens asks for more: other programs need memory, too
CONTEXT_BYTES = 560 * MIB  # of a GPU, taken by the CUDA context
PLANNER_BYTES = 12 * MIB  # the attention planner's plans and buffers, for each window
GRAPH_BYTES = MIB // 2  # of a further CUDA graph ...
GRAPH_LAYER_BYTES = MIB // 40  # ... and of a layer in it


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The maximum sizes of a step and of a sequence."""

    tokens: int
    rows: int
    max_len: int
    page_size: int
    num_groups: int = 1  # of layers that share a page table
    image_pixels: int = MAX_IMAGE_PIXELS  # of the largest image, if the model reads any


def layout_of(config: ModelConfig, max_model_len: int) -> KVLayout:
    """Which layers share pages; max_model_len: as requested, 0 for the model's limit.

    Raises ModelError if the layers' KV have different shapes.
    """
    try:
        return kv_layout(config.attention_specs, max_model_len or config.max_position)
    except UnequalLayers as error:
        raise ModelError(f"this {config.model_type} model cannot run: {error}") from None


def facts_of(
    config: ModelConfig,
    kv_dtype: KVDTypeName,
    max_model_len: int,
    *,
    dtype: DTypeName = "float32",
    state_dtype: StateDType = "auto",
) -> ModelFacts:
    """The facts of a model that a memory plan needs; kv_dtype is that of the KV pages.

    max_model_len, and errors, as for layout_of.  dtype, state_dtype: of activations, and as
    requested of recurrent states
    """
    layout, state_bytes = layout_of(config, max_model_len), 0
    if config.delta_net is not None:
        state = choose_state_dtype(state_dtype)
        state_bytes = config.delta_net.state_bytes(state.itemsize, DTYPES[dtype].itemsize)
    layer_bytes = 2 * config.num_kv_heads * config.head_dim * KV_DTYPES[kv_dtype].itemsize
    vision = config.vision
    return ModelFacts(
        model_type=config.model_type,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        kv_bytes_per_token=layout.depth * layer_bytes,
        group_windows=layout.windows,
        state_bytes=state_bytes,
        image_token_side=0 if vision is None else vision.token_side,
        image_token_bytes=0 if vision is None else vision.feature_size * DTYPES[dtype].itemsize,
        encoder_stages=() if vision is None else vision.stage_operations,
    )


def cpu_memory_plan(requested: EngineConfig, free: int) -> MemoryPlan:
    """The plan for a CPU with `free` bytes besides the weights: half of them, shared by the engines
    of --data-parallel, and at most 4 GiB each unless --kv-tokens asks for more."""
    free //= 2 * requested.data_parallel
    if not requested.kv_tokens:
        free = min(free, int(CPU_KV_BYTES / requested.gpu_memory))
    return MemoryPlan(free=free, share=requested.gpu_memory)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, scheme_of: SchemeOf = unquantized) -> int:
    """Bytes of a model's weights on a GPU.  Exact; tied embeddings count once."""
    model = build(config, dtype, torch.device("meta"), scheme_of)
    narrow = (each for name, each in model.named_buffers() if name.endswith("narrow_scales"))
    return sum(each.nbytes for each in (*model.parameters(), *narrow))


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """All parameters, and those that are active: multiplied for a token.

    Not active are the experts that a token does not get, and the input embeddings, of which it
    reads one row, unless they are the head, too.
    """
    model = build(config, torch.bfloat16, torch.device("meta"))
    total = active = sum(parameter.numel() for parameter in model.parameters())
    if config.moe is not None:
        router = config.moe.router
        experts = sum(p.numel() for layer in model.experts() for p in layer.parameters())
        active -= experts * (router.num_experts - router.top_k) // router.num_experts
    if not config.tie_embeddings:
        active -= config.vocab_size * config.hidden_size
    return total, active


def scratch_bytes(config: ModelConfig, dtype: torch.dtype, scheme_of: SchemeOf) -> int:
    """Bytes of the memory that quantized weights are dequantized to, one at a time.

    None for fp8 and W8A8 of int8, which a GPU multiplies as they are; one that does not multiply
    fp8 takes as much for it, too.
    """
    model = build(config, dtype, torch.device("meta"), scheme_of)
    sizes = [
        layer.outputs * layer.inputs * dtype.itemsize
        for layer in model.modules()
        if isinstance(layer, Linear) and layer.packed and _is_dequantized(layer.packed.scheme)
    ]
    return max(sizes, default=0)


def _is_dequantized(scheme: WeightScheme) -> bool:
    """Whether products of many rows dequantize such a weight first."""
    return scheme.kind != "fp8" and not scheme.multiplies_integers


def copy_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a CPU takes besides the weights: its GEMMs read packed weights, and of a tied
    embedding both layouts are kept."""
    copied = config.tie_embeddings and cpu_reorders(dtype)
    return config.vocab_size * config.hidden_size * dtype.itemsize if copied else 0


def estimate(
    config: ModelConfig,
    dtype: torch.dtype,
    steps: StepSizes,
    *,
    free: int,
    share: float,
    scheme_of: SchemeOf = unquantized,
) -> MemoryPlan:
    """The estimated plan of a start on a GPU with `free` bytes, of which `share` may be used."""
    pages = -(-steps.max_len // steps.page_size)
    windows = len({spec.window for spec in config.attention_specs})
    tables = 2 * 4 * steps.num_groups * pages
    state = steps.rows * (2 * config.vocab_size + tables) + PLANNER_BYTES * windows
    forward = _activations(config, dtype, steps.tokens, steps.rows)
    logits = steps.rows * config.vocab_size
    sampling = logits * (dtype.itemsize + 4) + logits // 8  # constrained rows: float32, and masks
    encoding = encoder_graphs = 0
    if config.vision is not None:
        state += IMAGE_CACHE_BYTES + begun_bytes(config.vision, dtype, steps.image_pixels)
        encoding = encoder_bytes(config.vision, dtype, steps.image_pixels)
        state += step_bytes(steps.tokens, config.vision.feature_size * dtype.itemsize)
        rows = graph_rows(config.vision, steps.image_pixels)
        state += encoder_input_bytes(config.vision, dtype, max(rows, default=0))
        encoder_graphs = len(rows) * (GRAPH_BYTES + GRAPH_LAYER_BYTES * config.vision.depth)
    peak = max(forward, sampling, encoding)
    activations = LIBRARY_BYTES + peak + scratch_bytes(config, dtype, scheme_of)
    sizes = Buckets(steps.rows, steps.tokens, images=config.vision is not None).graphs()
    # A start may find that larger steps need graphs, too: at the cost of a 64th of KV at most.
    graph_tokens = max(min(steps.tokens, MAX_MIXED), steps.rows)
    largest = _activations(config, dtype, graph_tokens, steps.rows)
    graphs = largest + len(sizes) * (GRAPH_BYTES + GRAPH_LAYER_BYTES * config.num_layers)
    graphs += encoder_graphs
    return MemoryPlan(
        free=free,
        share=share,
        weights=weight_bytes(config, dtype, scheme_of),
        state=state,
        activations=activations,
        graphs=graphs,
    )


def encoder_bytes(vision: VisionConfig, dtype: torch.dtype, pixels: int) -> int:
    """Peak bytes of the image encoder: where pixels are normalized in float32 and ordered by
    patches, where these get their learned positions, or in a block's attention or MLP."""
    hidden, inner, wide = vision.hidden_size, vision.intermediate_size, torch.float32.itemsize
    normalized = 3 * pixels * (2 + vision.frames) * wide
    positioned = vision.patch_values * wide + hidden * (2 * dtype.itemsize + 3 * wide)
    attention = 6 * hidden * dtype.itemsize  # the rope changes queries and keys in place
    mlp = 2 * (hidden + inner) * dtype.itemsize
    return max(normalized, pixels // vision.patch_size**2 * max(positioned, attention, mlp))


def begun_bytes(vision: VisionConfig, dtype: torch.dtype, pixels: int) -> int:
    """Bytes of an image half-way through the encoder, which are there from step to step."""
    taken = len(vision.deepstack_layers) * vision.out_size * dtype.itemsize
    patches = encoder_input_bytes(vision, dtype, pixels // vision.patch_size**2)
    return patches + pixels // vision.token_side**2 * taken


def encoder_input_bytes(vision: VisionConfig, dtype: torch.dtype, patches: int) -> int:
    """Bytes of what the encoder's blocks read of so many patches."""
    patch = vision.hidden_size * dtype.itemsize + vision.head_dim * torch.float32.itemsize
    return patches * patch


def _activations(config: ModelConfig, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Peak bytes of a layer, within its MLP or its mixer, and of the logits of all rows."""
    mlp = config.mlp_values
    queries = 4 if config.attention_gate else 3
    attention = (queries * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = tokens * max(mlp, attention) * dtype.itemsize
    if config.delta_net is not None:
        layer = max(layer, delta_net_bytes(config.delta_net, dtype, tokens, rows))
    others = tokens * 2 * config.hidden_size + rows * config.vocab_size
    return layer + others * dtype.itemsize


def delta_net_bytes(net: DeltaNetConfig, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Peak bytes of a gated delta net: projections, output, and what its kernels for prompts write
    for each other, or that for rows of few tokens in float32."""
    wide, heads = torch.float32.itemsize, net.value_heads
    both = tokens * (net.conv_dim + 2 * net.values_size) * dtype.itemsize
    chunked = (net.conv_dim + 2 * heads * CHUNK) * dtype.itemsize + 4 * heads * wide
    few = min(tokens, rows * MAX_DECODE_TOKENS) * (net.conv_dim + 2 * heads) * wide
    return both + max(tokens * chunked, few)
