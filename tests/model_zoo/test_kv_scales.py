"""Scales of fp8 keys and values in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_zoo.config import ModelError, read_config
from model_zoo.kv_scales import is_kv_scale, read_kv_scales
from runtime.config import EngineConfig
from runtime.startup.loading import load
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_checkpoints import write_checkpoint

LAYER = "model.layers.1.self_attn"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def checkpoint(directory: Path, **scales: torch.Tensor) -> Path:
    """A model of 3 layers and 2 KV heads, with scales by their names' ends."""
    write_checkpoint("qwen3", directory)
    file = directory / "model.safetensors"
    names = {f"{LAYER}.{name.replace('__', '.')}": value for name, value in scales.items()}
    save_file(load_file(file) | names, file)
    return directory


def test_a_checkpoint_without_scales_has_scales_of_one(tmp_path: Path):
    directory = checkpoint(tmp_path)
    for scale in read_kv_scales(directory, read_config(directory)):
        assert torch.equal(scale, torch.ones(3, 2))


def test_a_scale_is_one_number_or_one_a_head(tmp_path: Path):
    directory = checkpoint(
        tmp_path, k_scale=torch.tensor(0.5), v_proj__v_scale=torch.tensor([0.25, 4.0])
    )
    k_scale, v_scale = read_kv_scales(directory, read_config(directory))
    assert k_scale.tolist() == [[1, 1], [0.5, 0.5], [1, 1]]
    assert v_scale.tolist() == [[1, 1], [0.25, 4], [1, 1]]


@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.", "language_model.model.", "language_model.", "model.", ""],
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("k_scale", 0), ("v_scale", 1), ("k_proj.k_scale", 0), ("v_proj.v_scale", 1),
        ("k_proj.output_scale", 0), ("v_proj.output_scale", 1),
    ],
)  # fmt: skip
def test_the_names_of_every_tool_are_known(tmp_path: Path, prefix: str, name: str, kind: int):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    scale = {f"{prefix}layers.1.self_attn.{name}": torch.tensor([0.5])}
    save_file(scale, tmp_path / "model.safetensors")
    scales = read_kv_scales(tmp_path, read_config(tmp_path))
    assert scales[kind].tolist() == [[1, 1], [0.5, 0.5], [1, 1]]
    assert torch.equal(scales[1 - kind], torch.ones(3, 2))


@pytest.mark.parametrize(
    "name",
    [
        "q_scale", "k_proj.v_scale", "q_proj.output_scale", "k_proj.weight_scale",
        "k_proj.input_scale",
    ],
)  # fmt: skip
def test_scales_of_weights_queries_and_inputs_are_none_of_keys_and_values(name: str):
    assert not is_kv_scale(f"{LAYER}.{name}")


def test_scales_reach_the_pages_and_change_no_other_tensor(tmp_path: Path):
    directory = checkpoint(tmp_path, k_scale=torch.tensor([0.5]), v_scale=torch.tensor([2.0]))
    plain = dict(dtype=torch.float32, device=torch.device("cpu"))
    load_model(read_config(directory), directory, **plain)
    engine_config = EngineConfig(
        model=str(directory), device="cpu", dtype="float32", kv_tokens=64, kv_dtype="fp8_e4m3",
        max_num_seqs=2,
    )  # fmt: skip
    kv = load(engine_config, lambda phase, done, total: None).executor._kv
    assert kv.k_scale is not None and kv.k_scale[:, 0].tolist() == [1, 0.5, 1]
    assert kv.v_scale is not None and kv.v_scale[:, 0].tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([1.0, 1.0, 1.0]), "has 3 values: one is expected, or 2"),
        (torch.tensor(0.0), "must be positive and finite"),
        (torch.tensor(float("inf")), "must be positive and finite"),
    ],
)
def test_a_scale_that_cannot_be_is_refused_by_name(tmp_path: Path, scale, message: str):
    directory = checkpoint(tmp_path, k_scale=scale)
    with pytest.raises(ModelError, match=rf"{LAYER}.k_scale.*{message}"):
        read_kv_scales(directory, read_config(directory))
