"""The formats of the benchmarks' models are those that published checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shapes.quantization import FORMATS
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.quantization.config import read_quantization
from model_zoo.quantization.weight_scheme import scheme_for

KINDS = {
    "fp8": "fp8 in rows",
    "fp8-block": "fp8 in blocks of 128 x 128",
    "int8": "int8 in rows",
    "int4": "int4 in groups of 128",
    "awq": "int4 in groups of 128, zero points",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_format_says_how_weights_are_stored_and_multiplied(name: str, tmp_path: Path):
    """fp8 and int8 with activations of the same type: nothing says W8A16."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMATS[name]}))
    config = read_quantization(tmp_path)
    assert config is not None and config.stored("lm_head") is None
    stored = config.stored("model.layers.0.mlp.up_proj")
    assert stored is not None
    scheme = scheme_for(stored, 4096)
    assert scheme.describe(4096) == KINDS[name]
    layers = CheckpointLayers.open(tmp_path, None, packs=True)
    assert layers.scheme_of({"model.layers.0.mlp.up_proj": 4096}, 4096) == scheme
