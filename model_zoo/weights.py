"""How a model says where each tensor of a checkpoint belongs: names mapped to views to fill."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from model_zoo.layers.linear import Linear

Weights = dict[str, Tensor]


def shared(linear: Linear, name: str) -> Weights:
    """One checkpoint tensor for each of ours."""
    return fused(linear, "", {name: linear.weight.shape[0]})


def fused(linear: Linear, prefix: str, parts: Mapping[str, int]) -> Weights:
    """Several checkpoint products that are one of ours: part name -> its number of outputs."""
    table: Weights = {}
    begin = 0
    for part, size in parts.items():
        name = f"{prefix}.{part}" if prefix else part
        table[f"{name}.weight"] = linear.weight[begin : begin + size]
        if linear.bias is not None:
            table[f"{name}.bias"] = linear.bias[begin : begin + size]
        begin += size
    assert begin == linear.weight.shape[0]
    return table
