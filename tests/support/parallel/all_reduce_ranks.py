"""One rank of a group whose memory is a file: a process of its own, on interpreted kernels.

    python -m tests.support.parallel.all_reduce_ranks FOLDER RANK WORLD CALLS

Every rank maps the files of all, so that parts pass between processes as between GPUs.
It writes the SHA-256 of all results into FOLDER/RANK.digest, and the last ones into RANK.pt.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import buffer_shape, buffers_in
from tests.support.interpreter.of_processes import interpret_sooner

MAX_ROWS, SIZE, DTYPE = 9, 96, torch.float32
EPS = 1e-5


def rows_of(call: int) -> int:
    """Calls differ in their rows, and so in their programs."""
    return (3, 1, 9, 4, 2)[call % 5]


def part_of(rank: int, call: int) -> Tensor:
    """What a rank adds in a call: any process can compute it."""
    generator = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randn(rows_of(call), SIZE, generator=generator)


def start_of() -> tuple[Tensor, Tensor]:
    """The residual [MAX_ROWS, SIZE] before the first call, and the norm's weight."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(MAX_ROWS, SIZE, generator=generator), torch.rand(SIZE, generator=generator)


def run(folder: Path, rank: int, world: int, calls: int) -> None:
    shape = buffer_shape(MAX_ROWS, SIZE, world)
    memories = [
        torch.from_file(str(folder / f"{each}.memory"), shared=True, size=prod(shape), dtype=DTYPE)
        for each in range(world)
    ]
    buffers = buffers_in([memory.view(shape) for memory in memories], rank)
    residual, weight = start_of()
    digest, delays = hashlib.sha256(), random.Random(rank)
    for call in range(calls):
        rows = rows_of(call)
        time.sleep(delays.choice((0.0, 0.0, 0.01)))  # now one rank is late, now another
        part = part_of(rank, call)
        out = all_reduce_add_rms_norm(buffers, call % 2, part, residual[:rows], weight, EPS)
        digest.update(out.numpy().tobytes())
    digest.update(residual.numpy().tobytes())
    (folder / f"{rank}.digest").write_text(digest.hexdigest())
    torch.save((residual, out), folder / f"{rank}.pt")


if __name__ == "__main__":
    interpret_sooner()
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
