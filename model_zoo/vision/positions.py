"""Positions of a prompt with images (M-RoPE): triples of frame, row and column.

The three of a text token are equal.  An image takes as many positions as its longer side has
tokens, which are fewer than its tokens; so a text token's position is its place in the prompt and a
delta, which is at most 0 and the same up to the next image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ImageSpan(NamedTuple):
    """An image's place in a prompt, and how many tokens high and wide it is."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


class ImagePositions:
    """Of a prompt with the images `spans`, in order, and what is generated after it.

    Source: transformers' Qwen3VLModel.get_rope_index.
    """

    def __init__(self, spans: Sequence[ImageSpan]) -> None:
        self.spans = tuple(spans)
        self._deltas = [0]  # before each image, and after the last
        for span in spans:
            saved = max(span.rows, span.columns) - span.rows * span.columns
            self._deltas.append(self._deltas[-1] + saved)

    def delta(self, place: int) -> int:
        """The position of a text token at this place in the prompt, less the place."""
        return self._deltas[sum(span.end <= place for span in self.spans)]

    def overlapping(self, start: int, end: int) -> list[int]:
        """The images that have tokens among those from `start` up to `end`."""
        return [
            index for index, span in enumerate(self.spans) if span.start < end and span.end > start
        ]

    def triples(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, end - start]: the positions of the tokens from place `start` up to `end`."""
        places = np.arange(start, end)
        deltas = np.zeros(end - start, dtype=np.int64)
        for span, delta in zip(self.spans, self._deltas[1:], strict=True):
            deltas[places >= span.end] = delta
        triples = np.tile(places + deltas, (3, 1))
        for index in self.overlapping(start, end):
            span = self.spans[index]
            first, last = max(span.start, start), min(span.end, end)
            token = np.arange(first, last) - span.start
            begin = span.start + self._deltas[index]
            frame = np.zeros_like(token)
            inside = np.stack([frame, token // span.columns, token % span.columns])
            triples[:, first - start : last - start] = begin + inside
        return triples
