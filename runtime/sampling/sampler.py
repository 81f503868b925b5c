"""What both samplers take and return: grammar masks, and the sampled tokens on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.transfers import PackedLayout
from runtime.sampling.logprobs import LogprobsTensors
from runtime.scheduler.batch import Batch, Int64Array, Masks, NewRow


@dataclass(frozen=True, slots=True)
class AllowedMasks:
    """Grammar masks of rows [M] of the logits: bits [M, ceil(vocab / 8)], token t is bit t % 8 of
    byte t // 8.  They also decide whether these rows may end: min_tokens does not apply."""

    rows: Int64Array
    bits: NDArray[np.uint8]

    @classmethod
    def of(cls, masks: Masks | None, rows: Int64Array) -> AllowedMasks | None:
        """The masks of a batch, numbered by logits of its `rows`, ascending."""
        if masks is None:
            return None
        numbered = np.searchsorted(rows, np.asarray(masks.rows, dtype=np.int64))
        return cls(numbered, np.frombuffer(masks.bits, np.uint8).reshape(len(numbered), -1))

    def among(self, rows: Int64Array) -> AllowedMasks:
        """The masks of some rows of the logits, ascending; renumbered among these."""
        places = np.searchsorted(rows, self.rows)
        mine = np.append(rows, -1)[places] == self.rows
        return AllowedMasks(places[mine], self.bits[mine])


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """tokens [N], integers, and usable [N], bool or int8, on the device, of N rows of a batch.

    tokens: LAST where no token is allowed; usable: False where some logit is NaN or +inf, and the
    token means nothing; scores: of the rows `scored`, with `widths` alternatives.  If all of these
    are views of one `buffer`, `layout` is theirs.
    """

    rows: list[int]
    tokens: Tensor
    usable: Tensor
    scored: list[int]
    widths: list[int]
    scores: LogprobsTensors | None
    layout: PackedLayout | None = None
    buffer: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What has to be copied to the host."""
        if self.buffer is not None:
            return [self.buffer]
        return [self.tokens, self.usable, *(self.scores.tensors() if self.scores else ())]

    def arrived(self, tensors: list[Tensor]) -> list[Tensor]:
        """tokens, usable and the scores' tensors, from the host copies of tensors()."""
        return tensors if self.layout is None else self.layout.views(tensors[0])


class Sampler(Protocol):
    """Holds the sampling parameters of the sequence in each slot."""

    def reset(self, new_rows: list[NewRow]) -> None:
        """Store those of sequences that move into slots."""
        ...

    def sample(
        self, logits: Tensor, batch: Batch, rows: Int64Array, masks: Masks | None
    ) -> list[SamplerOutput]:
        """Sample `rows` [R] of a batch from their logits [R, vocab], which may be overwritten.

        Updates the slots' last tokens.  Of two outputs with a row, the later one holds.
        """
        ...
