"""Chain: the GEMMs and norms of a layer, between which rows may stay in fp8 (TiledRows)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.linear import Linear
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.norm import RMSNorm

Place = Literal["qkv", "out", "gate_up", "down"]


@dataclass(frozen=True, slots=True)
class Chain:
    """Of one layer."""

    attention_norm: RMSNorm
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    mlp: SwigluMLP

    @property
    def linears(self) -> dict[Place, Linear]:
        return {
            "qkv": self.qkv, "out": self.out, "gate_up": self.mlp.gate_up, "down": self.mlp.down,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(linear.operand.nbytes for linear in self.linears.values())

    def run(
        self, added: Addend | None, residual: Tensor, attended: Tensor
    ) -> tuple[Addend | None, Tensor]:
        """The layer without its attention, whose output is given: as a layer's forward pass."""
        x, residual = self.attention_norm.add(added, residual, consumer=self.qkv)
        self.qkv(x)
        mixed, residual = self.out.add(attended, residual)
        x, residual = self.mlp_norm.add(mixed, residual, consumer=self.mlp)
        return self.mlp.add(x, residual)
