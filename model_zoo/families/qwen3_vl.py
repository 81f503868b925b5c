"""Reads config.json of Qwen3-VL: a Qwen3 text model with an image encoder.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from model_zoo.families.model_config import ModelConfig, read_dtype, read_eos_ids
from model_zoo.json_fields import Fields
from model_zoo.rope_config import read_sections
from model_zoo.vision.vision_config import read_vision

# The model, and the type whose text model it has.
MODEL_TYPES = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
DEFAULT_SECTIONS = (24, 20, 20)
DEFAULT_DEEPSTACK = (8, 16, 24)


def read_qwen3_vl(
    outer: Fields, model_type: str, read_text: Callable[[Fields, str, str], ModelConfig]
) -> ModelConfig:
    """outer: config.json; read_text: reads the fields of a text model of a type and a dtype.

    Raises ModelError, naming the field.
    """
    for name in ("text_config", "vision_config"):
        if outer.get(name) is None:
            raise outer.error(name, None, "an object with the fields of that part is expected")
    # Of a token's experts it has no field: their shares always sum to 1.
    text = outer.nested("text_config").overridden({"norm_topk_prob": True})
    config = read_text(text, MODEL_TYPES[model_type], read_dtype(outer, text))
    assert config.rope is not None
    vision = read_vision(outer, config.hidden_size, deepstack=DEFAULT_DEEPSTACK)
    if len(vision.deepstack_layers) > config.num_layers:
        raise outer.nested("vision_config").error(
            "deepstack_visual_indexes",
            list(vision.deepstack_layers),
            f"at most one for each of the {config.num_layers} text layers is expected",
        )
    eos_ids = read_eos_ids(outer, config.vocab_size) + read_eos_ids(text, config.vocab_size)
    tied = text.flag("tie_word_embeddings", False)
    return replace(
        config,
        model_type=model_type,
        rope=replace(
            config.rope, sections=read_sections(text, config.head_dim // 2, DEFAULT_SECTIONS)
        ),
        tie_embeddings=outer.flag("tie_word_embeddings", tied),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        vision=vision,
    )
