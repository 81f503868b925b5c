"""Estimate: what a GPU's memory will go to, reckoned from the model's shape before anything runs.

Weights, and keys and values of a token, are exact.  The rest is fitted to what one start on an H100
has measured (docs/numbers.md); every start measures it anew and sizes KV by that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_zoo.config import ModelConfig
from model_zoo.registry import build
from runtime.buckets import MOST_MIXED, Buckets
from runtime.memory_plan import LIBRARY_BYTES, MemoryPlan
from runtime.sampler import PIECE

MIB = 2**20
CONTEXT_BYTES = 560 * MIB  # of a card, taken by CUDA before anything is allocated
PLANNER_BYTES = 12 * MIB  # what attention's plans and buffers take
PIECE_BYTES = 64 * PIECE  # of the sampler's own, for the rows that it draws at once
GRAPH_BYTES = MIB // 2  # of one more graph ...
GRAPH_LAYER_BYTES = MIB // 40  # ... and a layer in it


@dataclass(frozen=True, slots=True)
class Steps:
    """The sizes of steps that memory depends on."""

    tokens: int
    rows: int
    max_len: int
    page_size: int


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Exact; tied embeddings count once."""
    model = build(config, dtype, torch.device("meta"))
    return sum(parameter.nbytes for parameter in model.parameters())


def estimate(
    config: ModelConfig, dtype: torch.dtype, steps: Steps, *, free: int, share: float
) -> MemoryPlan:
    """The plan of a start on a GPU with so many bytes `free`, but for what only measuring tells."""
    pages = -(-steps.max_len // steps.page_size)
    state = steps.rows * (2 * config.vocab_size + 2 * 4 * pages) + PLANNER_BYTES
    forward = _activations(config, dtype, steps.tokens, steps.rows)
    logits = steps.rows * config.vocab_size * dtype.itemsize
    work = LIBRARY_BYTES + max(forward, 2 * logits + PIECE_BYTES)
    sizes = Buckets(steps.rows, steps.tokens).graphs()
    largest = _activations(config, dtype, min(steps.tokens, MOST_MIXED), steps.rows)
    graphs = largest + len(sizes) * (GRAPH_BYTES + GRAPH_LAYER_BYTES * config.num_layers)
    return MemoryPlan(
        free=free,
        share=share,
        weights=weight_bytes(config, dtype),
        state=state,
        work=work,
        graphs=graphs,
    )


def _activations(config: ModelConfig, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """A layer's, at their most: within the MLP or within attention; and logits of all rows."""
    mlp = 3 * config.intermediate_size
    attention = (3 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    each = 2 * config.hidden_size + max(mlp, attention)
    return dtype.itemsize * (tokens * each + rows * config.vocab_size)
