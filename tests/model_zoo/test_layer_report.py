"""The lines of the start report about linear layers, and the warnings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import read_config
from model_zoo.layer_report import describe_layers, slow_layers
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizeThenCublas, ScaledMM
from model_zoo.model import Model
from model_zoo.registry import build
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.quantized_models import write_quantized


@dataclass(frozen=True)
class Product:
    name: str

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


FAST, DEQUANTIZED_FIRST = Product("fast"), Product(DequantizeThenCublas.name)


def packed(directory: Path, name: str, many: Product) -> Model:
    """A model without memory whose layers are multiplied as they would be on a GPU."""
    write_quantized(directory, name)
    layers = CheckpointLayers.open(directory, None, packs=True)
    config = read_config(directory)
    model = build(config, torch.bfloat16, torch.device("meta"), layers.scheme_of)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.packed is not None:
            layer.use_gemms({64: FAST}, many)
    return model


def test_each_kind_of_weight_has_a_line_with_its_kernels(tmp_path: Path):
    model = packed(tmp_path, "int4-g128", many=DEQUANTIZED_FIRST)
    int4, head = describe_layers(model)
    assert int4.startswith("int4 in groups of 128: 8 layers, 0.00 GB: ")
    assert int4.endswith(": dequantize then cuBLAS, fast; above 64 rows dequantize then cuBLAS")
    assert head.startswith("bfloat16: 1 layer, ")


def test_products_that_dequantize_first_are_slow(tmp_path: Path):
    model = packed(tmp_path, "int4-g128", many=DEQUANTIZED_FIRST)
    [warning] = slow_layers(model)
    start = "8 layers of int4 in groups of 128 are dequantized for each step of more than"
    assert warning.startswith(f"{start} 64 tokens")
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.packed is not None:
            layer.use_gemms({128: FAST, 256: FAST})
    [warning] = slow_layers(model)
    assert warning.startswith(f"{start} 256 tokens")
    assert describe_layers(model)[0].endswith("above 64 rows dequantize then cuBLAS, fast")
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.packed is not None:
            layer.use_gemms({256: DEQUANTIZED_FIRST, 1024: FAST}, FAST)
    [warning] = slow_layers(model)
    assert "are dequantized for some steps of more than 64 tokens" in warning


def test_products_of_codes_are_not(tmp_path: Path):
    assert slow_layers(packed(tmp_path, "fp8-channel", many=FAST)) == []


def test_the_kernels_that_quantize_activations_are_named(tmp_path: Path):
    model = packed(tmp_path, "fp8-tensor", many=FAST)
    assert describe_layers(model)[0].endswith(": fast; above 64 rows fast")
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.packed is not None:
            layer.use_gemms({64: FAST}, ScaledMM("row"))
    assert describe_layers(model)[0].endswith(
        "above 64 rows fp8 tensor cores; activations quantized by norm, silu_mul"
    )


def test_an_unquantized_model_has_no_lines(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    model = load_model(
        read_config(tmp_path), tmp_path, dtype=torch.float32, device=torch.device("cpu")
    )
    assert describe_layers(model) == [] and slow_layers(model) == []


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_what_is_dequantized_when_loaded_is_said(name: str, tmp_path: Path):
    write_quantized(tmp_path, name)
    model = load_model(
        read_config(tmp_path), tmp_path, dtype=torch.float32, device=torch.device("cpu")
    )
    layers, head = describe_layers(model)
    assert layers.startswith("float32, dequantized when loaded: 8 layers, 0.02 GB: PyTorch;")
    assert head.startswith("float32: 1 layer, ")
    [warning] = slow_layers(model)
    assert "take the memory and the time of unquantized ones" in warning
