"""Weights: maps checkpoint tensor names to the parameters, or slices of them, that they fill."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from model_zoo.layers.linear import Linear

Weights = dict[str, Tensor]


def unfused(linear: Linear, name: str) -> Weights:
    """A checkpoint projection that is one Linear."""
    return fused(linear, "", {name: linear.weight.shape[0]})


def fused(linear: Linear, prefix: str, parts: Mapping[str, int]) -> Weights:
    """Checkpoint projections fused into one Linear; parts: name -> output features, in order."""
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
