"""Two ranks as two streams of one GPU, in graphs that are replayed together.

    python -m tests.support.parallel.two_streams ROWS REPLAYS

Prints "equal" if both ranks had the same bits, and those of the sum, after every replay, and
"gave up" if one that ran alone with a limit ended its calls and said so, and both were right again
after it.  A rank whose counterpart sends nothing hangs: the caller sets a limit of time.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import (
    TURNS,
    SymmetricBuffers,
    buffer_shape,
    buffers_in,
)

SIZE, DTYPE, EPS = 4096, torch.bfloat16, 1e-6
LAYERS = 6  # calls in a graph: an even number, so that a replay begins with the other turn
LIMIT = 50_000  # microseconds


class Rank:
    """The calls of one rank: a product's part is written, then summed."""

    def __init__(self, buffers: SymmetricBuffers, rows: int, weight: Tensor) -> None:
        self.buffers, self.rows, self.weight = buffers, rows, weight
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        generator = torch.Generator("cuda").manual_seed(buffers.rank)
        self.parts = torch.randn(
            LAYERS, rows, SIZE, dtype=DTYPE, device="cuda", generator=generator
        )
        self.residual = torch.zeros(rows, SIZE, dtype=DTYPE, device="cuda")
        self.scale = torch.ones((), dtype=DTYPE, device="cuda")  # changes between replays
        self.outs: list[Tensor] = []

    def step(self) -> None:
        self.outs = []
        for layer in range(LAYERS):
            part, turn = self.parts[layer] * self.scale, layer % TURNS
            self.outs.append(
                all_reduce_add_rms_norm(self.buffers, turn, part, self.residual, self.weight, EPS)
            )

    def capture(self) -> None:
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.step()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def reset(ranks: list[Rank], limit: int) -> None:
    """Nothing has come, and programs wait so long for it."""
    for rank in ranks:
        rank.buffers.clear()
        rank.buffers.limit_waits(limit)
        rank.residual.zero_()
    torch.cuda.synchronize()


def give_up(rank: Rank) -> None:
    """Its counterpart does not run."""
    reset([rank], LIMIT)
    rank.replay()
    torch.cuda.synchronize()
    assert rank.buffers.gave_up


def main(rows: int, replays: int) -> None:
    shape = buffer_shape(rows, SIZE, 2)
    memories = [torch.full(shape, -0.0, dtype=DTYPE, device="cuda") for _ in range(2)]
    weight = torch.randn(SIZE, dtype=DTYPE, device="cuda")
    ranks = [Rank(buffers_in(memories, index), rows, weight) for index in range(2)]
    # Kernels are compiled and loaded while no other waits: loading one may wait for the device.
    for rank in ranks:
        reset(ranks, 1)
        rank.step()
        torch.cuda.synchronize()
    for rank in ranks:
        rank.capture()
    for rank in ranks:
        reset(ranks, 1)
        rank.replay()
        torch.cuda.synchronize()
    replay_together(ranks, replays)
    print("equal")
    give_up(ranks[0])
    replay_together(ranks, replays)
    assert not ranks[0].buffers.gave_up
    print("gave up")


def replay_together(ranks: list[Rank], replays: int) -> None:
    """Without a limit."""
    reset(ranks, 0)
    expected = torch.zeros_like(ranks[0].residual)
    for replay in range(replays):
        for rank in ranks:
            rank.scale.fill_(1 + replay % 7)
        torch.cuda.synchronize()
        for rank in ranks if replay % 2 else reversed(ranks):
            rank.replay()
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            summed = sum((rank.parts[layer] * rank.scale).float() for rank in ranks)
            expected = (expected.float() + summed).to(DTYPE)
        one, other = ranks
        assert torch.equal(one.residual, other.residual), f"replay {replay}: ranks differ"
        assert torch.equal(one.residual, expected), f"replay {replay}: not the sum"
        pairs = zip(one.outs, other.outs, strict=True)
        assert all(torch.equal(*pair) for pair in pairs), f"replay {replay}: norms differ"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
