"""sharded_checkpoint: the parts of a checkpoint's tensors that one rank has.

Everything that reads weights sees tensors of the rank's shapes then, and of the files no more than
these parts is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelConfig, ModelError
from model_zoo.model import Model
from model_zoo.parallel.shard import Part
from model_zoo.quantization.readers.registry import SUFFIXES, specs
from model_zoo.quantization.readers.tensor_spec import TensorSpec, tensor_name
from model_zoo.quantization.stored_format import StoredFormat
from model_zoo.registry import build
from model_zoo.weight_targets import WeightTargets

GROUPS = ("g_idx", "weight_g_idx")  # the group of each column
STACKED = tuple(suffix for suffix in SUFFIXES if suffix.startswith("_"))  # of all experts
WHOLE_SHAPE = "weight_shape"  # a tensor that repeats the shape of the whole weight
Ranges = tuple[tuple[int, int], ...]


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """What the rank of config.shard has of the checkpoint in `directory`: all, if it is alone.

    Raises ModelError as Checkpoint.open does, for tensors that do not belong to the whole model,
    and for a weight that cannot be divided.
    """
    checkpoint = Checkpoint.open(directory)
    if config.whole is None:
        return checkpoint
    return _Cutter(CheckpointLayers.open(directory, checkpoint, packs=False), config).cut()


def check_division(layers: CheckpointLayers, config: ModelConfig) -> None:
    """Raise ModelError if the rank's parts begin within groups or blocks of quantized weights.

    By config.json alone, without the files that `open_checkpoint` cuts.
    """
    _Cutter(layers, config).check()


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer of the whole checkpoint, or one of all experts in one tensor."""

    name: str
    shape: tuple[int, int]  # [N, K], of one expert
    part: Part
    transposed: bool = False
    experts: int = 0  # that the tensors hold; 0: they have no dimension of experts
    of_experts: bool = False  # --expert-parallel would leave it whole


class _Lengths:
    """How long one tensor of a quantized weight is for a part of the weight.

    which, index: of specs(stored, shape), and of the shapes there
    """

    def __init__(self, layer: _Layer, stored: StoredFormat, which: int, index: int) -> None:
        self._layer, self._stored, self._which, self._index = layer, stored, which, index
        whole, none = self._shape(layer.part.whole), self._shape(0)
        # The dimension that is divided; None: it holds one scale of all, or the other axis.
        self.divided = next(
            (i for i, count in enumerate(whole) if none[i] != count and count != 1), None
        )

    def _shape(self, count: int) -> tuple[int, ...]:
        """For a weight with so many outputs, or inputs."""
        rows, columns = self._layer.shape
        shape = (count, columns) if self._layer.part.axis == "outputs" else (rows, count)
        return specs(self._stored, shape)[self._which].shapes[self._index]

    def at(self, count: int) -> int:
        assert self.divided is not None
        return self._shape(count)[self.divided]

    def misaligned(self) -> int | None:
        """Where the rank's part begins or ends within a group; None: nowhere."""
        if self.divided is None:
            return None
        whole = self._layer.part.whole
        bounds = (at for bounds in self._layer.part.ranges for at in bounds)
        return next(
            (at for at in bounds if 0 < at < whole and self.at(at + 1) == self.at(at)), None
        )


