"""Published shapes of models: fields of config.json.  FAMILIES is the table of docs/models.md."""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

QWEN3_DENSE: Shape = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "eos_token_id": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, Shape] = {
    "qwen3-8b": QWEN3_DENSE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": QWEN3_DENSE
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": QWEN3_DENSE
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "max_position_embeddings": 131_072,
    },
    "codellama-34b": QWEN3_DENSE
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 22_016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
}

QWEN3: Shape = SHAPES["qwen3-8b"]
QWEN3_MOE: Shape = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
LLAMA: Shape = SHAPES["llama-3.1-8b"]
MIXTRAL: Shape = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA3: Shape = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 262_208,
    "head_dim": 256,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GPT_OSS: Shape = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
GLM4_MOE: Shape = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 151_552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000,
}


def _sized(base: Shape, hidden: int, inner: int, layers: int, **fields: object) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return base | sizes | fields


def _heads(heads: int, kv_heads: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


QWEN3_5: Shape = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248_320,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
QWEN3_5_MOE = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
TIED = {"tie_word_embeddings": True}
# The image encoder of Qwen3-VL 8B and more, but for the size of its output, the text model's.
VISION: Shape = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SMALL_VISION: Shape = VISION | {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}


def _seeing(text: Shape, vision: Shape = VISION) -> Shape:
    """Qwen3-VL with this text model."""
    sections = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    longer = {"rope_theta": 5_000_000, "max_position_embeddings": 262_144}
    return {
        "model_type": "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | longer | {"rope_scaling": sections},
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
    }


FAMILIES: dict[str, Shape] = {
    "Qwen3-0.6B": _sized(QWEN3, 1024, 3072, 28, **_heads(16, 8), **TIED),
    "Qwen3-1.7B": _sized(QWEN3, 2048, 6144, 28, **_heads(16, 8), **TIED),
    "Qwen3-4B": _sized(QWEN3, 2560, 9728, 36, **TIED),
    "Qwen3-8B": QWEN3,
    "Qwen3-14B": _sized(QWEN3, 5120, 17_408, 40, **_heads(40, 8)),
    "Qwen3-32B": _sized(QWEN3, 5120, 25_600, 64, **_heads(64, 8)),
    "Qwen3-30B-A3B": _sized(QWEN3_MOE, 2048, 6144, 48, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _sized(
        QWEN3_MOE, 4096, 12_288, 94, moe_intermediate_size=1536, num_attention_heads=64
    ),
    "Qwen3-VL-2B": _seeing(_sized(QWEN3, 2048, 6144, 28, **_heads(16, 8), **TIED), SMALL_VISION),
    "Qwen3-VL-4B": _seeing(_sized(QWEN3, 2560, 9728, 36, **TIED), SMALL_VISION),
    "Qwen3-VL-8B": _seeing(QWEN3),
    "Qwen3-VL-32B": _seeing(_sized(QWEN3, 5120, 25_600, 64, **_heads(64, 8))),
    "Qwen3-VL-30B-A3B": _seeing(_sized(QWEN3_MOE, 2048, 6144, 48, moe_intermediate_size=768)),
    "Qwen3.5-27B": _sized(QWEN3_5, 5120, 17_408, 64, **_heads(24, 4), linear_num_value_heads=48),
    "Qwen3.5-35B-A3B": _sized(
        QWEN3_5_MOE,
        2048,
        512,
        40,
        **_heads(16, 2),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.5-122B-A10B": _sized(
        QWEN3_5_MOE,
        3072,
        1024,
        48,
        **_heads(32, 2),
        linear_num_value_heads=64,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "Llama 3.2 3B": _sized(LLAMA, 3072, 8192, 28, **_heads(24, 8), **TIED),
    "Llama 3.1 8B": LLAMA,
    "Llama 3.1 70B": _sized(LLAMA, 8192, 28_672, 80, **_heads(64, 8)),
    "Mixtral 8x7B": _sized(MIXTRAL, 4096, 14_336, 32, max_position_embeddings=32_768),
    "Mixtral 8x22B": _sized(
        MIXTRAL, 6144, 16_384, 56, num_attention_heads=48, max_position_embeddings=65_536
    ),
    "Gemma 3 4B": _sized(GEMMA3, 2560, 10_240, 34, **_heads(8, 4)),
    "Gemma 3 12B": _sized(GEMMA3, 3840, 15_360, 48, **_heads(16, 8)),
    "Gemma 3 27B": _sized(GEMMA3, 5376, 21_504, 62, **_heads(32, 16), head_dim=128),
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "GLM-4.5-Air": _sized(
        GLM4_MOE, 4096, 10_944, 46, moe_intermediate_size=1408, n_routed_experts=128
    ),
    "GLM-4.5, 4.6, 4.7": _sized(
        GLM4_MOE,
        5120,
        12_288,
        92,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        first_k_dense_replace=3,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
    ),
}


def slug(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-")


BY_SLUG = {slug(name): fields for name, fields in FAMILIES.items()}


def shape(name: str) -> Shape:
    """By a key of SHAPES, or of FAMILIES in lower case with hyphens: qwen3-30b-a3b.

    Raises KeyError.
    """
    return SHAPES[name] if name in SHAPES else BY_SLUG[name]
