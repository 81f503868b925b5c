"""Log-probabilities: of the sampled token, its rank, and the most likely alternatives.

They are computed from the raw logits, before bias, penalties and temperature; under a grammar, over
the tokens that it allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.messages import TokenLogprob

LAST_ID = (1 << 32) - 1  # the lower half of a key


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """On the device.  logprobs [N] float32, ranks [N] int64, top_ids, top_logprobs [N, width]."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.logprobs, self.ranks, self.top_ids, self.top_logprobs]


def score(logits: Tensor, tokens: Tensor, width: int) -> LogprobsTensors:
    """The log-probabilities of tokens [N] int64 by logits [N, vocab] float32, with the `width` most
    likely alternatives each."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    ids = _most_likely(logprobs, min(width, logits.shape[-1]))
    return LogprobsTensors(chosen.squeeze(-1), ranks, ids, logprobs.gather(-1, ids))


def _most_likely(logprobs: Tensor, width: int) -> Tensor:
    """Ids [N, width], the most likely first."""
    if logprobs.device.type == "cpu":
        return logprobs.topk(width, dim=-1).indices
    # Ties: topk on a GPU breaks them by the number of rows, so the keys prefer smaller ids.
    sizes = logprobs.view(torch.int32) & 0x7FFFFFFF  # none is positive
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keys = (-sizes.long() << 32) | (LAST_ID - ids)
    return LAST_ID - (keys.topk(width, dim=-1).values & LAST_ID)


def joined(scores: list[LogprobsTensors]) -> LogprobsTensors:
    """Concatenated; all have the same width."""
    parts = zip(*(chunk.tensors() for chunk in scores), strict=True)
    return LogprobsTensors(*(torch.cat(part) for part in parts))


def token_logprobs(arrived: list[Tensor], widths: list[int]) -> list[TokenLogprob]:
    """LogprobsTensors.tensors() on the host, by row; row i keeps widths[i] alternatives."""
    logprobs, ranks, ids, values = (tensor.tolist() for tensor in arrived)
    return [
        TokenLogprob(logprob, rank, _possible(row_ids[:width], row_values[:width]))
        for logprob, rank, row_ids, row_values, width in zip(
            logprobs, ranks, ids, values, widths, strict=True
        )
    ]


def _possible(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """The alternatives without masked tokens: JSON cannot represent -inf."""
    return [pair for pair in zip(ids, logprobs, strict=True) if pair[1] > -math.inf]
