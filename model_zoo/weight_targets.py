"""Matches the tensors of a checkpoint with the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from model_zoo.checkpoint import Checkpoint, CheckpointTensor, shorten, wrong_shape
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelError
from model_zoo.families.model_config import VISION_WEIGHTS
from model_zoo.kv_scales import is_kv_scale
from model_zoo.layers.moe.experts import Experts, StackedTensor
from model_zoo.layers.projection import LoadedProjection, Projection
from model_zoo.model import Model
from model_zoo.staging import Parameter, StagedLayer
from model_zoo.weight_reader import WeightTarget

Source = TypeVar("Source")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Models that see images, of which the text model alone runs, and what it leaves out.
TEXT_ONLY = ("gemma3",)
VISION = ("model.vision_tower.", "model.multi_modal_projector.")
# Buffers that some versions of transformers save and that are computed here.
IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class WeightTargets:
    """Where each tensor of the checkpoint belongs in a model."""

    def __init__(
        self, model: Model, checkpoint: Checkpoint, layers: CheckpointLayers, directory: Path
    ) -> None:
        """A model on "meta" is enough to check names and shapes.

        Raises ModelError unless the checkpoint's tensors and the model's parameters match.
        """
        self._config, self._directory, self._layers = model.config, directory, layers
        self._sources = canonical_names(checkpoint.sources, model)
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self.targets: list[WeightTarget] = []
        parts = model.other_parts()
        for name, place in model.other_weights().items():
            # A rank's rows of the vocabulary may end with padding.
            self._add_parameter(name, place[: parts[name].own] if name in parts else place)
        for projection in model.projections():
            self._add_projection(projection)
        for experts in model.experts():
            self._add_experts(experts)
        self._check()

    def _add_parameter(
        self, name: str, place: Tensor, shape: tuple[int, ...] | None = None
    ) -> None:
        """shape: in the file, if it is not that of `place`"""
        source = self._take_parameter(name, shape or tuple(place.shape))
        if source is not None:
            self.targets.append(WeightTarget(source, Parameter(place)))

    def _take_parameter(self, name: str, shape: tuple[int, ...]) -> CheckpointTensor | None:
        """The unquantized tensor of this name and shape."""
        source = self._sources.pop(name, None)
        if source is None:
            self._missing.append(name)
        elif source.shape != shape:
            self._wrong.append(wrong_shape(source, shape))
        elif source.dtype not in FLOATS:
            self._wrong.append(
                f"{source} is {str(source.dtype).removeprefix('torch.')}, which only linear layers "
                "may be: use another repository of this model"
            )
        return source

    def _add_experts(self, experts: Experts) -> None:
        """One tensor for each expert, or one for all: whichever the files have."""
        stacked = experts.stacked_tensors()
        if not any(name in self._sources for name in stacked):
            for projection in experts.projections():
                self._add_projection(projection)
            return
        for name, tensor in stacked.items():
            if tensor.is_weight and self._add_quantized_stack(name, tensor):
                continue
            if tensor.place is not None:
                self._add_parameter(name, tensor.place, tensor.shape)
            else:
                self._quantize_stacked(name, tensor)

    def _add_quantized_stack(self, name: str, tensor: StackedTensor) -> bool:
        """Whether the files have the stack quantized."""
        stack, layers = tensor.stack, self._layers
        shape = stack.outputs, stack.inputs
        sources = layers.take_stacked(name, stack.experts, shape, self._sources)
        if sources is None:
            return False
        read_one = layers.reading(name, shape)
        layer = StagedLayer(sources, stack.device, lambda tensors: tensor.fill(tensors, read_one))
        self.targets += [WeightTarget(staged.source, staged) for staged in layer.tensors.values()]
        return True

    def _quantize_stacked(self, name: str, tensor: StackedTensor) -> None:
        source = self._take_parameter(name, tensor.shape)
        if source is not None:
            layer = StagedLayer(
                {"weight": source},
                tensor.stack.device,
                lambda tensors: tensor.quantize(tensors["weight"]),
            )
            self.targets.append(WeightTarget(source, layer.tensors["weight"]))

    def _add_projection(self, projection: LoadedProjection) -> None:
        if projection.bias is not None:
            self._add_parameter(f"{projection.name}.bias", projection.bias)
        sources = self._layers.take(projection, self._sources)
        if sources is None:
            name = f"{projection.name}.weight"
            if isinstance(projection, Projection) and projection.runs:
                self._add_reordered(name, projection)
            else:
                self._add_parameter(name, projection.weight)
            return
        device = projection.device
        if not sources:
            self._missing.append(f"{projection.name}.weight")
        layer = StagedLayer(sources, device, self._layers.conversion(projection))
        self.targets += [WeightTarget(staged.source, staged) for staged in layer.tensors.values()]

    def _add_reordered(self, name: str, projection: Projection) -> None:
        source = self._take_parameter(name, projection.shape)
        if source is not None:
            layer = StagedLayer(
                {"weight": source},
                projection.device,
                lambda tensors: projection.copy(tensors["weight"]),
            )
            self.targets.append(WeightTarget(source, layer.tensors["weight"]))

    def _check(self) -> None:
        config = self._config
        last = config.num_layers + config.prediction_layers
        skipped = tuple(f"model.layers.{i}." for i in range(config.num_layers, last))
        unexpected = [
            source.name
            for name, source in self._sources.items()
            if not (
                name.endswith(IGNORED)
                or (config.model_type in TEXT_ONLY and name.startswith(VISION))
                or name.startswith(config.skipped_weights)
                or is_kv_scale(name)  # read_kv_scales reads them where fp8 pages need them
                or name.startswith(skipped)
                or (config.tie_embeddings and name.startswith("lm_head."))
            )
        ]
        if self._missing or unexpected:
            found = [f"missing: {shorten(self._missing)}"] if self._missing else []
            found += [f"unexpected: {shorten(sorted(unexpected))}"] if unexpected else []
            encoder = any(n.startswith(VISION_WEIGHTS) for n in (*self._missing, *unexpected))
            remedy = "; or serve the text model alone: --max-image-pixels 0"
            raise ModelError(
                f"{self._directory}: these are not the weights of the {config.model_type} model of "
                f"{config.num_layers} layers that config.json describes: {'; '.join(found)}: check "
                f"config.json, or download the model again{remedy if encoder else ''}"
            )
        if self._wrong:
            raise ModelError(self._wrong[0])


def canonical_names(sources: Mapping[str, Source], model: Model) -> dict[str, Source]:
    """By names with their outer part, "model." or "transformer.", without which some are saved."""
    outer = next(iter(model.other_weights())).split(".")[0] + "."
    known = (outer, "lm_head.")
    return {
        name if name.startswith(known) else outer + name: source for name, source in sources.items()
    }
