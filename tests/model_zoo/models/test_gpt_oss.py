"""gpt-oss: experts in MXFP4, and what its config.json leaves to the architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelError, read_config
from model_zoo.layers.moe.run import run_experts
from model_zoo.registry import build
from model_zoo.weight_reader import WeightReader, read_in_turn
from model_zoo.weight_targets import WeightTargets
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.gpt_oss_model import write_gpt_oss

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts"


def test_logits_on_a_cpu_are_those_of_the_dequantized_weights(tmp_path: Path):
    reference = write_gpt_oss(tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (40,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    logits = PagedRow(model, config, torch.float32).feed_in_steps(tokens, [29, 30])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("in_turn", [True, False])
def test_packed_experts_give_what_transformers_gives(in_turn: bool, tmp_path: Path):
    """Packed as on a GPU, of columns that fill no block of 128, by the kernels interpreted."""
    reference = write_gpt_oss(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    layers = CheckpointLayers.open(tmp_path, checkpoint, packs=True)
    model = build(read_config(tmp_path), torch.float16, CPU, layers.scheme_of)
    targets = WeightTargets(model, checkpoint, layers, tmp_path).targets
    if in_turn:
        read_in_turn(targets, lambda done, total: None)
    else:
        WeightReader(targets, CPU, chunk_bytes=5000).finish(lambda done, total: None)
    experts = model.experts()[1]
    assert experts.gate_up.packed is not None and experts.down.packed is not None
    x = torch.randn(3, 96) / 4
    ids = torch.tensor([[0, 3], [2, 3], [1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]])
    module = reference.get_submodule("model.layers.1.mlp.experts")
    with torch.inference_mode():
        expected: Tensor = module(x, ids.long(), weights)
    y = run_experts(experts, x.half(), ids, weights).float()
    assert (y - expected).norm() <= 2e-3 * expected.norm()


def change(directory: Path, name: str, value: Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), directory / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
        ("down_proj_blocks", torch.zeros(3, 96, 5, 16, dtype=torch.uint8), r"\[3, 96, 5, 16\]"),
        ("down_proj_scales", torch.zeros(4, 96, 4, dtype=torch.uint8), r"\[96, 4\]"),
        ("down_proj_bias", None, "missing: model.layers.0.mlp.experts.down_proj_bias"),
    ],
)
def test_a_wrong_tensor_of_the_experts_is_named(
    name: str, value: Tensor | None, words: str, tmp_path: Path
):
    write_gpt_oss(tmp_path)
    change(tmp_path, f"{EXPERTS}.{name}", value)
    with pytest.raises(ModelError, match=words):
        load_model(read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


def test_another_clamp_of_the_activation_is_refused(tmp_path: Path):
    write_gpt_oss(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"swiglu_limit": 5.0}))
    with pytest.raises(ModelError, match=r"`swiglu_limit` is 5.0: only 7.0 is supported"):
        read_config(tmp_path)


def test_windows_and_rope_that_the_config_leaves_out_are_those_of_the_architecture(tmp_path: Path):
    write_gpt_oss(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    left_out = (
        *("layer_types", "sliding_window", "head_dim", "attention_bias", "rms_norm_eps"),
        *("rope_parameters", "num_experts_per_tok", "dtype"),
    )
    path.write_text(json.dumps({n: v for n, v in values.items() if n not in left_out}))
    config = read_config(tmp_path)
    assert config.windows == (128, 0) and config.head_dim == 64 and config.norm_eps == 1e-5
    assert config.qkv_bias and config.out_bias
    assert config.rope is not None and config.rope.theta == 150_000
    assert config.rope.factor == 32 and not config.rope.truncate
    assert config.max_position == 131_072
    assert config.moe is not None and config.moe.router.top_k == 4
    assert config.dtype == "bfloat16"


def test_one_layer_with_a_window_and_one_without_are_compiled(tmp_path: Path):
    write_checkpoint("gpt-oss", tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    with model.shortened():
        windows = [layer.attention.spec.window for layer in model.layers]
    assert set(windows) == {0, 24}
    assert len(model.layers) == config.num_layers
