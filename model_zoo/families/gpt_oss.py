"""Reads config.json of gpt-oss.  Imports no torch."""

from __future__ import annotations

from model_zoo.families.model_config import ModelConfig, read_eos_ids, read_heads, windows_of
from model_zoo.json_fields import Fields
from model_zoo.moe_config import (
    CLAMP_ALPHA,
    CLAMP_LIMIT,
    MoEConfig,
    RouterConfig,
    read_num_experts,
    read_top_k,
)
from model_zoo.rope_config import RopeConfig, read_rope

# Of the architecture, where config.json has no such field.
HEAD_DIM, WINDOW, NORM_EPS, TOP_K = 64, 128, 1e-5, 4
THETA = 150_000.0
ROPE = RopeConfig("yarn", THETA, factor=32.0, original_max_position=4096, truncate=False)
KINDS = ("sliding_attention", "full_attention")  # of the layers in turn


def read_gpt_oss(fields: Fields, dtype: str) -> ModelConfig:
    """Sinks, biases, and every other layer with a window, from the first on."""
    heads = read_heads(fields, HEAD_DIM)
    num_layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    bias = fields.flag("attention_bias", True)
    rope, max_position = _rope(fields)
    layer_types = fields.get("layer_types")
    if not isinstance(layer_types, list):
        layer_types = [KINDS[layer % 2] for layer in range(num_layers)]
    fields.choice("hidden_act", ("silu",), "silu")
    return ModelConfig(
        model_type="gpt_oss",
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", NORM_EPS),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=False,
        eos_ids=read_eos_ids(fields, vocab_size),
        moe=_experts(fields),
        dtype=dtype,
        windows=windows_of(fields, layer_types, num_layers, WINDOW),
        attention_sinks=True,
    )


def _rope(fields: Fields) -> tuple[RopeConfig, int]:
    """-> the rope, and the longest sequence"""
    length = fields.integer("max_position_embeddings")
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        return ROPE, max(length, int(ROPE.original_max_position * ROPE.factor))
    return read_rope(fields, length, theta=THETA)


def _experts(fields: Fields) -> MoEConfig:
    for name, value in (("swiglu_limit", CLAMP_LIMIT), ("swiglu_alpha", CLAMP_ALPHA)):
        fields.refuse(name, f"only {value} is supported", allowed=(None, value))
    top_k = "num_experts_per_tok"
    if fields.get(top_k) is None and fields.get("experts_per_token") is not None:
        top_k = "experts_per_token"
    router = RouterConfig(
        num_experts=read_num_experts(fields, "num_local_experts"),
        top_k=read_top_k(fields, "num_local_experts", None, TOP_K, name=top_k),
        scoring="topk_softmax",
        bias=True,
    )
    size = fields.integer("intermediate_size")
    return MoEConfig(router=router, intermediate_size=size, activation="clamped_swiglu", bias=True)
