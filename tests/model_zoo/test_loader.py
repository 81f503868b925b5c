"""What the loader takes and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged import PagedRow
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_checkpoint

from model_zoo.config import ModelError, read_config
from model_zoo.loader import load_model

CPU = torch.device("cpu")


def load(directory: Path, **options: object):
    config = read_config(directory)
    return load_model(config, directory, dtype=torch.float32, device=CPU, **options)


def change(directory: Path, edit) -> None:
    """Rewrite a checkpoint after `edit` changed its tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_shards_load_like_one_file(tmp_path: Path):
    write_checkpoint("qwen2", tmp_path / "one")
    write_checkpoint("qwen2", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    tokens = torch.arange(30)
    config = read_config(tmp_path / "one")
    one, many = (
        PagedRow(load(tmp_path / name), config, torch.float32).feed(tokens)
        for name in ("one", "many")
    )
    assert torch.equal(one, many)


def test_progress_ends_near_the_size_of_the_files(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, progress=lambda *report: seen.append(report))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    phase, done, total = seen[-1]
    assert phase == "weights" and 0.9 * total < done <= total


def test_a_missing_tensor_is_named(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    change(tmp_path, lambda tensors: tensors.update(strange=torch.zeros(2)))
    with pytest.raises(ModelError, match="tensor strange is unexpected"):
        load(tmp_path)


def test_a_wrong_shape_is_named(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[7\].*\[64\]"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path):
    write_checkpoint("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path):
    write_checkpoint("gpt2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*can run code.*safetensors"):
        load(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path):
    write_checkpoint("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gone.safetensors", "../outside.safetensors"])
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: str):
    directory = tmp_path / "model"
    write_checkpoint("gpt2", directory)
    (tmp_path / "outside.safetensors").write_bytes(b"")
    index = {"weight_map": {"transformer.wte.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names files that are not there"):
        load(directory)
