"""Reads config.json of Qwen3-VL: a Qwen3 text model with an image encoder.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from model_zoo.families.model_config import ModelConfig, read_dtype, read_eos_ids
from model_zoo.json_fields import Fields
from model_zoo.vision.vision_config import read_vision

# The model, and the type whose text model it has.
MODEL_TYPES = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
DEFAULT_SECTIONS = [24, 20, 20]


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
    has_dtype = any(outer.get(name) is not None for name in ("dtype", "torch_dtype"))
    dtype = read_dtype(outer if has_dtype else text)
    config = read_text(text, MODEL_TYPES[model_type], dtype)
    assert config.rope is not None
    vision = read_vision(outer, config.hidden_size)
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
        rope=replace(config.rope, sections=_sections(text, config)),
        tie_embeddings=outer.flag("tie_word_embeddings", tied),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        vision=vision,
    )


def _sections(text: Fields, config: ModelConfig) -> tuple[int, int, int]:
    """RopeConfig.sections."""
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope, half = text.nested(name), config.head_dim // 2
    if not rope.flag("mrope_interleaved", True):
        raise rope.error("mrope_interleaved", False, "only true is supported")
    value = rope.get("mrope_section")
    sections = DEFAULT_SECTIONS if value is None else value
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(count) is int and count >= 0 for count in sections)
        or sum(sections) != half
    ):
        expected = f"three numbers are expected whose sum is {half}, half of head_dim"
        raise rope.error("mrope_section", value, expected)
    return sections[0], sections[1], sections[2]
