"""Which fields of a config.json say that a model computes something else, and what about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What fields are about, the most telling first: the first topic with a pattern that a field's name
# has is its own.  The first pattern of a topic is of the fields that say most.
TOPICS: dict[str, tuple[str, ...]] = {
    "linear attention": (r"^linear_attn_config$|^linear_num_", r"^linear_|linear_attn"),
    "state-space layers": (
        r"^state_size$|ssm_state_size",
        r"mamba|ssm|conv_kernel|conv_dim|^d_conv|^chunk_size$",
    ),
    "latent attention": (
        r"kv_lora_rank",
        r"lora_rank|qk_nope|qk_rope|^v_head_dim|^mla_|^qk_head_dim",
    ),
    "sparse attention": (r"^index_topk$", r"^index_|^indexer|sparse_att|compress_r"),
    "mixture of experts": (
        r"^(num|n)_(local_|routed_)?experts$",
        r"expert|moe(_|$)|router|routed|routing|^n_group$|topk|first_k_dense|scoring_func|"
        r"sparse_step|mlp_only|dense_intermediate",
    ),
    "layers of several kinds": (
        r"layer_types|layers_block_type|hybrid|block_config",
        r"_interval$|_pattern$|no_rope_layer|hash_layers",
    ),
    "sliding window": (r"^sliding_window$", r"window|_chunk_size$"),
    "scale factors": (r"multiplier", r"^logits?_scal|^scale_|scaling_factor$|_scale$"),
    "attention": (
        r"soft_?cap|attn_output_gate|query_pre_attn|^(use_)?qk_norm|multi_query|_sinks?(_|$)",
        r"attn|attention|kv_heads|qk_|head_dim|clip_qkv|kv_shared",
    ),
    "positions": (r"alibi|^partial_rotary|^rotary_(pct|dim)$", r"rope|rotary|position"),
    "shape of a block": (r"parallel|^hc_|post_layernorm|sandwich|new_decoder_architecture",),
    "norms": (r"norm|_eps$|epsilon",),
    "activation": (r"_act$|activation", r"gelu|swiglu|situ|function"),
    "biases": (r"bias",),
    "sizes": (r"_size$|_dim$|^num_|^n_|^d_",),
    "other": (r"",),
}
# What a forward pass does not read, or what others than the reader of the model type judge.
HARMLESS = re.compile(
    "|".join(
        (
            # Files and libraries.
            r"^_|^(architectures|auto_map|model_type|dtype|torch_dtype|name_or_path)$",
            r"^(transformers_version|torchscript|return_dict\w*|output_\w+|tf_legacy_loss)$",
            r"^(use_cache|use_bfloat16|attn_implementation|use_flash_attn|use_mamba_kernels)$",
            r"^(fuse_\w+|residual_in_fp32|mamba_ssm_(cache_)?dtype|num_logits_to_keep)$",
            # Tokens and sampling.
            r"(^|_)token_(id|ids|index)$|^(tokenizer_class|model_max_length|prefix|language)$",
            r"^(do_sample|temperature|top_[kp]|typical_p|num_beams|num_beam_groups|early_stopping)$",
            r"^((max|min)_length|num_return_sequences|\w*_penalty|\w*no_repeat_ngram_size)$",
            # Training.
            r"dropout|pdrop|_drop$|initializer|^init_|checkpointing|_coef$|^aux_|^seq_aux",
            r"(^|_)loss($|_)|^(rescale_prenorm_residual|time_step_(min|max|floor|limit))$",
            r"^(pretraining_tp|ep_size|is_decoder|chunk_size_feed_forward|id2label|label2id)$",
            # What needs another field beside it.
            r"^(max_window_layers|original_max_position_embeddings)$",
            # Quantization, layers that predict further tokens, and what images and sounds need.
            r"^(quantization_config|compression_config|quantization)$",
            r"nextn_predict|^mtp_|_mtp(_|$)|^num_mtp",
            r"(^|_)(vision|image|video|audio|visual)(_|$)",
        )
    )
)
FACTOR = re.compile(r"multiplier|scale|scaling|factor|_pct$")


def topic_of(name: str) -> tuple[int, int]:
    """-> the index of its topic, how little it says among those of this topic"""
    return next(
        (index, place)
        for index, patterns in enumerate(TOPICS.values())
        for place, pattern in enumerate(patterns)
        if re.search(pattern, name)
    )


def changes_computation(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a field that a model type does not know has a value that asks for something."""
    value = values[name]
    if HARMLESS.search(name) or (isinstance(value, str) and value.lower() in ("", "none")):
        return False
    if value is None or value is False or value in (0, [], {}):
        return False
    if FACTOR.search(name) and value in (1, True):
        return False
    return values.get(f"use_{name}") is not False
