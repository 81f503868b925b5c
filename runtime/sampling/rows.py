"""Sampling with temperature, top-k, top-p and min-p on a CPU: the reference definition.

The three filters keep the tokens at or above one threshold, so tokens of equal probability are
kept or dropped together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.scheduler.batch import Int64Array

ParamColumns = NDArray[Any]  # torch_sampler.PARAMS, one entry a row

# Weights, the largest of which is 1, are summed as integers: of floats the sum would depend on the
# order, and on a GPU that on the number of rows.
UNITS = 1 << 44  # of the largest: those of 2**18 tokens fit into 63 bits
LEAST = -80.0  # log of a weight that rounds to less than one unit


def take(tensor: Tensor, rows: Int64Array) -> Tensor:
    """The given rows: the tensor itself if that is all of them."""
    if len(rows) == len(tensor):
        return tensor
    # Rows are copied whole: three times as fast as by tensor[...].
    return tensor.index_select(0, torch.from_numpy(rows))


def column(values: NDArray[np.generic]) -> Tensor:
    """[N, 1]"""
    return torch.from_numpy(np.array(values, order="C"))[:, None]


def sample_rows(
    logits: Tensor, best: Tensor, params: ParamColumns, numbers: NDArray[np.float64]
) -> Tensor:
    """One token a row [R]; `numbers` are uniform in (0, 1)."""
    # The largest becomes 0, so that no temperature can overflow: scaled = log(p / largest p).
    scaled = (logits - best[:, None]).div_(column(params["temperature"]))
    # Smaller values have weight 0, and exp(-inf) takes a CPU three times as long.
    scaled.clamp_(min=LEAST)
    threshold = _threshold(scaled, params)
    below = None if threshold is None else scaled < threshold
    np.exp(scaled.numpy(), out=scaled.numpy())  # half of PyTorch's time on one core
    weights = scaled
    if below is not None:
        weights.masked_fill_(below, 0)
    cumulative = _units(weights).cumsum(dim=-1)
    target = (cumulative[:, -1:] * column(numbers)).long()
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1)  # rows that are not finite can select any


def _threshold(scaled: Tensor, params: ParamColumns) -> Tensor | None:
    """[R, 1]: the smallest log(p / largest p) that a row keeps; None if every row keeps all."""
    vocab = scaled.shape[-1]
    top_k = np.where((params["top_k"] <= 0) | (params["top_k"] > vocab), vocab, params["top_k"])
    top_p = np.where(params["top_p"] >= 1, np.inf, params["top_p"].astype(np.float64))
    threshold: Tensor | None = None
    if params["min_p"].any():
        with np.errstate(divide="ignore"):
            # At most 1: the most likely token always stays.
            threshold = column(np.log(np.minimum(params["min_p"], 1)))
    rows = np.flatnonzero((top_k < vocab) | (top_p < np.inf))
    if len(rows):
        trimmed = scaled.new_full((len(scaled), 1), -torch.inf)
        least = _least_kept(take(scaled, rows), top_k[rows], top_p[rows])
        trimmed[torch.from_numpy(rows)] = least
        threshold = trimmed if threshold is None else torch.maximum(threshold, trimmed)
    return threshold


def _least_kept(scaled: Tensor, top_k: Int64Array, top_p: NDArray[np.float64]) -> Tensor:
    """[R, 1]: the least likely token within both top_k and top_p of each row."""
    values = _sorted(scaled)
    weights = _units(values.exp())
    ranks = torch.arange(values.shape[-1])
    weights.masked_fill_(ranks >= column(top_k), 0)
    reached = weights.cumsum(dim=-1)
    target_mass = reached[:, -1:] * column(top_p)
    # A token is kept while those before it have not reached the target mass; the first always is.
    kept = (
        ((reached - weights < target_mass) & (weights > 0)).sum(dim=-1, keepdim=True).clamp_(min=1)
    )
    return values.gather(-1, kept - 1)


def _units(weights: Tensor) -> Tensor:
    """Weights of at most 1 in UNITS, as int64; overwrites them.  A power of two scales exactly.

    Rows that are not finite give values without meaning: they are unusable anyway.
    """
    return weights.mul_(UNITS).long()


def _sorted(values: Tensor) -> Tensor:
    """Each row, descending.

    By NumPy, which uses vector instructions: 0.5 ms for 150,000 numbers where `torch.sort` takes
    12 ms (one core of an AMD EPYC 9005).
    """
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
