"""What a checkpoint of Qwen3.5 has beside the text model, and what it must have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_zoo.config import ModelError, read_config
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def rewrite(directory: Path, added: dict[str, torch.Tensor], *, without: str = "") -> None:
    """Add tensors to a checkpoint, and take those away whose names end like this."""
    path = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not (without and n.endswith(without))}
    save_file(tensors | added, path, metadata={"format": "pt"})


def load(directory: Path, *, images: bool = True) -> torch.nn.Module:
    return load_model(
        read_config(directory, images=images), directory, dtype=torch.float32, device=CPU
    )


def test_what_reads_images_and_predicts_further_tokens_can_be_left_out(tmp_path: Path) -> None:
    """Also where those layers are quantized, as nothing else is."""
    write_checkpoint("qwen3.5", tmp_path)
    rewrite(
        tmp_path,
        {
            "mtp.fc.weight": torch.zeros(64, 128),
            "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(256, 64),
            "mtp.layers.0.mlp.experts.3.up_proj.weight_scale_inv": torch.ones(1, 1),
            "model.visual.merger.linear_fc1.weight_packed": torch.zeros(2, 2),
        },
    )
    assert load(tmp_path, images=False)
    with pytest.raises(ModelError, match=r"unexpected: model\.visual.*: --max-image-pixels 0"):
        load(tmp_path)


def test_a_checkpoint_of_the_text_model_alone_needs_an_option(tmp_path: Path) -> None:
    write_checkpoint("qwen3.5", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "visual" not in n}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.visual.*: --max-image-pixels 0"):
        load(tmp_path)
    assert load(tmp_path, images=False)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3.5-text", tmp_path)
    rewrite(tmp_path, {"model.layers.1.linear_attn.in_proj_x.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\.linear_attn\.in_proj_x"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["linear_attn.A_log", "conv1d.weight", "self_attn.q_norm.weight"])
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint("qwen3.5-text", tmp_path)
    rewrite(tmp_path, {}, without=name)
    with pytest.raises(ModelError, match=rf"missing: model\.layers\.\d\..*{name}"):
        load(tmp_path)
