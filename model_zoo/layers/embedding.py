"""Token embedding, and the LM head, which may share its weights (tied)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope
from model_zoo.parallel.communicator import Alone, Communicator
from model_zoo.parallel.shard import Part
from model_zoo.quantization.weight_scheme import WeightScheme


class Embedding(nn.Module):
    """weight [rows, size]; ids [T] -> [T, size].

    scale  of what is looked up, not of the weight, which a tied head shares; rounded to dtype
    part   the ids whose rows the rank has, which come first in `weight`; None: all.  Those of the
           others are looked up by the others, and added
    """

    def __init__(
        self,
        rows: int,
        size: int,
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
        part: Part | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.part, self._communicator = part, communicator or Alone()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        return self._communicator.all_reduce(self.own_rows(ids))

    def own_rows(self, ids: Tensor) -> Tensor:
        """[T, size], zeros for the ids of other ranks."""
        if self.part is None:
            found = F.embedding(ids, self.weight)
        else:
            begin, end = self.own_ids
            own = (ids >= begin) & (ids < end)
            found = F.embedding(torch.where(own, ids - begin, 0), self.weight)
            found = torch.where(own[:, None], found, 0)
        return found if self.scale == 1.0 else found * self.scale

    @property
    def own_ids(self) -> tuple[int, int]:
        """The first of those that the rank has, and the end."""
        assert self.part is not None
        [found] = self.part.ranges
        return found

    def for_norm(self, own_rows: Tensor) -> Addend:
        """The sum of own_rows of all ranks, which the next norm may compute."""
        return self._communicator.for_norm(own_rows, of_embeddings=True)


def embed(
    embedding: Embedding, norm: RMSNorm, ropes: Sequence[Rope], tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """-> first layer's norm of the embeddings, embeddings [T, size], Rope.rows of each rope."""
    if embedding.part is not None:
        own_rows, zeros, cos_sin = _own_rows(embedding, ropes, tokens, positions)
        x, residual = norm.add(embedding.for_norm(own_rows), zeros)
        assert isinstance(x, Tensor), "no consumer takes anything else"
        return x, residual, cos_sin
    if not fused_kernels.use_fused_kernels(tokens.device):
        residual = embedding(tokens)
        x, residual = norm.add(None, residual)
        assert isinstance(x, Tensor)
        return x, residual, [rope.rows(positions, residual.dtype) for rope in ropes]
    from model_zoo.layers.kernels.embed import embed as fused

    return fused(
        tokens,
        positions,
        embedding.weight,
        norm.weight,
        norm.eps,
        _frequencies(ropes),
        embedding_scale=embedding.scale,
        plus_one=norm.plus_one,
    )


def _own_rows(
    embedding: Embedding, ropes: Sequence[Rope], tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """-> Embedding.own_rows and zeros, [T, size] each, and Rope.rows of each rope."""
    if not fused_kernels.use_fused_kernels(tokens.device):
        own_rows = embedding.own_rows(tokens)
        cos_sin = [rope.rows(positions, own_rows.dtype) for rope in ropes]
        return own_rows, torch.zeros_like(own_rows), cos_sin
    from model_zoo.layers.kernels.embed import embed_own

    scale = embedding.scale
    ids, ropes_of = embedding.own_ids, _frequencies(ropes)
    return embed_own(tokens, positions, embedding.weight, ids, ropes_of, embedding_scale=scale)


def _frequencies(ropes: Sequence[Rope]) -> list[tuple[Tensor, float]]:
    return [(rope.frequencies, rope.scale) for rope in ropes]


class LMHead(Linear):
    """hidden [R, size] -> logits [R, vocab] of its dtype; tied: the embedding to share."""

    def __init__(
        self,
        vocab: int,
        size: int,
        dtype: torch.dtype,
        tied: Embedding | None,
        *,
        parts: Mapping[str, int] | None = None,
        scheme: WeightScheme | None = None,
        cuts: Mapping[str, Part] | None = None,
    ) -> None:
        """parts, scheme, cuts: as in Linear; unused by a tied head.

        vocab: rows of padding included, which a rank's part of the vocabulary may end with
        """
        own = None if tied is not None else parts
        super().__init__(size, vocab, bias=False, dtype=dtype, parts=own, scheme=scheme, cuts=cuts)
        self._tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    def prepare(self, *, keep_weight: bool = False) -> None:
        super().prepare(keep_weight=keep_weight or self._tied)
