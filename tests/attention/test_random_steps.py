"""Random steps through every back end against the float64 oracle: the edges of masks together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.attention.attention_oracle import OracleCase, check, make_case
from tests.support.attention.backend_step import attended, back_end

MAX_TOKENS = 128
HEAD_DIMS = (16, 64, 72, 80, 96, 128, 192, 256)
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 100))]


def random_rows(choose: random.Random, page: int, window: int) -> list[tuple[int, int]]:
    """Rows without tokens, without KV, and near the borders of pages, blocks and the window."""
    longest = choose.choice([5, 20, 70, 300])
    rows: list[tuple[int, int]] = []
    for _ in range(choose.randint(1, 6)):
        near = max(0, choose.choice([0, 1, page, 32, 64, window]) + choose.randint(-1, 1))
        kv_len = choose.choice([0, near, choose.randint(1, longest), choose.randint(1, longest)])
        q_len = choose.choice([1, 1, 0, choose.randint(0, 9), kv_len])
        rows.append((min(q_len, kv_len, 40), kv_len))
    if sum(q_len for q_len, _ in rows) > MAX_TOKENS:
        rows = rows[:3]
    return rows if any(q_len for q_len, _ in rows) else [*rows, (1, 1)]


def random_case(choose: random.Random, seed: int, device: str, **fields: Any) -> OracleCase:
    page = choose.choice([16, 32, 64, 128])
    window = choose.choice([0, 0, 1, 2, 15, 16, 17, 31, 32, 33, page - 1, page, page + 1, 100])
    arguments: dict[str, Any] = {
        "dtype": choose.choice([torch.float16, torch.float32]),
        "head_dim": choose.choice(HEAD_DIMS),
        "group": choose.randint(1, 16),
        "page": page,
        "window": window,
        "softcap": choose.choice([0.0, 0.0, 2.0, 30.0]),
        "sinks": choose.random() < 0.5,
        "layout": choose.choice(["HND", "NHD", "joint", "mixed"]),
        "kv_heads": choose.choice([1, 1, 2, 3]),
        "strided_q": choose.random() < 0.3,
        "q_factor": choose.choice([1.0, 1.0, 8.0]),
    }
    rows = random_rows(choose, page, window)
    case = make_case(rows, seed=seed, device=device, **{**arguments, **fields})
    if window and choose.random() < 0.5:
        case.spoil_before_window()
    return case


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["flash2", "batch-invariant"])
def test_a_random_step_of_the_kernels_equals_dense_attention(name: str, seed: int, device: str):
    choose = random.Random(seed)
    case = random_case(choose, seed, device)
    planner = choose.choice(["auto", "greedy", "fa3"]) if name == "flash2" else "auto"
    windows = tuple({0, case.window})
    backend = back_end(case, name, tokens=MAX_TOKENS, windows=windows, split_planner=planner)
    check(case, *attended(case, backend, write=choose.random() < 0.5))


@pytest.mark.parametrize("seed", range(12))
def test_a_random_step_of_the_reference_equals_dense_attention(seed: int, device: str):
    case = random_case(random.Random(seed), seed, device, layout="HND", dtype=torch.float32)
    check(case, *attended(case, back_end(case, "mha")))


def test_the_reference_writes_to_no_copy_of_pages():
    case = make_case([(1, 5)], layout="NHD", dtype=torch.float32)
    with pytest.raises(RuntimeError, match="view"):
        attended(case, back_end(case, "mha"))
