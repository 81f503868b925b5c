"""A step of flash2 in a CUDA graph: captured once, replayed with any batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from attention.backend import Backend, Capacity, Shape
from attention.dispatch import choose
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata

ROWS, TOKENS, PAGE, PAGES, LONGEST = 12, 96, 16, 400, 480
KV_HEADS, GROUP, HEAD_DIM = 2, 4, 128
Lengths = list[tuple[int, int]]  # (q_len, kv_len) a row


@dataclass
class GraphTestStep:
    """The tensors of a step of at most ROWS rows and `tokens` tokens, at fixed addresses."""

    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def make(cls, rows: int, tokens: int) -> GraphTestStep:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        return cls(
            zeros(rows + 1, dtype=torch.int32),
            zeros(rows, dtype=torch.int32),
            zeros(rows, -(-LONGEST // PAGE), dtype=torch.int32),
            zeros(tokens, dtype=torch.int64),
            zeros(tokens, KV_HEADS * GROUP, HEAD_DIM, dtype=torch.bfloat16),
            zeros(tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16),
            zeros(tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16),
        )

    def take(self, lengths: Lengths, draw: random.Random) -> None:
        """Fill in a batch; rows and tokens that it has not are padding."""
        rows, tokens = len(self.cache_seqlens), len(self.slot_mapping)
        padding = [(0, 0)] * (rows - len(lengths))
        q_lens, kv_lens = zip(*lengths, *padding, strict=True)
        free = draw.sample(range(PAGES), PAGES)
        table = [[2**31 - 1] * self.page_table.shape[1] for _ in range(rows)]
        slots: list[int] = []
        for row, (q_len, kv_len) in enumerate(lengths):
            count = -(-kv_len // PAGE)
            own, free = free[:count], free[count:]
            table[row][:count] = own
            positions = range(kv_len - q_len, kv_len)
            slots += [own[position // PAGE] * PAGE + position % PAGE for position in positions]
        self.cu_seqlens_q.copy_(torch.tensor([0, *accumulate(q_lens)]))
        self.cache_seqlens.copy_(torch.tensor(kv_lens))
        self.page_table.copy_(torch.tensor(table))
        self.slot_mapping.copy_(torch.tensor(slots + [-1] * (tokens - len(slots))))
        for tensor in (self.q, self.k, self.v):
            tensor.normal_()

    def run(self, backend: Backend, kv: KVPool, lengths: Lengths) -> Tensor:
        q_lens, kv_lens = zip(*lengths, strict=True)
        meta = AttentionMetadata(
            cu_seqlens_q=self.cu_seqlens_q, cache_seqlens=self.cache_seqlens,
            page_tables=(self.page_table,),
            slot_mappings=(self.slot_mapping,), max_seqlen_q=max(q_lens),
            decode_rows=q_lens.count(1), q_lens=q_lens, kv_lens=kv_lens,
        )  # fmt: skip
        meta = backend.plan(meta, kv)
        outs = []
        for layer in range(2):
            backend.write(self.k, self.v, kv.layers[layer], meta)
            outs.append(backend.attend(self.q, kv.layers[layer], meta, scale=HEAD_DIM**-0.5))
        return torch.stack(outs)


def capture(step: GraphTestStep, backend: Backend, kv: KVPool, lengths: Lengths):
    step.take(lengths, random.Random(0))
    step.run(backend, kv, lengths)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(backend, kv, lengths)
    return graph, out


def random_lengths(draw: random.Random, most_tokens: int) -> Lengths:
    lengths: Lengths = []
    room = TOKENS - ROWS
    for _ in range(draw.randint(1, ROWS)):
        most = min(draw.choice([1, 1, 3, 8, 40]), most_tokens)
        q_len = draw.randint(1, 1 + min(most - 1, room))
        room -= q_len - 1
        lengths.append((q_len, draw.randint(q_len, LONGEST)))
    return sorted(lengths, key=lambda pair: pair[0] != 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "planner"),
    [
        ("flash1", "auto"),
        ("flash2", "auto"),
        ("flash2", "greedy"),
        ("batch-invariant", "auto"),
    ],
)
def test_graphs_that_share_a_workspace_replay_any_batch_as_eager_code_runs_it(
    name: str, planner: str
):
    """One graph for rows of a token, one for decode rows of up to eight, one for any mix with
    prompts, each captured at one batch."""
    shape = Shape(
        heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE,
        dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    )  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    backend, eager = (
        choose(
            device,
            name,
            shape,
            Capacity(rows=ROWS, tokens=TOKENS, row_tokens=8),
            split_planner=planner,
        )
        for _ in range(2)
    )
    pool = dict(
        layers=2, pages=PAGES, kv_heads=KV_HEADS, page_size=PAGE, head_dim=HEAD_DIM,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    kv, other = KVPool.allocate(**pool), KVPool.allocate(**pool)
    for mine, theirs in ((kv.k, other.k), (kv.v, other.v)):
        mine.normal_()
        theirs.copy_(mine)
    tokens = {1: ROWS, 8: TOKENS, 40: TOKENS}  # of a row at most -> of the step
    captured = {1: [(1, 7), (1, 200)], 8: [(8, 20), (1, 9)], 40: [(1, 20), (9, 30)]}
    graphs = {}
    for most, lengths in captured.items():
        step = GraphTestStep.make(ROWS, tokens[most])
        graphs[most] = step, *capture(step, backend, kv, lengths)
    other.k.copy_(kv.k)
    other.v.copy_(kv.v)
    draw = random.Random(5)
    for replay in range(1000):
        most = draw.choice(list(graphs))
        lengths = random_lengths(draw, most)
        step, graph, out = graphs[most]
        step.take(lengths, draw)
        graph.replay()
        expected = step.run(eager, other, captured[most])
        count = sum(q_len for q_len, _ in lengths)
        assert torch.equal(out[:, :count], expected[:, :count]), (replay, lengths)
    assert torch.equal(kv.k, other.k) and torch.equal(kv.v, other.v)
