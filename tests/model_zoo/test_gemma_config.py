"""config.json of Gemma 2 and 3: what published files leave out, both forms of ropes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.kv_groups import kv_layout
from model_zoo.config import ModelConfig, ModelError, read_config
from model_zoo.registry import build
from model_zoo.rope_config import RopeConfig

# As published: of text_config, everything else has the class's default.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "eos_token_id": [1, 106],
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA_3_27B = {
    **GEMMA_3_4B,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32_768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262_144,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256_000,
}


def read(directory: Path, config: dict[str, Any], **changes: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_config(directory)


def of_text(config: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {**config, "text_config": config["text_config"] | changes}


@pytest.mark.parametrize(
    ("published", "billions"),
    [(GEMMA_3_1B, 1.0), (GEMMA_3_4B, 3.88), (GEMMA_3_27B, 27.0), (GEMMA_2_2B, 2.61)],
)
def test_published_configs_have_the_published_number_of_parameters(
    tmp_path: Path, published: dict[str, Any], billions: float
):
    model = build(read(tmp_path, published), torch.bfloat16, torch.device("meta"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("published", [GEMMA_3_1B, GEMMA_3_4B, GEMMA_3_27B, GEMMA_2_2B])
def test_every_field_is_what_transformers_reads(tmp_path: Path, published: dict[str, Any]):
    from transformers import AutoConfig

    config = read(tmp_path, published)
    reference = AutoConfig.from_pretrained(tmp_path).get_text_config()
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(config, name) == getattr(reference, name)
    assert (config.num_heads, config.num_kv_heads) == (
        reference.num_attention_heads, reference.num_key_value_heads,
    )  # fmt: skip
    assert config.max_position == reference.max_position_embeddings
    assert config.norm_eps == reference.rms_norm_eps and config.tie_embeddings
    assert config.attention_scale == reference.query_pre_attn_scalar**-0.5
    assert config.attention_softcap == (reference.attn_logit_softcapping or 0)
    assert config.logit_softcap == (reference.final_logit_softcapping or 0)
    assert config.windows == tuple(
        reference.sliding_window if kind == "sliding_attention" else 0
        for kind in reference.layer_types
    )


def test_the_ropes_of_gemma_3_4b_do_not_make_its_context_longer(tmp_path: Path):
    config = read(tmp_path, GEMMA_3_4B)
    assert config.rope == RopeConfig("linear", 1e6, 8.0) and config.local_rope == RopeConfig()
    assert config.max_position == 131_072  # which counts the factor already
    assert config.eos_ids == (1, 106) and config.dtype == "bfloat16"
    layout = kv_layout(config.attention_specs, config.max_position)
    assert set(layout.windows) == {0, 1024}


def test_both_forms_of_ropes_mean_the_same(tmp_path: Path):
    old = read(tmp_path, of_text(GEMMA_3_4B, rope_theta=2e6, rope_local_base_freq=3e4))
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    assert read(tmp_path, of_text(GEMMA_3_4B, rope_scaling=None, rope_parameters=both)) == old


def test_caps_that_are_null_are_off_and_absent_ones_have_the_default(tmp_path: Path):
    off = read(tmp_path, GEMMA_2_2B, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_softcap, off.logit_softcap) == (0, 0)
    absent = {name: value for name, value in GEMMA_2_2B.items() if "softcapping" not in name}
    default = read(tmp_path, absent)
    assert (default.attention_softcap, default.logit_softcap) == (50, 30)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GEMMA_3_4B, "text_config": None}, "`text_config` is null"),
        (of_text(GEMMA_3_4B, hidden_activation="silu"), r"`text_config\.hidden_activation` is"),
        (of_text(GEMMA_3_4B, use_bidirectional_attention=True), "bidirectional_attention` is true"),
        (of_text(GEMMA_3_4B, layer_types=["full_attention"]), "34 layers are expected"),
        ({**GEMMA_3_1B, "layer_types": ["chunked_attention"] * 26}, "`layer_types` is"),
        ({**GEMMA_3_1B, "num_key_value_heads": 3}, "`num_key_value_heads` is 3"),
        ({**GEMMA_3_1B, "head_dim": 255}, "`head_dim` is 255"),
        ({**GEMMA_3_1B, "rope_parameters": {"rope_theta": 1e4}}, "full_attention and sliding"),
        ({**GEMMA_2_2B, "final_logit_softcapping": -1}, "`final_logit_softcapping` is -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], words: str
):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, config)


def test_a_shortened_model_has_layers_with_and_without_a_window(tmp_path: Path):
    """They have kernels, plans and memory of their own."""
    model = build(read(tmp_path, GEMMA_3_1B), torch.bfloat16, torch.device("meta"))
    with model.shortened():
        windows = [layer.attention.spec.window for layer in model.layers]  # type: ignore[union-attr]
    assert windows == [512, 512, 0, 0] and len(model.layers) == 26
