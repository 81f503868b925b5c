"""The batch-invariant plan: every key once, in whole splits, and the same on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.batch_invariant.plan import (
    END,
    FIRST,
    Q_LEN,
    ROW,
    TILE,
    UNIT,
    UNIT_ROWS,
    WHOLE,
    BatchInvariantSpec,
)  # fmt: skip
from attention.batch_invariant.plan_device import BatchInvariantPlanner
from tests.support.attention.host_batch_invariant_plan import plan_batch_invariant

Step = list[tuple[int, int]]  # (q_len, kv_len) of each row


def lengths(step: Step) -> tuple[Any, Any]:
    q_lens, kv_lens = np.array(step, dtype=np.int32).reshape(-1, 2).T
    return np.append(0, np.cumsum(q_lens)).astype(np.int32), kv_lens.astype(np.int32)


rows = st.tuples(st.sampled_from([0, 1, 1, 1, 2, 30, 200]), st.integers(0, 5000)).map(
    lambda row: (row[0], row[0] + row[1])
)
specs = st.builds(
    BatchInvariantSpec,
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4, 5, 40]),
    programs=st.sampled_from([1, 16, 264]),
    block_m=st.sampled_from([16, 64]),
    split=st.sampled_from([64, 512]),
    window=st.sampled_from([0, 0, 1, 700]),
    units=st.sampled_from([16, 300]),
)


@settings(max_examples=150, deadline=None)
@given(step=st.lists(rows, max_size=20), spec=specs)
def test_every_tile_reads_its_keys_in_splits_that_begin_at_fixed_positions(
    step: Step, spec: BatchInvariantSpec
):
    items, merges = plan_batch_invariant(*lengths(step), spec)
    found: dict[tuple[int, int], list[Any]] = {}
    for item in items:
        found.setdefault((item[ROW], item[TILE]), []).append(item)
    tiles = {
        (row, tile)
        for row, (q_len, _) in enumerate(step)
        for tile in range(-(-q_len * spec.group // spec.block_m))
    }
    assert set(found) == tiles
    for (row, tile), splits in found.items():
        q_len, kv_len = step[row]
        last = min(((tile + 1) * spec.block_m - 1) // spec.group, q_len - 1)
        first = kv_len - q_len + tile * spec.block_m // spec.group + 1 - spec.window
        seen = [item for item in splits if item[END] > item[FIRST]]
        ends = [end for item in seen for end in (item[FIRST], item[END])]
        assert ends[-1] == kv_len - q_len + last + 1
        assert ends[0] <= (max(first, 0) if spec.window else 0)
        assert ends[1:-1:2] == ends[2::2] and all(item[FIRST] % spec.split == 0 for item in splits)
        assert all((item[UNIT] == WHOLE) == (len(splits) == 1) for item in splits)
    units = items[:, UNIT].tolist()
    cut = [(units.index(own[0][UNIT]), len(own)) for own in found.values() if len(own) > 1]
    assert sorted(map(tuple, merges.tolist())) == sorted(cut)


@settings(max_examples=150, deadline=None)
@given(step=st.lists(rows, max_size=20), spec=specs)
def test_partial_results_have_slots_of_their_own_within_the_buffer(
    step: Step, spec: BatchInvariantSpec
):
    items, _ = plan_batch_invariant(*lengths(step), spec)
    used: set[int] = set()
    for item in items[items[:, UNIT] != WHOLE]:
        height = min(spec.block_m, int(item[Q_LEN]) * spec.group)
        own = range(int(item[UNIT]), int(item[UNIT]) + -(-height // UNIT_ROWS))
        assert used.isdisjoint(own) and own.stop <= spec.units
        used.update(own)


def test_a_row_alone_is_cut_and_many_alike_are_not():
    spec = BatchInvariantSpec(kv_heads=8, group=4, programs=264, block_m=64, split=512)
    items, merges = plan_batch_invariant(*lengths([(1, 4096)]), spec)
    assert len(items) == 8 and merges.tolist() == [[0, 8]]
    items, merges = plan_batch_invariant(*lengths([(1, 4096)] * 64), spec)
    assert len(items) == 64 and len(merges) == 0
    items, merges = plan_batch_invariant(*lengths([(1, 256)] * 63 + [(1, 32768)]), spec)
    assert merges.tolist() == [[63, 64]], "the one that would be the last to end"


STEPS = [
    [],
    [(1, 4000)],
    [(1, 700), (0, 0), (30, 900), (1, 1), (0, 40), (200, 200)],
    [(1, 5000)] * 5,
    [(1, 64), (1, 65), (2, 4000), (1, 0)],
]


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
@pytest.mark.parametrize(("window", "units"), [(0, 100), (700, 16)])
def test_the_device_makes_the_same_plan(step: Step, window: int, units: int, device: str):
    for group, programs in ((4, 16), (5, 264)):
        spec = BatchInvariantSpec(
            kv_heads=2, group=group, programs=programs, block_m=32, split=512, window=window,
            units=units,
        )  # fmt: skip
        tokens = sum(q_len for q_len, _ in step)
        planner = BatchInvariantPlanner(
            spec, max_tokens=tokens, max_rows=8, head_dim=16, device=torch.device(device)
        )
        cu_seqlens_q, cache_seqlens = lengths(step)
        plan = planner.plan(
            torch.from_numpy(cu_seqlens_q).to(device), torch.from_numpy(cache_seqlens).to(device)
        )
        items, merges = plan_batch_invariant(cu_seqlens_q, cache_seqlens, spec)
        assert plan.counts.tolist() == [len(items), len(merges)]
        assert plan.items[: len(items)].tolist() == items.tolist()
        assert plan.merges[: len(merges)].tolist() == merges.tolist()
