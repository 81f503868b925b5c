"""config.json, as the Hub has it, and the mistakes it may hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_zoo.config import ModelError, read_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return directory


def test_the_old_and_the_new_spelling_of_rope_mean_the_same(tmp_path: Path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert read_config(write(tmp_path, **old)) == read_config(write(tmp_path, **new))


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            16384,
        ),
        ({"model_type": "mistral", "sliding_window": 1024}, 4096),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, 32768),
    ],
)
def test_the_longest_sequence_is_the_one_computed_as_trained(
    tmp_path: Path, changes: dict[str, object], length: int
):
    assert read_config(write(tmp_path, **changes)).max_position == length


WINDOW = {"sliding_window": 1024}
KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", **WINDOW}, (1024, 1024)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "llama", **WINDOW}, ()),
        ({"model_type": "qwen3", **WINDOW, "layer_types": ["full_attention"] * 2}, ()),
        ({"model_type": "qwen3", **WINDOW, "layer_types": KINDS}, (0, 1024)),
        ({"model_type": "qwen2", **WINDOW, "use_sliding_window": False}, ()),
        ({"model_type": "qwen2", **WINDOW, "use_sliding_window": True}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (0, 4096)),
        (
            {"model_type": "qwen2", **WINDOW, "use_sliding_window": True, "max_window_layers": 0},
            (1024, 1024),
        ),
    ],
)
def test_each_layer_has_the_window_that_transformers_gives_it(
    tmp_path: Path, changes: dict[str, object], windows: tuple[int, ...]
):
    config = read_config(write(tmp_path, **changes))
    assert config.windows == windows
    assert [spec.window for spec in config.attention_specs] == list(windows or (0, 0))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "GPT2LMHeadModel"])
def test_a_model_with_a_head_or_none_but_its_embeddings_is_read(tmp_path: Path, name: str):
    assert read_config(write(tmp_path, architectures=[name])).num_layers == 2


def test_end_tokens_come_from_both_files_once_each(tmp_path: Path):
    write(tmp_path, eos_token_id=[2, 7])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).eos_ids == (7, 9, 2)


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path):
    assert read_config(write(tmp_path)).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"model_type": "mamba"},
        '`model_type` is "mamba": supported: gemma2, gemma3, gemma3_text, glm4_moe, gpt2, gpt_oss',
    ),
    ({"model_type": None}, "`model_type` is missing: take the file as the model's"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "a causal language model"),
    ({"architectures": ["Qwen2ForRewardModel"]}, "RewardModel.*: reward models .* not supported"),
    ({"architectures": ["Qwen2ForProcessRewardModel"]}, "ProcessRewardModel.*: a causal language"),
    ({"architectures": ["LlamaRewardModel"]}, "RewardModel.*: a causal language"),
    ({"hidden_size": "64"}, '`hidden_size` is "64": a positive integer'),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
    ({"vocab_size": True}, "`vocab_size` is true"),
    ({"intermediate_size": None}, "`intermediate_size` is missing"),
    ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3: a divisor of 4"),
    ({"head_dim": 15}, "`head_dim` is 15: an even number"),
    ({"head_dim": None, "num_attention_heads": 128}, "`head_dim` is 0: an even number above 0"),
    ({"hidden_act": "gelu"}, '`hidden_act` is "gelu": supported: silu'),
    ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` .*true or false"),
    ({"torch_dtype": "int8"}, '`torch_dtype` is "int8": supported: float32, bfloat16, float16'),
    ({"rms_norm_eps": "small"}, "`rms_norm_eps` .*a positive number"),
    ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is NaN: a positive number"),
    ({"eos_token_id": 100}, "`eos_token_id` is 100: ids below 100"),
    ({"eos_token_id": ["</s>"]}, "`eos_token_id`.*ids below 100"),
    ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5: only 1.0"),
    ({"rope_scaling": "linear"}, "`rope_scaling` .*a JSON object"),
    ({"rope_scaling": {"rope_type": "longrope"}}, r"`rope_scaling\.rope_type` is \"longrope\""),
    ({"rope_scaling": {"type": "linear"}}, r"`rope_scaling\.factor` is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"`rope_scaling\.factor` is 0\.5"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor` is missing"),
    ({"rope_scaling": {**YARN, "beta_fast": -1}}, r"`rope_scaling\.beta_fast` is -1"),
    ({"rope_parameters": {"full_attention": YARN}}, "`rope_parameters` .*one rope for all layers"),
    ({"layer_types": ["linear_attention"] * 2}, "`layer_types` .*full_attention"),
    ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "2 layers are expected"),
]
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}
REFUSED_GPT2: list[tuple[dict[str, object], str]] = [
    ({"n_head": 5}, "`n_head` is 5: a divisor of n_embd 64"),
    ({"activation_function": "relu"}, "`activation_function` .*gelu_new"),
    ({"scale_attn_weights": False}, "`scale_attn_weights` is false"),
    ({"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` is true"),
    ({"add_cross_attention": True}, "`add_cross_attention` is true"),
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [*REFUSED, *(({**GPT2, **changes}, words) for changes, words in REFUSED_GPT2)],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], words: str
):
    with pytest.raises(ModelError, match=words) as caught:
        read_config(write(tmp_path, **changes))
    assert "config.json" in str(caught.value)


def test_a_directory_without_config_says_what_to_give(tmp_path: Path):
    with pytest.raises(ModelError, match=r"does not exist: give a directory that holds config\."):
        read_config(tmp_path)


def test_broken_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be read as JSON: .*: download the file again"):
        read_config(tmp_path)
