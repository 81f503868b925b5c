"""What one rank reads of a checkpoint, by one thread or several, and how it is packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_zoo.checkpoint import within
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import read_config
from model_zoo.layers.linear import Linear
from model_zoo.model import Model
from model_zoo.parallel.communicator import Alone
from model_zoo.parallel.shard import Shard
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.parallel.sharded_config import sharded_config
from model_zoo.registry import build
from model_zoo.weight_reader import WeightReader, read_in_turn
from model_zoo.weight_targets import WeightTargets
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.quantized_models import FORMATS, write_quantized

CPU = torch.device("cpu")


def load_packed(directory: Path, rank: int, size: int, *, threads: int) -> tuple[Model, int]:
    """A rank's model as a GPU would load it, and the bytes that were read."""
    config = sharded_config(read_config(directory), rank, size)
    checkpoint = open_checkpoint(directory, config)
    layers = CheckpointLayers.open(directory, checkpoint, packs=True)
    model = build(config, torch.bfloat16, CPU, layers.scheme_of, Alone())
    targets = WeightTargets(model, checkpoint, layers, directory).targets
    if threads:
        reader = WeightReader(targets, CPU, threads=threads, chunk_bytes=1000)
        reader.finish(lambda done, total: None)
    else:
        read_in_turn(targets, lambda done, total: None)
    return model, sum(target.source.num_bytes for target in targets)


def assert_equal_weights(left: Model, right: Model) -> None:
    found = dict(right.named_parameters())
    for name, parameter in left.named_parameters():
        bits = [tensor.view(torch.uint8) for tensor in (parameter.data, found[name].data)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2-untied", "gpt-oss", "qwen3-next", "mixtral"])
def test_several_threads_read_the_same_parts_as_one(kind: str, rank: int, tmp_path: Path):
    write_checkpoint(kind, tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, _ = load_packed(tmp_path, rank, 2, threads=0)
        several, _ = load_packed(tmp_path, rank, 2, threads=3)
    rows = one.get_submodule("embedding").part.own  # type: ignore[union-attr]
    for model in (one, several):  # what follows is padding
        for name in ("embedding", "head"):
            model.get_submodule(name).get_parameter("weight")[rows:] = 0
    assert_equal_weights(one, several)


def test_two_ranks_read_the_checkpoint_once_but_for_norms(tmp_path: Path):
    write_checkpoint("llama2", tmp_path)
    whole = load_packed(tmp_path, 0, 1, threads=0)[1]
    parts = [load_packed(tmp_path, rank, 2, threads=0)[1] for rank in range(2)]
    norms = 7 * 64 * 4  # of three layers and the last one, in float32
    assert sum(parts) == whole + norms


FEW = ("fp8-block", "awq", "nvfp4")
EVERY = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
    for name in FORMATS
    if "act-order" not in name
]


@pytest.mark.parametrize("name", EVERY)
def test_layers_that_are_divided_are_packed_as_whole_ones_are(name: str, tmp_path: Path):
    write_quantized(tmp_path, name)
    for rank in range(2):
        one, _ = load_packed(tmp_path, rank, 2, threads=0)
        several, _ = load_packed(tmp_path, rank, 2, threads=3)
        linears = [module for module in one.modules() if isinstance(module, Linear)]
        assert sum(linear.packed is not None for linear in linears) == len(linears) - 1  # the head
        for left, right in zip(
            linears,
            [module for module in several.modules() if isinstance(module, Linear)],
            strict=True,
        ):
            if left.packed is not None and right.packed is not None:
                assert torch.equal(left.packed.weight.words, right.packed.weight.words)


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_has_its_rows_or_columns_of_a_quantized_weight(name: str, tmp_path: Path):
    """Those of down and output projections are columns."""
    reference = write_quantized(tmp_path, name).state_dict()
    for rank in range(2):
        config = sharded_config(read_config(tmp_path), rank, 2)
        checkpoint = open_checkpoint(tmp_path, config)
        layers = CheckpointLayers.open(tmp_path, checkpoint, packs=False)
        model = build(config, torch.float32, CPU, layers.scheme_of, Alone())
        targets = WeightTargets(model, checkpoint, layers, tmp_path).targets
        read_in_turn(targets, lambda done, total: None)
        for part in model.projections():
            if part.name == "lm_head":
                continue
            dimension = int(part.name.endswith(("o_proj", "down_proj")))
            expected = reference[f"{part.name}.weight"].chunk(2, dimension)[rank].float()
            torch.testing.assert_close(part.weight, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ranges", "first", "last", "expected"),
    [
        (((10, 20),), 0, 10, [(10, 20)]),
        (((10, 20),), 3, 5, [(13, 15)]),
        (((0, 4), (8, 12)), 2, 6, [(2, 4), (8, 10)]),
        (((0, 4), (8, 12)), 4, 8, [(8, 12)]),
        (((0, 4), (8, 12)), 0, 2, [(0, 2)]),
    ],
)
def test_places_within_ranges_are_ranges(
    ranges: tuple[tuple[int, int], ...], first: int, last: int, expected: list[tuple[int, int]]
):
    assert within(ranges, first, last) == expected


@pytest.mark.parametrize(("rows", "size"), [(131, 2), (151_936, 4), (50_257, 8), (9, 8), (1000, 3)])
def test_every_row_of_a_vocabulary_belongs_to_one_rank(rows: int, size: int):
    found = [Shard(rank, size).vocabulary(rows) for rank in range(size)]
    assert len({padded for _, padded in found}) == 1
    covered = [row for part, _ in found if part for row in range(*part.ranges[0])]
    assert covered == list(range(rows))
