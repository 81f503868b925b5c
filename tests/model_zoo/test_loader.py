"""What the loader takes and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_zoo.config import ModelError, read_config
from model_zoo.layers.linear import Linear, can_reorder
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint

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


def test_experts_in_one_tensor_load_like_one_tensor_each(tmp_path: Path):
    write_checkpoint("qwen3-moe", tmp_path)
    config, tokens = read_config(tmp_path), torch.arange(30)
    assert config.moe is not None
    each = PagedRow(load(tmp_path), config, torch.float32).feed(tokens)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack(
                    [tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(8)]
                )
                for part in ("gate", "up", "down")
            }
            tensors[f"{name}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
            tensors[f"{name}.down_proj"] = parts["down"]

    change(tmp_path, stack)
    assert torch.equal(PagedRow(load(tmp_path), config, torch.float32).feed(tokens), each)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj"):
        load(tmp_path)


def test_a_missing_or_wrong_expert_is_named(tmp_path: Path):
    write_checkpoint("mixtral", tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.3"
    change(tmp_path, lambda tensors: tensors.update({f"{name}.w2.weight": torch.zeros(64, 95)}))
    with pytest.raises(ModelError, match=rf"{re.escape(name)}\.w2\.weight has shape \[64, 95\]"):
        load(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop(f"{name}.w2.weight"))
    with pytest.raises(ModelError, match=rf"missing: {re.escape(name)}\.w2\.weight"):
        load(tmp_path)


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
    with pytest.raises(ModelError, match="unexpected: strange:"):
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


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path):
    write_checkpoint("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    path.unlink()
    path.symlink_to(tmp_path / "a blob of a cache that was cleared")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: No such file"):
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
def test_an_index_names_only_files_of_its_own_folder(tmp_path: Path, name: str):
    directory = tmp_path / "model"
    write_checkpoint("gpt2", directory)
    (tmp_path / "outside.safetensors").write_bytes(b"")
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"index.json: .*{re.escape(name)}"):
        load(directory)


def test_a_missing_shard_is_named(tmp_path: Path):
    write_checkpoint("qwen2", tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"not there: {gone.name}.*not complete"):
        load(tmp_path)


def test_all_that_differs_is_named_at_once(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="qwen3", num_hidden_layers=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"missing: .*q_norm.* more") as caught:
        load(tmp_path)
    assert "unexpected" not in str(caught.value)
    config.update(model_type="llama", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\..* and 13 more"):
        load(tmp_path)


def test_a_base_model_without_its_outer_name_loads(tmp_path: Path):
    """Early GPT-2 checkpoints and embedding models are saved so; the former hold their masks."""
    write_checkpoint("gpt2", tmp_path)
    before = PagedRow(load(tmp_path), read_config(tmp_path), torch.float32).feed(torch.arange(9))
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 512, 512)
    bare["h.1.attn.bias"] = torch.ones(1, 1, 512, 512, dtype=torch.bool)
    save_file(bare, tmp_path / "model.safetensors")
    after = PagedRow(load(tmp_path), read_config(tmp_path), torch.float32).feed(torch.arange(9))
    assert torch.equal(before, after)


def renamed(directory: Path, prefix: str, head: str) -> Path:
    """The checkpoint with another place of the text model; head: of the other parts."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            text = name.removeprefix("language_model.model.")
            tensors[prefix + text if text != name else head + name] = tensors.pop(name)

    change(directory, edit)
    return directory


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("language_model.model.", ""), ("model.language_model.", "model."), ("model.", "")],
)
def test_the_text_model_is_found_in_a_model_that_sees_images(
    tmp_path: Path, prefix: str, head: str
):
    reference = write_checkpoint("gemma3", tmp_path)
    weights = load(renamed(tmp_path, prefix, head)).other_weights()
    expected = reference.model.language_model.layers[2].self_attn.k_norm.weight  # type: ignore
    assert torch.equal(weights["model.layers.2.self_attn.k_norm.weight"], expected)


def test_tensors_of_a_dtype_that_no_weight_has_are_refused(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    change(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e5m2)}))
    with pytest.raises(ModelError, match=f"{re.escape(name)} is F8_E5M2: supported are .*BF16"):
        load(tmp_path)


def test_weights_of_another_tool_in_the_same_folder_are_not_read(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_keeps_the_answer_and_frees_the_plain_weights(dtype: torch.dtype):
    torch.manual_seed(0)
    linear = Linear(48, 80, bias=True, dtype=dtype)
    with torch.no_grad():
        linear.weight.normal_()
        linear.bias.normal_()
    x = torch.randn(5, 48, dtype=dtype)
    plain = linear(x)
    packable = can_reorder(linear.weight)
    linear.prepare()
    torch.testing.assert_close(linear(x), plain)
    assert linear.weight.numel() == (0 if packable else 48 * 80)
