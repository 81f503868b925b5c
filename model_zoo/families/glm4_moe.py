"""Reads config.json of GLM-4.5, 4.5-Air, 4.6 and 4.7.  Imports no torch."""

from __future__ import annotations

from model_zoo.families.model_config import ModelConfig, read_eos_ids, read_heads
from model_zoo.json_fields import Fields
from model_zoo.moe_config import MoEConfig, RouterConfig, read_num_experts, read_top_k
from model_zoo.rope_config import RopeConfig, read_rope

# Of the architecture, where config.json has no such field.
NORM_EPS, TOP_K, PARTIAL = 1e-5, 8, 0.5
EXPERTS = "n_routed_experts"


def read_glm4_moe(fields: Fields, dtype: str) -> ModelConfig:
    """Half of a head is rotated, and some sizes have q/k norms."""
    heads = read_heads(fields)
    num_layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    rope, max_position = _rope(fields, heads.head_dim)
    further = fields.get("num_nextn_predict_layers")
    fields.choice("hidden_act", ("silu",), "silu")
    return ModelConfig(
        model_type="glm4_moe",
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
        qkv_bias=fields.flag("attention_bias", False),
        out_bias=False,
        mlp_bias=False,
        qk_norm=fields.flag("use_qk_norm", False),
        eos_ids=read_eos_ids(fields, vocab_size),
        moe=_experts(fields, num_layers),
        dtype=dtype,
        prediction_layers=fields.integer("num_nextn_predict_layers") if further else 0,
    )


def _rope(fields: Fields, head_dim: int) -> tuple[RopeConfig, int]:
    """-> the rope, and the longest sequence"""
    length = fields.integer("max_position_embeddings")
    rope, max_position = read_rope(fields, length, partial=PARTIAL)
    rotated = int(head_dim * rope.partial)
    if rotated % 2 or not rotated:
        expected = f"an even number of the {head_dim} values of a head is expected"
        raise fields.error("partial_rotary_factor", rope.partial, expected)
    return rope, max_position


def _experts(fields: Fields, num_layers: int) -> MoEConfig:
    size, name = fields.integer("moe_intermediate_size"), "first_k_dense_replace"
    num_experts = read_num_experts(fields, EXPERTS)
    top_k = read_top_k(fields, EXPERTS, None, TOP_K)
    groups, kept_groups = _groups(fields, num_experts, top_k)
    dense = 1 if fields.get(name) is None else fields.get(name)
    if type(dense) is not int or not 0 <= dense <= num_layers:
        expected = f"a number of layers from 0 to {num_layers} is expected"
        raise fields.error(name, dense, expected)
    router = RouterConfig(
        num_experts=num_experts,
        top_k=top_k,
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=kept_groups,
        correction_bias=True,
    )
    return MoEConfig(
        router=router,
        intermediate_size=size,
        shared_size=size * fields.integer("n_shared_experts", 1),
        dense_layers=tuple(range(dense)),
    )


def _groups(fields: Fields, num_experts: int, top_k: int) -> tuple[int, int]:
    """-> RouterConfig.groups and kept_groups"""
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if num_experts % groups or (groups > 1 and num_experts // groups < 2):
        expected = f"groups of at least two of the {num_experts} of `{EXPERTS}` are expected"
        raise fields.error("n_group", groups, expected)
    if kept > groups or top_k > kept * (num_experts // groups):
        needed = f"at most `n_group` {groups}, with at least `num_experts_per_tok` {top_k} experts"
        raise fields.error("topk_group", kept, needed + " in them, is expected")
    return groups, kept
