"""In a captured step every kernel waits for what it reads, however early it starts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from attention.backend import Capacity
from attention.common import dependent_launch
from attention.dispatch import choose
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from model_zoo.inputs import ModelInput
from tests.support.models.loaded_model import load_model
from tests.support.models.model_shapes import QWEN3_8B, shape_of

PAGE, LAYERS, REPLAYS = 16, 6, 25
CUDA = torch.device("cuda")


def random_step(draw: random.Random, prompts: bool) -> tuple[list[int], list[int]]:
    """q_lens and kv_lens: rows that decode, some long enough to be cut; then perhaps prompts."""
    kv_lens = [draw.choice([1, 40, 700, 3000]) + draw.randint(0, 60) for _ in range(17)]
    q_lens = [1] * len(kv_lens)
    return q_lens + [5, 90] * prompts, kv_lens + [400, 90] * prompts


def make_input(
    kv: KVPool, backend, q_lens: list[int], kv_lens: list[int], pages: torch.Tensor, every: bool
) -> ModelInput:
    """The step of rows whose pages are disjoint parts of `pages`, and a token of padding.

    every: all tokens' states are computed, instead of those of each row's last one
    """
    counts = [-(-length // PAGE) for length in kv_lens]
    firsts = [0, *accumulate(counts)]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = pages[firsts[row] : firsts[row] + count]
    positions, slots = [], []
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            positions.append(position)
            slots.append(int(table[row, position // PAGE]) * PAGE + position % PAGE)
    sums = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32)
    meta = AttentionMetadata(
        cu_seqlens_q=sums.to(CUDA),
        cache_seqlens=torch.tensor(kv_lens, dtype=torch.int32, device=CUDA),
        page_tables=(table.to(CUDA),),
        slot_mappings=(torch.tensor([*slots, -1], device=CUDA),),
        max_seqlen_q=max(q_lens),
        decode_rows=q_lens.count(1),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
    )
    tokens = torch.randint(1000, (len(slots) + 1,), device=CUDA)
    where = torch.tensor([*positions, 0], device=CUDA)
    ends = None if every else sums[1:].to(CUDA, torch.int64) - 1
    return ModelInput(tokens, where, ends, meta, kv, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("every", [False, True], ids=["last tokens", "all tokens"])
@pytest.mark.parametrize("prompts", [False, True], ids=["decode", "prompts too"])
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@torch.inference_mode()
def test_a_captured_step_equals_one_whose_kernels_start_after_each_other(
    prompts: bool,
    every: bool,
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    torch.manual_seed(3)
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16}
    config, dtype = replace(QWEN3_8B, num_layers=LAYERS, **sizes), torch.bfloat16
    model = load_model(
        config, tmp_path, dtype=dtype, device=CUDA, load_format="dummy", quantization=quantization
    )
    q_lens, kv_lens = random_step(random.Random(0), prompts)
    num_pages = sum(-(-length // PAGE) for length in kv_lens)
    kv = KVPool.allocate(
        layers=LAYERS, pages=num_pages, kv_heads=8, page_size=PAGE, head_dim=128, dtype=dtype,
        device=CUDA,
    )  # fmt: skip
    kv.k.normal_()
    kv.v.normal_()
    capacity = Capacity(rows=len(q_lens), tokens=sum(q_lens) + 1)
    backend = choose(CUDA, "flash2", shape_of(config, dtype), capacity)
    inp = make_input(kv, backend, q_lens, kv_lens, torch.randperm(num_pages), every)
    slots = inp.meta.slot_mappings[0][:-1]

    def poison() -> None:
        for pages in (kv.k, kv.v):
            pages[:, slots // PAGE, :, slots % PAGE] = float("nan")

    def run() -> torch.Tensor:
        states = model(replace(inp, meta=backend.plan(inp.meta, kv)))
        return states[: sum(q_lens)]  # not of the padding

    with monkeypatch.context() as patch:
        patch.setattr(dependent_launch, "can_depend", lambda device: False)
        poison()
        expected = run().clone()
    run()  # compiles what has to be
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    assert expected.isfinite().all()
    for _ in range(REPLAYS):
        poison()
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
