"""A published model's shape, cut to a few layers, and what attention must know of a model."""

from __future__ import annotations

import torch

from attention.backend import Shape
from model_zoo.config import ModelConfig, RopeConfig

QWEN3_8B = ModelConfig(
    model_type="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=2,  # of 36
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=4096,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    tie_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=True,
    eos_ids=(151_645,),
    dtype="bfloat16",
)


def shape_of(config: ModelConfig, dtype: torch.dtype, *, page_size: int = 16) -> Shape:
    return Shape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=dtype,
    )
