"""Reads a checkpoint's scales of fp8 keys and values."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.checkpoint import Checkpoint
from model_zoo.config import ModelConfig, ModelError

# Calibration tools write them under self_attn, or under the projection; compressed-tensors as the
# scale of the projection's output.  Models that also see images have their layers deeper down.
NAME = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
    r"layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<kind>[kv])|(?P<projection>[kv])_proj\.(?:(?P=projection)|output))_scale"
)


def is_kv_scale(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def has_kv_scales(directory: Path | str) -> bool:
    return any(map(is_kv_scale, Checkpoint.open(Path(directory)).sources))


def read_kv_scales(directory: Path | str, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """k_scale, v_scale [layers with attention, kv_heads] float32; 1 where the checkpoint has none.

    Of the rank's heads, if the model is divided.

    The dequantized value is the stored one times the scale.  Raises ModelError for a scale that is
    not positive and finite, or has neither one element nor one per KV head.
    """
    whole = config.whole or config
    places = {layer: place for place, layer in enumerate(config.attention_layers)}
    scales = torch.ones(2, len(places), whole.num_kv_heads)
    for name, source in Checkpoint.open(Path(directory)).sources.items():
        found = NAME.fullmatch(name)
        if found is None:
            continue
        layer, kind = int(found["layer"]), "kv".index(found["kind"] or found["projection"])
        if config.num_layers <= layer < config.num_layers + config.prediction_layers:
            continue
        if layer >= config.num_layers:
            raise ModelError(f"{source}: config.json describes {config.num_layers} layers")
        if layer not in places:
            raise ModelError(f"{source}: config.json gives layer {layer} no attention")
        values = source.read().float().flatten()
        if len(values) not in (1, whole.num_kv_heads):
            raise ModelError(
                f"{source} has {len(values)} values: one is expected, or {whole.num_kv_heads}, "
                "one a KV head"
            )
        if not (values.isfinite() & (values > 0)).all():
            raise ModelError(f"{source}: a scale must be positive and finite")
        scales[kind, places[layer]] = values
    part = config.shard.part("outputs", (config.num_kv_heads,), copies=config.shard.kv_copies)
    if part is not None:
        [(begin, end)] = part.ranges
        scales = scales[:, :, begin:end]
    return scales[0], scales[1]
