"""Router: chooses the experts of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.router.routing import route
from model_zoo.moe_config import RouterConfig

# As route() and route_tokens().
Choose = Callable[[Tensor, RouterConfig, Tensor | None, range | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of T tokens, in the order of their scores."""

    ids: Tensor  # [T, k] int32; of a rank that has some experts, from 0, and their number: no other
    weights: Tensor  # [T, k] float32
    shared_gate: Tensor | None  # [T], the shared expert's, before the sigmoid


class Router(nn.Module):
    """Logits of all experts, by one unquantized Linear, and the choice of k of them.

    A shared expert's gate, if it has one, is the Linear's last output.
    """

    def __init__(
        self,
        config: RouterConfig,
        hidden: int,
        linears: LinearFactory,
        *,
        shared_gate: bool = False,
        own: range | None = None,
    ) -> None:
        """own: the experts that the rank has; None: all"""
        super().__init__()
        self.config, self._has_gate = config, shared_gate
        self._own = range(config.num_experts) if own is None else own
        linears = replace(linears, dtype=torch.float32) if config.computes_in_float32 else linears
        outputs = config.num_experts + shared_gate
        self.linear = linears.unquantized(hidden, outputs, bias=config.bias)
        self.correction_bias: nn.Parameter | None = None
        if config.correction_bias:
            room = torch.empty(config.num_experts, dtype=torch.float32)
            self.correction_bias = nn.Parameter(room, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """[E, hidden]"""
        return self.linear.weight[: self.config.num_experts]

    @property
    def bias(self) -> Tensor | None:
        """[E]"""
        bias = self.linear.bias
        return None if bias is None else bias[: self.config.num_experts]

    @property
    def shared_gate_weight(self) -> Tensor | None:
        """[1, hidden]"""
        return self.linear.weight[self.config.num_experts :] if self._has_gate else None

    def forward(self, x: Tensor) -> Routed:
        """x [T, hidden]"""
        if not fused_kernels.use_fused_kernels(x.device):
            return self._separate(x, route)
        from model_zoo.layers.moe.router.choose_experts import covers
        from model_zoo.layers.moe.router.fused_router import fused_router, fuses
        from model_zoo.layers.moe.router.route_tokens import route_tokens

        if fuses(len(x), self.config, self.linear):
            bias = self.correction_bias
            return Routed(*fused_router(x, self.linear, self.config, bias, self._own))
        return self._separate(x, route_tokens if covers(self.config) else route)

    def _separate(self, x: Tensor, choose: Choose) -> Routed:
        """The product, and then the choice."""
        outputs = self.linear(x.to(self.linear.dtype))
        logits = outputs[:, : self.config.num_experts]
        gate = outputs[:, self.config.num_experts] if self._has_gate else None
        return Routed(*choose(logits, self.config, self.correction_bias, self._own), gate)
