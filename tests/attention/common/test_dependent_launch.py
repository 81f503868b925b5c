"""Kernels that start while the one before them ends still read what was just made for them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from model_zoo.layers.kernels.silu_mul import silu_mul
from tests.support.attention.attention_oracle import make_case
from tests.support.attention.backend_step import back_end, meta_of, newest, pool_of

BATCHES, ROWS, REPLAYS = 40, 24, 20


def random_rows(draw: random.Random, prompts: bool) -> list[tuple[int, int]]:
    """Rows that decode, mostly long enough to be cut, and then perhaps prompts."""
    longest = draw.choice([60, 700, 4000])
    rows = [(1, draw.randint(0, longest)) for _ in range(draw.randint(1, ROWS - 2))]
    return rows + [(5, 50), (20, draw.randint(20, 900))] * prompts


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [False, True], ids=["decode", "prompts too"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # have kernels of their own
def test_attention_right_after_its_planner_reads_the_new_plan(dtype: torch.dtype, prompts: bool):
    """Nothing is launched between the two, and all plans of the graph are in the same buffers."""
    draw = random.Random(0)
    cases = [
        make_case(random_rows(draw, prompts), group=4, dtype=dtype, seed=seed, device="cuda")
        for seed in range(BATCHES)
    ]
    backend = back_end(cases[0], "flash2", rows=ROWS + 2)
    steps = [(case, pool_of(case), meta_of(case), case.results()[1]) for case in cases]

    def run(between: Callable[[], None]) -> list[torch.Tensor]:
        outs = []
        for case, kv, meta, lse in steps:
            planned = backend.plan(meta, kv)
            between()
            outs.append(backend.attend(case.q, kv.layers[0], planned, scale=case.scale, lse=lse))
        return outs

    reference = run(torch.cuda.synchronize)
    wanted_lse = [lse.clone() for *_, lse in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(lambda: None)
    for _ in range(REPLAYS):
        for out, (*_, lse) in zip(outs, steps, strict=True):
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        graph.replay()
        for batch, (out, (*_, lse)) in enumerate(zip(outs, steps, strict=True)):
            same = torch.equal(out, reference[batch]) and torch.equal(lse, wanted_lse[batch])
            assert same, f"batch {batch} of {cases[batch].rows}"


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [False, True], ids=["decode", "prompts too"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_right_after_a_write_reads_it_and_is_done_before_the_next(
    dtype: torch.dtype, prompts: bool
):
    """Two layers on the same pages: the second one's keys must not be there for the first."""
    draw = random.Random(1)
    cases = [
        make_case(random_rows(draw, prompts), group=4, dtype=dtype, seed=seed, device="cuda")
        for seed in range(BATCHES)
    ]
    backend = back_end(cases[0], "flash2", rows=ROWS + 2)
    steps = [(case, pool_of(case), meta_of(case), newest(case)) for case in cases]

    def run(between: Callable[[], None]) -> list[torch.Tensor]:
        outs = []
        for case, kv, meta, (k, v) in steps:
            planned = backend.plan(meta, kv)
            for factor in (1, -1):
                backend.write(factor * k, factor * v, kv.layers[0], planned)
                between()
                out = backend.attend(case.q, kv.layers[0], planned, scale=case.scale)
                between()
                outs.append(silu_mul(out.flatten(1)))  # launched early, too, as layers' kernels are
                between()
        return outs

    reference = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(lambda: None)
    for _ in range(REPLAYS):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for layer, (out, expected) in enumerate(zip(outs, reference, strict=True)):
            assert torch.equal(out, expected), f"step {layer // 2} of {cases[layer // 2].rows}"
