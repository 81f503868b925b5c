"""MoE: a mixture of experts in the place of an MLP."""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.router.router import Router
from model_zoo.parallel.communicator import Alone, Communicator


class MoE(nn.Module):
    """The router's experts of each token, and the shared expert, if there is one.

    Each rank has some inner values of every expert, or some experts, and the ranks' outputs are
    added.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: SwigluMLP | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        self._communicator = communicator or Alone()
        self.router, self.experts, self.shared = router, experts, shared

    def input_scales(self, rows: int) -> None:
        """The router and the experts take 16 bits, for any number of rows."""

    def takes_normed(self, rows: int) -> bool:
        """As Consumer.takes_normed: the router and the experts read the norm itself."""
        return False

    def multiply_first(self, x: Tensor) -> object:
        """As Consumer.multiply_first: the router."""
        return self.router(x)

    @property
    def loads_ahead(self) -> bool:
        """As Consumer.loads_ahead."""
        return False

    def add(self, x: Tensor, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """x, residual [T, size] -> (output, residual), as Linear.add."""
        routed = self.router(x)
        shared = None if self.shared is None else self.shared(x)
        part = self.experts(x, routed.ids, routed.weights, shared, routed.shared_gate)
        return self._communicator.for_norm(part), residual