class _Cutter:
    def __init__(self, layers: CheckpointLayers, config: ModelConfig) -> None:
        assert config.whole is not None
        self._shard, self._model_type = config.shard, config.model_type
        self._layers = layers
        meta = torch.device("meta")
        self._own: Model = build(config, torch.float32, meta)
        self._whole: Model = build(config.whole, torch.float32, meta)
        self._sources = {} if layers.checkpoint is None else dict(layers.checkpoint.sources)

    def check(self) -> None:
        seen: set[tuple[str, tuple[int, int]]] = set()  # of layers alike, one is enough
        for layer in self._divided():
            alike = re.sub(r"\d+", "0", layer.name), layer.shape
            stored = None if alike in seen else self._layers.stored(layer.name, layer.shape)
            if stored is None:
                continue
            seen.add(alike)
            for which, spec in enumerate(specs(stored, layer.shape)):
                # Which of the shapes its tensor has, only the files say.
                found = [
                    _Lengths(layer, stored, which, index).misaligned()
                    for index in range(len(spec.shapes))
                ]
                if found and None not in found:
                    raise ModelError(self._misaligned(layer, found[0] or 0, stored))

    def cut(self) -> Checkpoint:
        layers = self._layers
        assert layers.checkpoint is not None
        # What does not belong to the model is said of the whole tensors.
        WeightTargets(self._whole, layers.checkpoint, layers, layers.directory)
        for layer in self._divided():
            self._cut_layer(layer)
        for name, part in self._own.other_parts().items():
            self._cut_dimension(name, 0, part.ranges)
        for name in self._biases_of_rank_0():
            self._drop(name)
        self._cut_experts()
        return Checkpoint(self._sources)

    def _cut_experts(self) -> None:
        """Leave out the experts that other ranks have as wholes."""
        others: set[str] = set()
        for experts, whole in zip(self._own.experts(), self._whole.experts(), strict=True):
            if not experts.is_partial:
                continue
            own = ((experts.own.start, experts.own.stop),)
            for name in whole.stacked_tensors():
                for each in (name, *(tensor_name(name, suffix) for suffix in STACKED)):
                    self._cut_dimension(each, 0, own)
            others |= {each.name for each in whole.projections()}
            others -= {each.name for each in experts.projections()}
        if others:
            others |= {name.partition(".")[2] for name in others}  # as the files may call them
            for key in [key for key in self._sources if key.rpartition(".")[0] in others]:
                del self._sources[key]

    def _divided(self) -> Iterator[_Layer]:
        for projection in self._own.projections():
            if projection.part is not None:
                shape = _whole_shape(projection.shape, projection.part)
                yield _Layer(projection.name, shape, projection.part, projection.transposed)
        for experts in self._own.experts():
            stacked = experts.stacked_tensors()
            if any(self._present(name) for name in stacked):
                for name, tensor in stacked.items():
                    stack = tensor.stack
                    if tensor.is_weight and tensor.part is not None:
                        shape = _whole_shape((stack.outputs, stack.inputs), tensor.part)
                        of = tensor.transposed, stack.experts, True
                        yield _Layer(name, shape, tensor.part, *of)
                continue
            for projection in experts.projections():
                if projection.part is not None:
                    shape = _whole_shape(projection.shape, projection.part)
                    yield _Layer(projection.name, shape, projection.part, of_experts=True)

    def _cut_layer(self, layer: _Layer) -> None:
        name, part = layer.name, layer.part
        if part.axis == "outputs":
            bias = f"{name}_bias" if layer.experts else f"{name}.bias"
            self._cut_dimension(bias, 1 if layer.experts else 0, part.ranges)
        stored = self._layers.stored(name, layer.shape)
        if stored is None:
            weight = name if layer.experts else f"{name}.weight"
            dimension = int((part.axis == "inputs") != layer.transposed)
            self._cut_dimension(weight, dimension + bool(layer.experts), part.ranges)
            return
        if part.axis == "inputs":
            self._drop_groups(layer, stored)
        self._drop(tensor_name(name, WHOLE_SHAPE))
        for spec in specs(stored, layer.shape):
            self._cut_stored(layer, stored, spec)

    def _cut_stored(self, layer: _Layer, stored: StoredFormat, spec: TensorSpec) -> None:
        """Cut one tensor of a quantized weight, whose shape the format gives for every [N, K]."""
        keys = {suffix: self._key(tensor_name(layer.name, suffix)) for suffix in spec.suffixes}
        key = next((key for key in keys.values() if key is not None), None)
        if key is None or not spec.shapes:
            return
        source, skipped = self._sources[key], bool(layer.experts)
        own = source.shape[1:] if skipped else source.shape
        index = spec.shapes.index(own)
        which = next(i for i, each in enumerate(specs(stored, layer.shape)) if each == spec)
        lengths = _Lengths(layer, stored, which, index)
        dimension = lengths.divided
        if dimension is None:
            return
        wrong = lengths.misaligned()
        if wrong is not None:
            raise ModelError(self._misaligned(layer, wrong, stored))
        ranges = tuple((lengths.at(begin), lengths.at(end)) for begin, end in layer.part.ranges)
        self._sources[key] = source.part(dimension + skipped, ranges)

    def _drop_groups(self, layer: _Layer, stored: StoredFormat) -> None:
        """Groups of columns in order need no list of them; others cannot be divided."""
        for suffix in GROUPS:
            key = self._key(tensor_name(layer.name, suffix))
            if key is None:
                continue
            groups = self._sources[key].read().long()
            in_order = torch.arange(len(groups)) // (stored.group or len(groups))
            if torch.equal(groups, in_order) or (not stored.act_order and not groups.any()):
                del self._sources[key]
                continue
            raise ModelError(
                f"--tensor-parallel {self._shard.size}: {layer.name} is quantized in an order of "
                "its columns (act-order, desc_act), so that a part of its inputs has parts of all "
                f"groups: {self._remedy(layer)}use a repository without it, or leave the option out"
            )

    def _misaligned(self, layer: _Layer, at: int, stored: StoredFormat) -> str:
        return (
            f"--tensor-parallel {self._shard.size}: a rank's part of {layer.name} would begin at "
            f"{at} of its {layer.part.whole} {layer.part.axis}, within a group of values with one "
            f"scale or in one word ({stored}): {self._remedy(layer)}use fewer ranks, or a "
            f"repository of this {self._model_type} model that is quantized in smaller groups"
        )

    def _remedy(self, layer: _Layer) -> str:
        """What avoids the cut of an expert, where the experts can be divided as wholes."""
        count = next((experts.all_experts for experts in self._whole.experts()), 1)
        if not layer.of_experts or count % self._shard.size:
            return ""
        return "add --expert-parallel, by which a rank has whole experts, "

    def _cut_dimension(self, name: str, dimension: int, ranges: Ranges) -> None:
        key = self._key(name)
        if key is not None:
            self._sources[key] = self._sources[key].part(dimension, ranges)

    def _biases_of_rank_0(self) -> Iterator[str]:
        """Of layers whose products are added: the other ranks have none."""
        own = {each.name for each in self._own.projections() if each.bias is not None}
        for projection in self._whole.projections():
            if projection.bias is not None and projection.name not in own:
                yield f"{projection.name}.bias"
        for mine, whole in zip(self._own.experts(), self._whole.experts(), strict=True):
            yield from whole.stacked_tensors().keys() - mine.stacked_tensors().keys()

    def _drop(self, name: str) -> None:
        key = self._key(name)
        if key is not None:
            del self._sources[key]

    def _key(self, name: str) -> str | None:
        """The name in the files, which may lack its outer part."""
        return next((key for key in (name, name.partition(".")[2]) if key in self._sources), None)

    def _present(self, name: str) -> bool:
        """Whether the files have experts in tensors of all."""
        names = (name, *(tensor_name(name, suffix) for suffix in STACKED))
        return any(self._key(each) is not None for each in names)


def _whole_shape(shape: tuple[int, int], part: Part) -> tuple[int, int]:
    return (part.whole, shape[1]) if part.axis == "outputs" else (shape[0], part.whole)
