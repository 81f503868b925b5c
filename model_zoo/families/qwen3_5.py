"""Reads config.json of Qwen3.5, Qwen3.6 and Qwen3-Next.  Imports no torch.

Most layers are gated delta nets (delta_net_config.py), every fourth has attention with an output
gate.  Qwen3.5's config nests the text model in `text_config`; an export of the text model alone has
its fields at the top.
"""

from __future__ import annotations

from dataclasses import replace

from model_zoo.families.delta_net_config import read_delta_net
from model_zoo.families.model_config import (
    VISION_WEIGHTS,
    ModelConfig,
    read_dtype,
    read_eos_ids,
)
from model_zoo.json_fields import Fields
from model_zoo.moe_config import read_moe
from model_zoo.rope_config import read_rope, read_sections
from model_zoo.vision.vision_config import read_vision

NESTED = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
MODEL_TYPES = (*NESTED, *NESTED.values(), "qwen3_next")
ROTARY_FACTOR = 0.25  # of a head that rope rotates, where no field says
DEFAULT_SECTIONS = (11, 11, 10)  # of rope, for positions of images
# Of the checkpoint, which is not used: layers that predict further tokens, and, without
# `vision_config`, the image encoder.
SKIPPED = ("model.mtp.",)


def read_qwen3_5(outer: Fields, model_type: str) -> ModelConfig:
    """outer: config.json."""
    fields = outer
    if outer.get("text_config") is not None:
        fields = outer.nested("text_config")
        model_type = NESTED.get(model_type, model_type)
    elif model_type in NESTED:
        raise outer.error("text_config", None, "an object with the fields of the text model")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads", 16)
    num_kv_heads = fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", 256)
    num_layers = fields.integer("num_hidden_layers")
    vocab_size = fields.integer("vocab_size")
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads is expected"
        )
    fields.choice("hidden_act", ("silu",), "silu")
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", False, "only true is supported")
    attention_bias = fields.flag("attention_bias", False)
    rope, max_position = read_rope(
        fields, fields.integer("max_position_embeddings", 32768), partial=ROTARY_FACTOR
    )
    moe = read_moe(fields, model_type, num_layers)
    vision = None
    if fields is not outer and outer.get("vision_config") is not None:
        vision = read_vision(outer, hidden_size)
        half = int(head_dim * rope.partial) // 2
        rope = replace(rope, sections=read_sections(fields, half, DEFAULT_SECTIONS))
    inner = fields.integer("intermediate_size", None if moe is not None else 12288)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inner or moe_inner(fields),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=True,
        norm_plus_one=True,
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=False,
        attention_gate=True,
        eos_ids=tuple(
            dict.fromkeys(read_eos_ids(outer, vocab_size) + read_eos_ids(fields, vocab_size))
        ),
        moe=moe,
        dtype=read_dtype(outer, fields),
        delta_net=read_delta_net(fields, num_layers, fused=model_type == "qwen3_next"),
        text_part=fields is not outer and vision is None,
        skipped_weights=SKIPPED if vision is not None else (*SKIPPED, VISION_WEIGHTS),
        vision=vision,
    )


def moe_inner(fields: Fields) -> int:
    """The inner size of dense layers where config.json has none: no layer is dense."""
    return fields.integer("moe_intermediate_size")
