"""Loads a model's weights from safetensors files into its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelConfig
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.quantized_gemm.int8.cpu import packs_of
from model_zoo.layers.quantized_gemm.packed_parameters import PackedParameters
from model_zoo.layers.quantized_gemm.stacked_parameters import StackedParameters
from model_zoo.model import Model
from model_zoo.parallel.communicator import Communicator
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.registry import build
from model_zoo.weight_reader import WeightReader, read_in_turn
from model_zoo.weight_targets import WeightTargets

ProgressCallback = Callable[[str, int, int], None]  # phase, done, total


class ModelLoader:
    """Builds `model` on its device and loads its weights; `finish` waits for them.

    On a GPU, threads start to read at once; on a CPU, `finish` reads.  Names and shapes are
    checked before memory is allocated, and each weight is in memory once.
    """

    def __init__(
        self,
        config: ModelConfig,
        directory: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str = "auto",
        quantization: str = "auto",
        communicator: Communicator | None = None,
    ) -> None:
        """Unquantized weights are converted to `dtype`.

        load_format   "dummy" fills weights randomly, for benchmarks
        quantization  "auto": as the checkpoint; "fp8": unquantized Linears are quantized
        communicator  of the ranks, if config.shard is of several: only its part is read
        Raises ModelError if files or tensors are missing, unexpected, damaged or of a wrong shape.
        """
        directory = Path(directory)
        checkpoint = None if load_format == "dummy" else open_checkpoint(directory, config)
        packs = packs_of(device, dtype)
        layers = CheckpointLayers.open(
            directory, checkpoint, quantization=quantization, packs=packs
        )
        self._targets: WeightTargets | None = None
        self._reading: WeightReader | None = None
        if checkpoint is not None:  # before memory is allocated
            match_checkpoint(config, dtype, checkpoint, layers, directory)
        self.model = build(config, dtype, device, layers.scheme_of, communicator).eval()
        if packs is True:
            from model_zoo.layers.quantized_gemm.candidates import use_quantized_gemms

            use_quantized_gemms(self.model)
        if checkpoint is None:
            fill_randomly(self.model)
            return
        self._targets = WeightTargets(self.model, checkpoint, layers, directory)
        if device.type == "cuda":
            self._reading = WeightReader(self._targets.targets, device)

    def finish(self, progress: ProgressCallback) -> Model:
        """Wait for the weights; progress("weights", bytes done, total bytes) meanwhile.

        Raises ModelError for a truncated or unreadable file, or damaged quantized weights.
        """

        def report(done: int, total: int) -> None:
            progress("weights", done, total)

        if self._reading is not None:
            self._reading.finish(report)
        elif self._targets is not None:
            read_in_turn(self._targets.targets, report)
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.prepare()
        return self.model


def match_checkpoint(
    config: ModelConfig,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    directory: Path,
) -> WeightTargets:
    """Check that config.json describes the tensors, by the headers of the files alone.

    Raises ModelError if tensors are missing, unexpected, or of a wrong shape.
    """
    model = build(config, dtype, torch.device("meta"), layers.scheme_of)
    return WeightTargets(model, checkpoint, layers, directory)


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Standard deviation 0.02, norms around 1: zeros would draw less power and run faster."""
    for module in model.modules():
        if isinstance(module, PackedParameters | StackedParameters):
            module.fill_randomly()
            continue
        centre = 1.0 if isinstance(module, RMSNorm | LayerNorm) else 0.0
        if isinstance(module, RMSNorm) and module.plus_one:
            centre = 0.0
        if isinstance(module, DeltaNet):
            module.fill_randomly()
            continue
        for name, parameter in module.named_parameters(recurse=False):
            parameter.normal_(centre if name == "weight" else 0.0, 0.02)
