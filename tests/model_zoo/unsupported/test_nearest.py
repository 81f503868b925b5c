"""Reading a config.json as another type, and the names of tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_zoo.config import read_config
from model_zoo.json_fields import Fields
from model_zoo.unsupported.nearest import TensorDifferences
from model_zoo.unsupported.reading import read, text_fields
from model_zoo.unsupported.tensor_names import names_in, names_of_type
from tests.support.models.tiny_checkpoints import KINDS, write_checkpoint
from tests.support.quantization.gpt_oss_model import write_gpt_oss

GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 100}


@pytest.mark.parametrize("kind", KINDS)
def test_a_supported_model_does_not_differ_from_its_own_type(tmp_path: Path, kind: str):
    write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path, images=False)  # text models alone are compared
    reading = read(Fields.read(tmp_path / "config.json"), config.model_type)
    assert (reading.refused, reading.missing) == ([], [])
    found = TensorDifferences.of(names_in(tmp_path), names_of_type(config))
    assert (found.lacked, found.absent) == (frozenset(), frozenset())
    assert found.common


def test_codes_and_scales_of_all_experts_count_as_their_weight(tmp_path: Path):
    write_gpt_oss(tmp_path)
    found = TensorDifferences.of(names_in(tmp_path), names_of_type(read_config(tmp_path)))
    assert (found.lacked, found.absent) == (frozenset(), frozenset())
    assert "model.layers.*.mlp.experts.gate_up_proj" in found.common


def test_what_a_type_needs_and_refuses_is_noted_once(tmp_path: Path):
    fields = {**GPT2, "activation_function": "relu", "add_cross_attention": True}
    as_gpt2 = read(Fields(tmp_path / "config.json", fields), "gpt2")
    assert sorted(as_gpt2.refused) == ["activation_function", "add_cross_attention"]
    assert as_gpt2.missing == []
    as_llama = read(Fields(tmp_path / "config.json", fields), "llama")
    assert as_llama.refused == []
    assert set(as_llama.missing) == {
        *("hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_hidden_layers"),
    }
    assert as_llama.config is not None and "activation_function" not in as_llama.asked


def test_reading_changes_no_value_of_the_file(tmp_path: Path):
    values = {**GPT2, "activation_function": "relu", "eos_token_id": "wrong"}
    before = json.dumps(values)
    read(Fields(tmp_path / "config.json", values), "llama")
    assert json.dumps(values) == before


def test_the_outer_config_decides_whether_the_head_is_tied(tmp_path: Path):
    values = {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}
    text, name = text_fields(Fields(tmp_path / "config.json", values))
    assert (text.values, name) == ({"tie_word_embeddings": True}, "text_config")


def index(directory: Path, *names: str) -> Path:
    weight_map = dict.fromkeys(names, "model-1.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_the_index_names_tensors_of_files_that_are_not_downloaded(tmp_path: Path):
    layers = [
        f"model.layers.{layer}.mlp.experts.{n}.w1.weight" for layer in (0, 11) for n in (0, 9)
    ]
    assert names_in(index(tmp_path, *layers)) == {"model.layers.*.mlp.experts.*.w1.weight"}


def test_the_tensors_of_a_quantized_layer_count_as_its_weight(tmp_path: Path):
    stored = ("q.qweight", "q.qzeros", "q.scales", "k.weight", "k.weight_scale_inv", "k.bias")
    layer = "model.layers.0.self_attn"
    index(tmp_path, *(f"{layer}.{name}" for name in stored), f"{layer}.k_scale")
    expected = {"q.weight", "k.weight", "k.bias"}
    assert names_in(tmp_path) == {f"model.layers.*.self_attn.{name}" for name in expected}


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ("language_model.model.layers.0.a.weight", "model.layers.*.a.weight"),
        ("model.language_model.layers.0.a.weight", "model.layers.*.a.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_only_the_text_model_of_one_that_sees_is_compared(tmp_path: Path, stored: str, text: str):
    others = ("model.visual.blocks.0.a.weight", "vision_tower.a.weight", "mtp.layers.0.a.weight")
    assert names_in(index(tmp_path, stored, *others)) == {text}


@pytest.mark.parametrize("text", ["", "[", "[]", '{"weight_map": 5}', "[" * 100_000])
def test_a_damaged_index_or_file_is_no_error(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert names_in(tmp_path) == frozenset()
