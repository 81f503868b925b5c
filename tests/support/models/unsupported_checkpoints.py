"""Small random checkpoints of architectures that are not supported, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
SHORT: dict[str, Any] = {
    name: TEXT[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
TEXTS: dict[str, dict[str, Any]] = {
    "cohere": TEXT,
    "deepseek_v3": TEXT | EXPERTS | LATENT,
    "falcon": SHORT,
    "gpt_neox": TEXT,
    "gptj": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "granite": TEXT | MULTIPLIERS,
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
    "nemotron": TEXT,
    "olmo2": TEXT,
    "olmo_hybrid": TEXT | LINEAR,
    "olmoe": TEXT | {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": TEXT,
    "seed_oss": TEXT | {"head_dim": 8},
    "smollm3": TEXT,
    "starcoder2": TEXT,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Models that also see, with the text model nested in `text_config`.
WITH_VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 8},
        "vision_config": VISION | {"model_type": "pixtral"},
    },
}


def write_unsupported(kind: str, directory: Path) -> Path:
    """Write config.json and weights of a kind of TEXTS or WITH_VISION; return the directory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if kind in TEXTS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TEXTS[kind]))
    else:
        config = AutoConfig.for_model(kind, **WITH_VISION[kind])
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(directory)
    return directory
