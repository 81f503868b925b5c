# route_tokens: from a router's logits to each token's experts and their weights.
#   grid      (T,): a program of one warp has all logits of a token in registers
#   reads     logits [T, E] bf16, fp16 or fp32, rows at any stride; bias [E] fp32 or None
#   writes    ids [T, k] int32, weights [T, k] fp32
#   math      choose_experts.py
#   launch    dependents are launched at once; it reads nothing before the wait
#   bound     latency: k reductions over a warp
#   checked   tests/model_zoo/layers/moe/test_router.py against route()
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.moe.router.choose_experts import choose_experts, constants, covers
from model_zoo.moe_config import RouterConfig


@triton.jit(do_not_specialize=["first"])  # all ranks run one kernel
def _route(
    LOGITS, BIAS, IDS, WEIGHTS, scale, logits_row, first, E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, OWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    if DEPENDENT:
        start_successor_and_wait()
    logits = tl.load(LOGITS + row * logits_row + expert, mask=expert < E, other=0.0)
    choose_experts(
        logits.to(tl.float32), BIAS, IDS + row * TOP_K, WEIGHTS + row * TOP_K, scale, first, E,
        TOP_K, SLOTS, SCORING, RENORMALIZE, GROUPS, KEPT, OWN,
    )  # fmt: skip


def route_tokens(
    logits: Tensor, config: RouterConfig, bias: Tensor | None, own: range | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] or None -> (ids [T, k] int32, weights [T, k] float32), as route()."""
    tokens, experts = logits.shape
    own = range(experts) if own is None else own
    assert experts == config.num_experts and logits.stride(1) == 1 and covers(config)
    ids = torch.empty(tokens, config.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, config.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, bias, ids, weights, config.scale, logits.stride(0), own.start,
            **constants(config, own), num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return ids, weights
