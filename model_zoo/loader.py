"""Loads a model's weights from safetensors files directly into its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from model_zoo.checkpoint import Checkpoint, CheckpointTensor, shorten
from model_zoo.config import ModelConfig, ModelError
from model_zoo.kv_scales import is_kv_scale
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.model import Model
from model_zoo.registry import build
from model_zoo.weight_reader import WeightReader
from model_zoo.weights import Weights

ProgressCallback = Callable[[str, int, int], None]  # phase, done, total
# Buffers that some versions of transformers save and that are computed here.
IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


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
    ) -> None:
        """Weights are converted to `dtype`; load_format "dummy" fills them randomly, for
        benchmarks.

        Raises ModelError if files or tensors are missing, unexpected, damaged or of a wrong shape.
        """
        self._matched: dict[str, CheckpointTensor] = {}
        self._reading: WeightReader | None = None
        if load_format != "dummy":
            checkpoint = Checkpoint.open(Path(directory))
            shapes = build(config, dtype, torch.device("meta")).weights()
            self._matched = _match(shapes, checkpoint, config, Path(directory))
        self.model = build(config, dtype, device).eval()
        if not self._matched:
            _fill_randomly(self.model)
        elif device.type == "cuda":
            self._reading = WeightReader(self.model.weights(), self._matched)

    def finish(self, progress: ProgressCallback) -> Model:
        """Wait for the weights; progress("weights", bytes done, total bytes) meanwhile.

        Raises ModelError for a truncated or unreadable file.
        """
        if self._reading is not None:
            self._reading.finish(lambda done, total: progress("weights", done, total))
        elif self._matched:
            _fill(self.model.weights(), self._matched, progress)
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.prepare()
        return self.model


@torch.no_grad()
def _fill_randomly(model: nn.Module) -> None:
    """Standard deviation 0.02, norms around 1: zeros would draw less power and run faster."""
    for module in model.modules():
        centre = 1.0 if isinstance(module, RMSNorm | LayerNorm) else 0.0
        for name, parameter in module.named_parameters(recurse=False):
            parameter.normal_(centre if name == "weight" else 0.0, 0.02)


def _match(
    parameters: Weights, checkpoint: Checkpoint, config: ModelConfig, directory: Path
) -> dict[str, CheckpointTensor]:
    """Parameter name -> its tensor on disk.  Raises ModelError unless they match one to one."""
    outer = next(iter(parameters)).split(".")[0] + "."  # "model." or "transformer."
    matched: dict[str, CheckpointTensor] = {}
    unexpected: list[str] = []
    for name, source in checkpoint.sources.items():
        # A model saved without its head lacks the outer prefix.
        known = name if name in parameters else outer + name
        if known in parameters:
            matched[known] = source
        elif not (
            name.endswith(IGNORED)
            or is_kv_scale(name)  # read_kv_scales reads them where fp8 pages need them
            or (config.tie_embeddings and name == "lm_head.weight")
        ):
            unexpected.append(name)
    missing = [name for name in parameters if name not in matched]
    if missing or unexpected:
        found = [f"missing: {shorten(missing)}"] if missing else []
        found += [f"unexpected: {shorten(sorted(unexpected))}"] if unexpected else []
        raise ModelError(
            f"{directory}: these are not the weights of the {config.model_type} model of "
            f"{config.num_layers} layers that config.json describes: {'; '.join(found)}: check "
            "config.json, or download the model again"
        )
    for name, source in matched.items():
        if source.shape != tuple(parameters[name].shape):
            raise ModelError(
                f"{source} has shape {list(source.shape)}, config.json asks for "
                f"{list(parameters[name].shape)}: they belong to different models, download "
                "both again"
            )
    return matched


@torch.no_grad()
def _fill(
    parameters: Weights, matched: dict[str, CheckpointTensor], progress: ProgressCallback
) -> None:
    # In file order, since sequential reads are faster.
    order = sorted(matched, key=lambda name: (matched[name].path, matched[name].offset))
    total = sum(source.num_bytes for source in matched.values())
    done = 0
    for name in order:
        tensor: Tensor = matched[name].read()
        parameters[name].copy_(tensor)
        done += tensor.nbytes
        progress("weights", done, total)
