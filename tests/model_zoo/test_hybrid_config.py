"""config.json of Qwen3.5, its experts, its text models and Qwen3-Next: what is read and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention.kv_groups import kv_layout
from model_zoo.config import ModelConfig, ModelError, read_config

# As published, but for tokens of images.
QWEN_3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "vocab_size": 248_320,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_5",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
# Qwen3.5-35B-A3B
SMALL = {
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}


def read(directory: Path, config: dict[str, Any], **changed: object) -> ModelConfig:
    """changed: fields of the text model; None leaves one out."""
    nested = "text_config" in config
    text = {**(config["text_config"] if nested else config), **changed}
    text = {name: value for name, value in text.items() if value is not None}
    whole = {**config, "text_config": text} if nested else text
    if nested and "hidden_size" in changed:
        whole["vision_config"] = {**config["vision_config"], "out_hidden_size": text["hidden_size"]}
    (directory / "config.json").write_text(json.dumps(whole))
    return read_config(directory)


def test_every_fourth_layer_has_keys_and_values(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_3_5_27B)
    net = config.delta_net
    assert net is not None and not net.fused
    assert config.attention_layers == tuple(range(3, 64, 4))
    assert len(net.layers) == 48 and net.layers[:4] == (0, 1, 2, 4)
    assert kv_layout(config.attention_specs, config.max_position).depth == 16
    assert config.kv_bytes_per_token(2) == 65_536
    assert (net.conv_dim, net.values_size) == (2 * 2048 + 6144, 6144)
    assert net.state_bytes(4, 2) == 48 * (48 * 128 * 128 * 4 + 4 * 10_240 * 2)


def test_the_front_of_a_head_is_rotated(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_3_5_27B)
    assert config.rope is not None
    assert (config.rope.partial, config.rope.theta, config.head_dim) == (0.25, 1e7, 256)
    assert config.attention_gate and config.norm_plus_one and config.qk_norm


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(None, None, False), (True, None, True), (False, True, True)]
)
def test_tied_embeddings_are_said_in_either_place(
    tmp_path: Path, outer: bool | None, inner: bool | None, tied: bool
) -> None:
    whole = {**QWEN_3_5_27B}
    whole.pop("tie_word_embeddings")
    if outer is not None:
        whole["tie_word_embeddings"] = outer
    assert read(tmp_path, whole, tie_word_embeddings=inner).tie_embeddings is tied


def test_an_export_of_the_text_model_has_its_fields_at_the_top(tmp_path: Path) -> None:
    nested = read(tmp_path, QWEN_3_5_27B)
    assert nested.vision is not None and not nested.text_part
    text = nested.without_vision()
    assert text.text_part and text.vision is None
    assert replace(read(tmp_path, QWEN_3_5_27B["text_config"]), text_part=True) == text


def test_positions_of_images_turn_their_shares_of_the_rotated_front(tmp_path: Path) -> None:
    nested = read(tmp_path, QWEN_3_5_27B)
    assert nested.rope is not None and nested.rope.sections == (11, 11, 10)
    assert nested.vision is not None and nested.vision.deepstack_layers == ()
    rope = {**QWEN_3_5_27B["text_config"]["rope_parameters"], "mrope_section": [24, 20, 20]}
    with pytest.raises(ModelError, match=r"mrope_section.*whose sum is 32"):
        read(tmp_path, QWEN_3_5_27B, rope_parameters=rope)


def test_experts_weights_sum_to_one_though_no_field_says_so(tmp_path: Path) -> None:
    whole = {**QWEN_3_5_27B, "model_type": "qwen3_5_moe"}
    config = read(tmp_path, whole, **SMALL, **EXPERTS, intermediate_size=None)
    assert config.moe is not None and config.moe.router.renormalize
    assert (config.moe.shared_size, config.moe.shared_gate) == (512, True)
    assert all(config.moe.has_experts(layer) for layer in range(40))
    assert config.delta_net is not None
    assert config.delta_net.state_bytes(4, 2) == round(61.875 * 2**20)


def test_qwen3_next_has_fused_projections(tmp_path: Path) -> None:
    text = {**QWEN_3_5_27B["text_config"], **SMALL, **EXPERTS, "model_type": "qwen3_next"}
    text |= {"num_hidden_layers": 48, "num_experts": 512, "norm_topk_prob": True}
    text |= {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    text.pop("num_experts_per_tok")
    config = read(tmp_path, text)
    assert config.delta_net is not None and config.delta_net.fused
    assert config.moe is not None and config.moe.router.top_k == 10
    assert config.rope is not None and config.rope.partial == 0.5


def test_layer_types_go_before_the_interval(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "full_attention"]
    config = read(tmp_path, QWEN_3_5_27B, num_hidden_layers=3, layer_types=kinds)
    assert config.attention_layers == (0, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"linear_key_head_dim": 64}, "`text_config.linear_key_head_dim` is 64: only 128"),
        ({"linear_conv_kernel_dim": 3}, "`text_config.linear_conv_kernel_dim` is 3: only 4"),
        ({"linear_num_value_heads": 40}, "is 40: a multiple of the 16 of `linear_num_key_heads`"),
        ({"layer_types": ["full_attention"]}, "64 layers are expected"),
        ({"layer_types": ["linear_attention"] * 64}, "at least one full_attention"),
        ({"layer_types": ["mamba"] * 64}, "a list of full_attention and linear_attention"),
        ({"attn_output_gate": False}, "`text_config.attn_output_gate` is false: only true"),
        ({"num_key_value_heads": 5}, "a divisor of 24 heads"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "`text_config.rope_parameters.partial_rotary_factor` is 1.5: at most 1.0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, QWEN_3_5_27B, **changed)
    assert message in str(caught.value)


def test_a_config_of_images_without_a_text_model_is_refused(tmp_path: Path) -> None:
    whole = {name: value for name, value in QWEN_3_5_27B.items() if name != "text_config"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="`text_config` is null: an object with the fields"):
        read_config(tmp_path)
