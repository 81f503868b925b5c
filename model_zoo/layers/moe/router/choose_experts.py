"""choose_experts: the choice of one token in registers, which both of a router's kernels compute.

As route() of routing.py: scores in float32, the k best one after the other, and of equal ones the
first.  NaN is below every score, so that ids are different experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model_zoo.layers.moe.router.routing import LEAST_SUM, LOWEST
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


@triton.jit
def choose_experts(
    logits, BIAS, IDS, WEIGHTS, scale, first, E: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Store the k ids and weights of a token with these logits, [power of two] float32.

    IDS, WEIGHTS: where the token's first ones belong.  Of a rank that has OWN experts from `first`
    on, ids are 0 to OWN - 1, and of all others OWN.
    """
    expert = tl.arange(0, logits.shape[0])
    real = expert < E
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
    tl.store(IDS + slot, ids, mask=taken)
    tl.store(WEIGHTS + slot, weights * scale, mask=taken)


def covers(config: RouterConfig) -> bool:
    """Whether the kernels have the configuration: groups are to be as many as powers of two."""
    size = config.num_experts // config.groups
    return config.groups == 1 or all(n & (n - 1) == 0 for n in (config.groups, size))


def constants(config: RouterConfig, own: range) -> dict[str, object]:
    """The constants of choose_experts, for a rank that has the experts `own`."""
    return {
        "E": config.num_experts,
        "TOP_K": config.top_k,
        "BLOCK_E": triton.next_power_of_2(config.num_experts),
        "SLOTS": triton.next_power_of_2(config.top_k),
        "SCORING": config.scoring,
        "RENORMALIZE": config.renormalize,
        "GROUPS": config.groups,
        "KEPT": config.kept_groups,
        "OWN": len(own),
    }
