# route_tokens: from a router's logits to each token's experts and their weights.
#   grid      (T,): a program of one warp has all logits of a token in registers
#   reads     logits [T, E] bf16, fp16 or fp32, rows at any stride; bias [E] fp32 or None
#   writes    ids [T, k] int32, weights [T, k] fp32
#   math      as route() of routing.py: scores in fp32, the k best one after the other, and of equal
#             ones the first.  NaN is below every score, so that ids are different experts.  Of a
#             rank that has OWN experts from first on, these are 0 to OWN - 1, and all others OWN
#   launch    dependents are launched at once; it reads nothing before the wait
#   bound     latency: k reductions over a warp
#   checked   tests/model_zoo/layers/moe/test_router.py against route()
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from model_zoo.layers.moe.routing import LEAST_SUM, LOWEST
from model_zoo.moe_config import RouterConfig

LOWEST_SCORE = tl.constexpr(LOWEST)
LEAST = tl.constexpr(LEAST_SUM)


@triton.jit
def _finite(values):
    values = tl.where(values == values, values, LOWEST_SCORE)
    return tl.minimum(tl.maximum(values, LOWEST_SCORE), -LOWEST_SCORE)


@triton.jit
def _best(values, place):
    """-> (the largest of values, where its first is 0 and others are -inf); place: 0, 1, ..."""
    at = tl.argmax(values, 0, tie_break_left=True)
    return at, tl.where(place == at, float("-inf"), values)


@triton.jit
def _kept_groups(choice, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """choice [E] with LOWEST for the experts of all groups but the KEPT best."""
    SIZE: tl.constexpr = choice.shape[0] // GROUPS
    grouped = choice.reshape(GROUPS, SIZE)
    first = tl.argmax(grouped, 1, tie_break_left=True)
    others = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], float("-inf"), grouped)
    total = tl.max(grouped, 1) + tl.max(others, 1)
    group = tl.arange(0, GROUPS)
    is_kept = group < 0
    for _ in tl.static_range(KEPT):
        at, total = _best(total, group)
        is_kept |= group == at
    return tl.where(is_kept[:, None], grouped, LOWEST_SCORE).reshape(choice.shape[0])


@triton.jit(do_not_specialize=["first"])  # all ranks run one kernel
def _route(
    LOGITS, BIAS, IDS, WEIGHTS, scale, logits_row, first, E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, OWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    real = expert < E
    if DEPENDENT:
        start_successor_and_wait()
    logits = tl.load(LOGITS + row * logits_row + expert, mask=real, other=0.0).to(tl.float32)
    logits = _finite(logits)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-tl.maximum(logits, -80.0)))  # no overflow
        choice = scores
        if BIAS is not None:
            choice = _finite(scores + tl.load(BIAS + expert, mask=real, other=0.0))
        if GROUPS > 1:
            choice = _kept_groups(choice, GROUPS, KEPT)
    elif SCORING == "topk_softmax":
        scores = logits
        choice = scores
    else:
        most = tl.max(tl.where(real, logits, float("-inf")), 0)
        powers = tl.where(real, tl.exp(tl.minimum(logits - most, 0.0)), 0.0)
        scores = powers / tl.sum(powers, 0)
        choice = scores
    choice = tl.where(real, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for j in tl.static_range(TOP_K):
        at, choice = _best(choice, expert)
        ids = tl.where(slot == j, at, ids)
        weights = tl.where(slot == j, tl.sum(tl.where(expert == at, scores, 0.0), 0), weights)
    taken = slot < TOP_K
    if SCORING == "topk_softmax":
        powers = tl.where(taken, tl.exp(weights - tl.max(tl.where(taken, weights, -1e38), 0)), 0.0)
        weights = powers / tl.sum(powers, 0)
    if RENORMALIZE:
        total = tl.sum(weights, 0)
        weights /= total + LEAST if SCORING == "sigmoid" else total
    if OWN < E:
        is_own = (ids >= first) & (ids < first + OWN)
        ids = tl.where(is_own, ids - first, OWN)
    tl.store(IDS + row * TOP_K + slot, ids, mask=taken)
    tl.store(WEIGHTS + row * TOP_K + slot, weights * scale, mask=taken)


def covers(config: RouterConfig) -> bool:
    """Whether the kernel has the configuration: groups are to be as many as powers of two."""
    size = config.num_experts // config.groups
    return config.groups == 1 or all(n & (n - 1) == 0 for n in (config.groups, size))


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
            E=experts, TOP_K=config.top_k, BLOCK_E=triton.next_power_of_2(experts),
            SLOTS=triton.next_power_of_2(config.top_k), SCORING=config.scoring,
            RENORMALIZE=config.renormalize, GROUPS=config.groups, KEPT=config.kept_groups,
            OWN=len(own), num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return ids, weights
