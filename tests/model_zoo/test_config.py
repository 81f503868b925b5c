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
        ({"model_type": "mistral", "sliding_window": 1024}, 1024),
        ({"model_type": "mistral", "sliding_window": None}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, 1024),
    ],
)
def test_the_longest_sequence_is_the_one_computed_as_trained(
    tmp_path: Path, changes: dict[str, object], length: int
):
    assert read_config(write(tmp_path, **changes)).max_position == length


def test_end_tokens_come_from_both_files_once_each(tmp_path: Path):
    write(tmp_path, eos_token_id=[2, 7])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).eos_ids == (7, 9, 2)


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path):
    assert read_config(write(tmp_path)).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported: this version serves qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"\(awq\) is not supported"),
        ({"hidden_size": "64"}, "hidden_size is '64': a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], words: str
):
    with pytest.raises(ModelError, match=words) as caught:
        read_config(write(tmp_path, **changes))
    assert "config.json" in str(caught.value)


def test_a_directory_without_config_says_what_to_give(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no such file: give a directory that holds config\.json"):
        read_config(tmp_path)


def test_broken_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        read_config(tmp_path)
