"""GLM-4.5: what its files hold beyond the layers that are served, and fields that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_zoo.config import ModelError, read_config
from model_zoo.kv_scales import read_kv_scales
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def test_the_layer_that_predicts_further_tokens_is_left_out(tmp_path: Path):
    reference = write_checkpoint("glm4-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"eh_proj.weight": torch.ones(64, 128), "self_attn.k_scale": torch.ones(1)}
    tensors |= {f"model.layers.3.{name}": value for name, value in more.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    assert config.num_layers == 3 and config.prediction_layers == 1
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (20,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    logits = PagedRow(model, config, torch.float32).feed(tokens)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert read_kv_scales(tmp_path, config)[0].shape == (3, config.num_kv_heads)


def test_a_layer_after_those_that_config_json_describes_is_refused(tmp_path: Path):
    write_checkpoint("glm4-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load_model(read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 4}, "`n_group` is 4: groups of at least two of the 6"),
        ({"n_group": 3, "topk_group": 4}, "`topk_group` is 4: at most `n_group` 3"),
        ({"n_group": 3, "num_experts_per_tok": 3}, "`topk_group` is 1: .* 3 experts in them"),
        ({"first_k_dense_replace": 4}, "`first_k_dense_replace` is 4: .* from 0 to 3"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "`rope_parameters.* at most 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "`partial_rotary_factor` is 0.3: an"),
    ],
)
def test_fields_that_do_not_fit_one_another_are_named(
    changes: dict[str, object], words: str, tmp_path: Path
):
    write_checkpoint("glm4-moe", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=words):
        read_config(tmp_path)


def test_a_dense_layer_and_one_with_experts_are_compiled(tmp_path: Path):
    write_checkpoint("glm4-moe", tmp_path)
    model = load_model(read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    with model.shortened():
        kinds = [type(layer.mlp).__name__ for layer in model.layers]
    assert kinds == ["SwigluMLP", "MoE", "MoE"]
