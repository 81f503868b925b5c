"""Steps that are timed: rows have pages of their own in every group, and states."""

from __future__ import annotations

import random

import pytest
import torch

from attention.kv_groups import KVGroup, KVLayout
from attention.kv_pool import KVPool
from attention.state_pool import StatePool
from benchmarks.step.step_parts import batch_of
from runtime.scheduler.kv_cache.sequence_pages import NO_PAGE

CPU, FP32 = torch.device("cpu"), torch.float32
TWO_GROUPS = KVLayout((KVGroup(0, (0, 2)), KVGroup(24, (1, 3))), 2)


def pool_of(layout: KVLayout, pages: int, states: int = 0) -> KVPool:
    found = None
    if states:
        found = StatePool.allocate(
            layers=1, states=states, conv=(8, 3), matrix=(1, 4, 4), conv_dtype=FP32,
            matrix_dtype=FP32, device=CPU,
        )  # fmt: skip
    return KVPool.allocate(
        layers=layout, pages=pages, kv_heads=1, page_size=16, head_dim=16, dtype=FP32, device=CPU,
        states=found,
    )  # fmt: skip


def test_a_row_has_a_page_of_each_group_but_behind_its_window():
    batch = batch_of([(1, 100), (3, 30)], pool_of(TWO_GROUPS, 14), 131, random.Random(0))
    assert batch is not None and batch.num_new_pages.tolist() == [7, 2]
    pages = batch.new_pages.reshape(-1, 2)
    assert pages[:7, 1].tolist().count(NO_PAGE) == 4, "the token at 99 sees 76 to 99"
    held = [page for page in batch.new_pages.tolist() if page != NO_PAGE]
    assert len(set(held)) == len(held) == 18 - 4


@pytest.mark.parametrize("states", [0, 2])
def test_a_row_has_a_state_where_the_model_has_states(states: int):
    pool = pool_of(KVLayout.uniform(1), 8, states)
    batch = batch_of([(1, 5), (1, 7)], pool, 131, random.Random(0))
    assert batch is not None and batch.state_slots.tolist() == list(range(states))


def test_there_is_no_batch_for_which_the_pool_is_too_small():
    rng, rows = random.Random(0), [(1, 40), (1, 40)]
    assert batch_of(rows, pool_of(KVLayout.uniform(1), 5), 131, rng) is None
    assert batch_of(rows, pool_of(TWO_GROUPS, 9), 131, rng) is None
    assert batch_of(rows, pool_of(KVLayout.uniform(1), 8, states=1), 131, rng) is None
