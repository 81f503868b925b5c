"""Small random checkpoints that transformers writes, one of each kind we serve."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
GPT2_SHAPE = {
    "vocab_size": 131,
    "n_positions": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "eos_token_id": 1,
}
GEMMA_SHAPE = {**SHAPE, "tie_word_embeddings": True, "sliding_window": 24}
HYBRID_SHAPE = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
HYBRID_KINDS = ("qwen3.5", "qwen3.5-text", "qwen3.5-moe", "qwen3.5-moe-text", "qwen3-next")
VISION_KINDS = ("qwen3.5", "qwen3.5-moe")  # whose checkpoints have a vision tower, too
GEMMA_KINDS = ("gemma2", "gemma3-text", "gemma3")
MOE_KINDS = (
    "qwen3-moe",
    "qwen3-moe-some-layers",
    "qwen2-moe",
    "mixtral",
    "gpt-oss",
    "glm4-moe",
    "glm4-moe-groups",
)
KINDS = (
    "qwen3",
    "qwen3-tied",
    "qwen3-one-kv-head",
    "qwen2",
    "qwen2-tied",
    "llama2",
    "llama3",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "mistral",
    "gpt2",
    "gpt2-untied",
    "mistral-window",
    "qwen2-windows",
    *MOE_KINDS,
    *GEMMA_KINDS,
    *HYBRID_KINDS,
)


def _scaled(kind: str, **fields: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def _moe_config(kind: str):
    from transformers import (
        Glm4MoeConfig,
        GptOssConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )

    match kind:
        case "gpt-oss":  # layers with a window, and without one
            experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24}
            yarn = _scaled("yarn", factor=8.0, original_max_position_embeddings=64, truncate=False)
            layers = {"num_hidden_layers": 4, "intermediate_size": 64}
            return GptOssConfig(**{**SHAPE, **layers}, **experts, **yarn, head_dim=16)
        case "glm4-moe":
            experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            options = {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}
            return Glm4MoeConfig(**SHAPE, **experts, **options, head_dim=32)
        case "glm4-moe-groups":
            experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
            groups = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}
            layers = {"num_hidden_layers": 4, "first_k_dense_replace": 2, "norm_topk_prob": False}
            return Glm4MoeConfig(**{**SHAPE, **layers}, **experts, **groups, head_dim=16)
        case "qwen3-moe":
            experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
            return Qwen3MoeConfig(**SHAPE, **experts, head_dim=32, norm_topk_prob=True)
        case "qwen3-moe-some-layers":
            experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
            layers = {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}
            return Qwen3MoeConfig(**{**SHAPE, **layers}, **experts, head_dim=16)
        case "qwen2-moe":
            experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            return Qwen2MoeConfig(**SHAPE, **experts, shared_expert_intermediate_size=80)
        case "mixtral":
            return MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    raise ValueError(kind)


def _gemma_config(kind: str):
    from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    scale = {"head_dim": 16, "query_pre_attn_scalar": 24}
    match kind:
        case "gemma2":
            caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
            return Gemma2Config(**{**GEMMA_SHAPE, **scale, **caps, "num_hidden_layers": 4})
        case "gemma3-text":
            ropes = {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
            shape = {**GEMMA_SHAPE, **scale, "num_hidden_layers": 4, "tie_word_embeddings": False}
            return Gemma3TextConfig(**shape, rope_parameters=ropes, sliding_window_pattern=3)
        case "gemma3":  # what is left out has the class's default: heads, their size, thetas
            heads = ("num_attention_heads", "num_key_value_heads")
            text = {name: value for name, value in GEMMA_SHAPE.items() if name not in heads}
            text |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3}
            text["layer_types"].append("full_attention")
            vision = SiglipVisionConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                image_size=32, patch_size=8,
            )  # fmt: skip
            return Gemma3Config(
                text_config=text, vision_config=vision.to_dict(), mm_tokens_per_image=16,
                image_token_index=130, boi_token_index=129, eoi_token_index=128,
            )  # fmt: skip
    raise ValueError(kind)


def _hybrid_config(kind: str):
    from transformers import (
        Qwen3_5Config,
        Qwen3_5MoeConfig,
        Qwen3_5MoeTextConfig,
        Qwen3_5TextConfig,
        Qwen3NextConfig,
    )

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    experts["shared_expert_intermediate_size"] = 40
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 8,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    }  # fmt: skip
    ids = {"image_token_id": 130, "video_token_id": 129}
    ids |= {"vision_start_token_id": 128, "vision_end_token_id": 127}
    match kind:
        case "qwen3.5":  # the last layer, of which only the ends of rows are needed, has a state
            text = {**HYBRID_SHAPE, "num_hidden_layers": 5, "tie_word_embeddings": True}
            return Qwen3_5Config(
                text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
            )
        case "qwen3.5-text":
            heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
            kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
            return Qwen3_5TextConfig(**{**HYBRID_SHAPE, **heads, "layer_types": kinds})
        case "qwen3.5-moe":
            text = {**HYBRID_SHAPE, **experts}
            return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **ids)
        case "qwen3.5-moe-text":
            return Qwen3_5MoeTextConfig(**HYBRID_SHAPE, **experts, full_attention_interval=2)
        case "qwen3-next":
            heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            layers = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
            return Qwen3NextConfig(**{**HYBRID_SHAPE, **heads, **layers}, **experts)
    raise ValueError(kind)


def _config(kind: str):
    if kind in MOE_KINDS:
        return _moe_config(kind)
    if kind in GEMMA_KINDS:
        return _gemma_config(kind)
    if kind in HYBRID_KINDS:
        return _hybrid_config(kind)
    from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    match kind:
        case "qwen3":
            return Qwen3Config(**SHAPE, head_dim=32)
        case "qwen3-tied":
            return Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=16)
        case "qwen3-one-kv-head":
            heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True}
            yarn = _scaled("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
            return Qwen3Config(**{**SHAPE, **heads}, **yarn, head_dim=16)
        case "qwen2":
            return Qwen2Config(**SHAPE)
        case "qwen2-tied":
            return Qwen2Config(**{**SHAPE, "tie_word_embeddings": True, "vocab_size": 97})
        case "llama2":
            return LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, rms_norm_eps=1e-5)
        case "llama3":
            scaling = _scaled(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
            return LlamaConfig(**SHAPE, **scaling, attention_bias=True, mlp_bias=True)
        case "llama-linear":
            return LlamaConfig(**SHAPE, **_scaled("linear", factor=2.0))
        case "llama-dynamic":
            return LlamaConfig(**SHAPE, **_scaled("dynamic", factor=2.0))
        case "llama-yarn":
            scaling = _scaled("yarn", factor=4.0, original_max_position_embeddings=128)
            return LlamaConfig(**SHAPE, **scaling)
        case "mistral":
            return MistralConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=24)
        case "mistral-window":
            return MistralConfig(**SHAPE, sliding_window=32)
        case "qwen2-windows":  # of two layers; the first one has none
            windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
            return Qwen2Config(**SHAPE, **windows)
        case "gpt2":
            return GPT2Config(**GPT2_SHAPE)
        case "gpt2-untied":
            return GPT2Config(**GPT2_SHAPE, n_inner=80, tie_word_embeddings=False)
    raise ValueError(kind)


def write_checkpoint(kind: str, directory: Path, **save_options: object) -> nn.Module:
    """Write a random checkpoint of `kind` and return transformers' model of it, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(KINDS.index(kind))
    auto = AutoModelForImageTextToText if kind in VISION_KINDS else AutoModelForCausalLM
    # Some versions compute Gemma 2 by SDPA, which leaves the softcap of its scores out.
    model = auto.from_config(_config(kind), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the usual start: logits far apart
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory, **save_options)
    return model
