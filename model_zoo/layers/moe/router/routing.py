"""route: from a router's logits to each token's experts and their weights.

In PyTorch's operations, without a read by the host: for CPUs, for what choose_experts.py does not
cover, and as the oracle of the kernels that call that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.moe_config import RouterConfig

# Of NaN, and of experts outside of the kept groups: below every score.
LOWEST = -1e30
LEAST_SUM = 1e-20  # added to the sum of sigmoids before the division


def route(
    logits: Tensor, config: RouterConfig, bias: Tensor | None, own: range | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] float32 or None -> (experts [T, k] int32, weights [T, k] float32).

    A token's experts are different and in the order of their scores; of equal ones the first comes
    first.
    own: the experts that are here, which have the numbers from 0 then; others all have len(own)
    """
    logits = _finite(logits.float())
    if config.scoring == "sigmoid":
        # In float32 a CPU rounds the last elements otherwise than those it computes at once: equal
        # logits would have other scores.
        scores = logits.double().sigmoid().float()
        choice = scores if bias is None else _finite(scores + bias)
        if config.groups > 1:
            choice = _kept_groups(choice, config)
    else:
        scores = choice = logits if config.scoring == "topk_softmax" else logits.softmax(-1)
    # topk() may take any of equal scores.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, ids)
    if config.scoring == "topk_softmax":
        weights = weights.softmax(-1)
    if config.renormalize:
        least = LEAST_SUM if config.scoring == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + least)
    if own is not None and len(own) < config.num_experts:
        ids = torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, len(own))
    return ids.int(), weights * config.scale


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(LOWEST, -LOWEST, LOWEST)


def _kept_groups(choice: Tensor, config: RouterConfig) -> Tensor:
    """choice [T, E] with LOWEST for the experts of all groups but the best ones."""
    grouped = choice.unflatten(1, (config.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1)  # [T, groups]
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : config.kept_groups]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    return torch.where(is_kept[:, :, None], grouped, LOWEST).flatten(1)
