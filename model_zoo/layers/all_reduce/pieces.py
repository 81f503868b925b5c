"""PieceCopies: a part of a sum that is copied to the other ranks while it is still being computed.

A product of many rows is computed in pieces.  As soon as one is complete, a copy engine moves it
over NVLink, on a stream of its own, and then a flag: no multiprocessor takes part, so that the
product of the next piece goes on meanwhile.  The kernel of the norm waits for the flag of a piece
before it adds its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.symmetric_buffers import MAX_PIECES, SymmetricBuffers

MAX_FLAG = 1 << 16
ALIGNED = 128  # rows: a tile of the products


@dataclass(frozen=True, slots=True)
class Pieces:
    """How one part is divided, and what its flags are.

    rows  of each piece but the last
    flag  the value that says that a piece has come: another one than that of the sums before it
    """

    rows: int
    flag: int

    def slices(self, count: int) -> Iterator[slice]:
        """Of a part of so many rows."""
        for begin in range(0, count, self.rows):
            yield slice(begin, min(begin + self.rows, count))


class PieceCopies:
    """The copies of one rank.

    Every rank divides the same parts in the same way, so that their flags agree.  Copies are not
    for CUDA graphs: a flag has another value in each step.
    """

    def __init__(self, buffers: SymmetricBuffers) -> None:
        device = buffers.memory.device
        self._buffers = buffers
        self._values = torch.arange(MAX_FLAG, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, count: int, least: int) -> Pieces | None:
        """The pieces of a part of `count` rows, of about `least` at least; None: there would be
        one."""
        number = min(MAX_PIECES // 2, count // least)
        if number < 2 or count > self._buffers.max_rows:
            return None
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            return None
        aligned = min(ALIGNED, least)
        rows = -(-count // number // aligned) * aligned
        return Pieces(rows, 1 + next(self._buffers.copied) % (MAX_FLAG - 1))

    def send(self, turn: int, pieces: Pieces, part: Tensor, rows: slice) -> None:
        """Copy part[rows], which is computed on the current stream, to all other ranks."""
        buffers, index, piece = self._buffers, rows.start // pieces.rows, part[rows]
        flag = self._values[pieces.flag : pieces.flag + 1]
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            part.record_stream(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for rank in range(buffers.world):
                if rank != buffers.rank:
                    buffers.rows_of(turn, buffers.rank, rank)[rows].copy_(piece)
                    flags = buffers.flags_of(turn, buffers.rank, rank)
                    flags[index : index + 1].copy_(flag)
