"""A directory with one quantized Linear, and the way of a loader from it to a QuantizedWeight."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_zoo.checkpoint import Checkpoint, text_model_name
from model_zoo.quantization.config import read_quantization
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.registry import read, split_name
from model_zoo.quantization.readers.resolve import resolve
from model_zoo.quantization.readers.tensor_spec import tensor_name
from tests.support.quantization.stored_linears import StoredLinear

NAME = "model.layers.0.mlp.down_proj"


def write(directory: Path, linear: StoredLinear, name: str = NAME) -> None:
    (directory / "config.json").write_text(json.dumps({"quantization_config": linear.config}))
    named = {tensor_name(name, suffix): value for suffix, value in linear.tensors.items()}
    save_file(named, directory / "model.safetensors")


def read_file(directory: Path, shape: tuple[int, int], name: str = NAME) -> QuantizedWeight | None:
    """The weight of the Linear `name`; None: it is not quantized."""
    name = text_model_name(name)
    sources = {
        found[1]: source
        for tensor, source in Checkpoint.open(directory).sources.items()
        if (found := split_name(tensor)) is not None and found[0] == name
    }
    present = {suffix: (source.dtype, source.shape) for suffix, source in sources.items()}
    stored = resolve(name, shape, read_quantization(directory), present)
    if stored is None:
        return None
    tensors: dict[str, Tensor] = {suffix: source.read() for suffix, source in sources.items()}
    return read(tensors, stored, shape, name)


def assert_reads(directory: Path, linear: StoredLinear, name: str = NAME) -> QuantizedWeight:
    """The files give the weight, within three roundings to float32."""
    rows, columns = linear.weight.shape
    write(directory, linear, name)
    weight = read_file(directory, (rows, columns), name)
    assert weight is not None
    assert weight.shape == (rows, columns)
    assert weight.codes.dtype == torch.uint8
    torch.testing.assert_close(
        weight.dequantize(torch.float32).double(), linear.weight, rtol=3e-7, atol=0
    )
    return weight
