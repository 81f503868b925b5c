"""Random experts, unquantized and of every quantized format, and their exact outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.activation import activate
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.moe_config import Activation, MoEConfig, RouterConfig
from model_zoo.quantization.weight_scheme import WeightScheme
from tests.support.kernels.quantized_cases import KINDS, quantized

# How the tokens choose their experts.
ROUTINGS = ("balanced", "few experts", "one expert")


def make_experts(
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: str,
    activation: Activation = "silu_mul",
    bias: bool = False,
    weights: str | None = None,
    own: tuple[int, int] | None = None,
) -> Experts:
    """weights: a name of quantized_cases.py; None: unquantized.  own: as in MoEConfig"""
    config = MoEConfig(
        router=RouterConfig(num_experts=num_experts, top_k=top_k),
        intermediate_size=inner,
        activation=activation,
        bias=bias,
        own=own,
    )
    with torch.device(device):
        experts = Experts(
            config, hidden, ExpertNames("experts"), LinearFactory(dtype, scheme_of(weights, dtype))
        )
    torch.manual_seed(num_experts * hidden)
    for stack in (experts.gate_up, experts.down):
        fill(stack, weights, device)
    return experts


def scheme_of(weights: str | None, dtype: torch.dtype = torch.float16):
    """dtype: of the scales of integers"""

    def scheme(parts: object, inputs: int) -> WeightScheme | None:
        if weights is None:
            return None
        kind, column_group, row_group, zeros = KINDS[weights]
        dtypes = {"fp8": torch.float32, "fp4": torch.uint8}
        scale_dtype = dtypes.get(kind, dtype)
        scale_dtype = torch.float8_e8m0fnu if weights == "mxfp8" else scale_dtype
        return WeightScheme(
            kind=kind,
            row_group=row_group,
            column_group=column_group or inputs,
            scale_dtype=scale_dtype,
            zeros=zeros,
            row_scales=weights == "nvfp4",
        )

    return scheme


def fill(stack: ExpertStack, weights: str | None, device: str) -> None:
    """Random weights; `exact` has them in float64."""
    exact = torch.empty(stack.experts, stack.outputs, stack.inputs, dtype=torch.float64)
    for expert in range(stack.experts):
        if weights is None:
            noise = torch.randn(stack.outputs, stack.inputs) * stack.inputs**-0.5
            stack.weight[expert] = noise.to(stack.dtype)
            exact[expert] = stack.weight[expert].double().cpu()
        else:
            stored = quantized(
                weights, stack.outputs, stack.inputs, device=device, scales=stack.dtype
            )
            # Another one for each expert: its rows in another order.
            stored = replace(stored, codes=stored.codes.roll(expert, 0))
            stack.store(expert, 0, stored)
            exact[expert] = stored.dequantize(torch.float32).double().cpu()
    stack.exact = exact  # type: ignore[assignment]
    if stack.bias is not None:
        stack.bias.copy_(torch.randn(stack.bias.shape) / 2)


def routing(kind: str, tokens: int, experts: Experts) -> tuple[Tensor, Tensor]:
    """-> (ids [T, k] int32, weights [T, k]): different experts in a row.

    Those that are not here have the number that follows those that are.
    """
    generator = torch.Generator().manual_seed(tokens)
    count, top_k = experts.all_experts, experts.top_k
    scores = torch.rand(tokens, count, generator=generator)
    if kind == "few experts":
        scores[:, : top_k + 1] += 1
    elif kind == "one expert":
        scores[:, -1] += 1  # of all tokens, beside others
    ids = scores.topk(top_k).indices.int()
    is_own = (ids >= experts.own.start) & (ids < experts.own.stop)
    ids = torch.where(is_own, ids - experts.own.start, experts.num_experts)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    device = experts.gate_up.weight.device
    return ids.to(device), (weights / weights.sum(-1, keepdim=True)).to(device)


def exactly(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Their output [T, H] float64, with inner values that are not rounded."""
    first, second = experts.gate_up, experts.down
    out = torch.zeros(len(x), experts.hidden, dtype=torch.float64, device=x.device)
    for expert in range(experts.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = x[token].double() @ first.exact[expert].to(x.device).T
        if first.bias is not None:
            inner += first.bias[expert].double()
        y = activate(inner, experts.activation) @ second.exact[expert].to(x.device).T
        if second.bias is not None:
            y += second.bias[expert].double()
        out[token] += weights[token, slot, None].double() * y
    return out.cpu()
