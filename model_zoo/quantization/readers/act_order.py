"""g_idx: the group of each column of a weight whose columns were quantized in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.json_fields import ModelError


def group_order(g_idx: Tensor, group: int, *, act_order: bool, name: str) -> Tensor | None:
    """The order of columns that makes groups contiguous, [K] int64; None: they are.

    Columns of one group keep their order.  Files without act_order may have zeros for g_idx.
    Raises ModelError if a group has more or fewer columns than `group`.
    """
    contiguous = torch.arange(len(g_idx), device=g_idx.device) // group
    g_idx = g_idx.long()
    if torch.equal(g_idx, contiguous) or (not act_order and not g_idx.any()):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], contiguous):
        raise ModelError(
            f"{name} does not have {group} columns in each group, as group_size says: use another "
            "repository of this model"
        )
    return order
