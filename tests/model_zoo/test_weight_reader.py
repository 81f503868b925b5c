"""Reading weights for a GPU: threads, staging buffers, chunks.  A CPU takes that path here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelError, read_config
from model_zoo.registry import build
from model_zoo.staging import Parameter
from model_zoo.weight_reader import WeightChunk, WeightReader, WeightTarget, weight_chunks
from model_zoo.weight_targets import WeightTargets
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def targets_of(places: dict[str, Tensor], directory: Path) -> list[WeightTarget]:
    sources = Checkpoint.open(directory).sources
    return [WeightTarget(source, Parameter(places[name])) for name, source in sources.items()]


def read(
    places: dict[str, Tensor], directory: Path, *, threads: int = 3, chunk_bytes: int = 96
) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    device = next(iter(places.values())).device
    reading = WeightReader(
        targets_of(places, directory), device, threads=threads, chunk_bytes=chunk_bytes
    )
    reading.finish(lambda done, total: seen.append((done, total)))
    return seen


def made_up(directory: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of every type and odd sizes in two files, and what they hold."""
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    shapes = [(7, 5), (1,), (33,), (3, 1, 2), (64, 64), (0, 4), (5, 200)]
    tensors = {
        f"{dtype}.{shape}": torch.randn(shape).to(dtype) for dtype in dtypes for shape in shapes
    }
    names = sorted(tensors, key=lambda name: random.Random(name).random())
    directory.mkdir()
    save_file({name: tensors[name] for name in names[::2]}, directory / "b.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, directory / "a.safetensors")
    return tensors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_bytes", [8, 96, 8 << 20])
def test_every_tensor_is_loaded_whole_into_its_parameter_and_dtype(
    tmp_path: Path, device: str, dtype: torch.dtype, chunk_bytes: int
):
    tensors = made_up(tmp_path / "model")
    places = {n: torch.full_like(t, 9, dtype=dtype, device=device) for n, t in tensors.items()}
    read(places, tmp_path / "model", chunk_bytes=chunk_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(places[name].cpu(), tensor.to(dtype)), name


@pytest.mark.parametrize("device", DEVICES)
def test_places_may_be_parts_of_others_and_turned_round(tmp_path: Path, device: str):
    tensors = {"q": torch.randn(6, 4), "k": torch.randn(2, 4), "turned": torch.randn(4, 9)}
    save_file(tensors, tmp_path / "model.safetensors")
    fused = torch.zeros(8, 4, device=device)
    turned = torch.zeros(9, 4, device=device)
    read({"q": fused[:6], "k": fused[6:], "turned": turned.T}, tmp_path)
    assert torch.equal(fused.cpu(), torch.cat([tensors["q"], tensors["k"]]))
    assert torch.equal(turned.cpu(), tensors["turned"].T)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_model_is_filled_as_by_the_plain_way(tmp_path: Path, kind: str, device: str):
    write_checkpoint(kind, tmp_path, max_shard_size="100KB")
    config = read_config(tmp_path)
    in_turn = load_model(config, tmp_path, dtype=torch.float16, device=CPU)
    model = build(config, torch.float16, torch.device(device))
    layers = CheckpointLayers.open(tmp_path, None, packs=False)
    checkpoint = Checkpoint.open(tmp_path)
    targets = WeightTargets(model, checkpoint, layers, tmp_path).targets
    WeightReader(targets, torch.device(device), chunk_bytes=1000).finish(lambda done, total: None)
    filled, expected = dict(model.named_parameters()), dict(in_turn.named_parameters())
    assert len(targets) == len(checkpoint.sources)
    assert all(torch.equal(filled[name].cpu(), expected[name]) for name in expected)


def test_pieces_follow_the_files_and_cover_every_byte_once(tmp_path: Path):
    tensors = made_up(tmp_path / "model")
    places = {n: torch.empty_like(t) for n, t in tensors.items()}
    work = weight_chunks(targets_of(places, tmp_path / "model"), 64)
    where = [(chunk.source.path, chunk.offset) for chunk in work]
    assert where == sorted(where)
    assert all(chunk.num_bytes <= 64 for chunk in work)
    assert sum(chunk.num_bytes for chunk in work) == sum(t.nbytes for t in tensors.values())

    def follows(first: WeightChunk, then: WeightChunk) -> bool:
        new_file = first.source.path != then.source.path
        return new_file or first.offset + first.num_bytes == then.offset

    assert all(map(follows, work, work[1:]))


def test_progress_ends_with_all_bytes(tmp_path: Path):
    tensors = made_up(tmp_path / "model")
    total = sum(tensor.nbytes for tensor in tensors.values())
    seen = read({n: torch.empty_like(t) for n, t in tensors.items()}, tmp_path / "model")
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_a_file_that_was_cut_after_its_header_was_read_is_named(tmp_path: Path):
    tensors = made_up(tmp_path / "model")
    places = {n: torch.empty_like(t) for n, t in tensors.items()}
    targets = targets_of(places, tmp_path / "model")
    path = tmp_path / "model" / "b.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    reading = WeightReader(targets, CPU)
    with pytest.raises(ModelError, match=r"b\.safetensors: tensor .*: the file ends at byte"):
        reading.finish(lambda done, total: None)


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    tensors = made_up(tmp_path / "model")
    places = {n: torch.empty_like(t) for n, t in tensors.items()}
    targets = targets_of(places, tmp_path / "model")
    (tmp_path / "model" / "a.safetensors").unlink()
    reading = WeightReader(targets, CPU)
    with pytest.raises(ModelError, match=r"a\.safetensors: cannot be read: No such file"):
        reading.finish(lambda done, total: None)
