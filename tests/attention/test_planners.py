"""Split planners: every block served once, loads within their bounds, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.planner.fa3 import fa3_counts, plan_fa3, split_cap
from attention.planner.plan import (
    END,
    FIRST,
    HEAD,
    KV_LEN,
    PARTIAL,
    Q_LEN,
    Q_START,
    ROW,
    HostPlan,
    PlanSpec,
    planned_rows,
)
from attention.planner.uneven import plan_uneven

PLANNERS = {"fa3": plan_fa3, "uneven": plan_uneven}


@st.composite
def specs(draw: st.DrawFn) -> PlanSpec:
    return PlanSpec(
        kv_heads=draw(st.integers(1, 16)),
        programs=draw(st.sampled_from([1, 2, 7, 78, 108, 132, 264, 396])),
        max_q_len=draw(st.integers(1, 8)),
        window=draw(st.sampled_from([0, 0, 1, 128, 4096])),
        block=draw(st.sampled_from([16, 64, 128])),
        piece_cost=draw(st.sampled_from([0, 1, 8, 30])),
        merge_cost=draw(st.sampled_from([0, 8, 20])),
        merge_piece_cost=draw(st.sampled_from([0, 1, 5])),
        min_blocks=draw(st.integers(1, 4)),
    )


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """cu_seqlens_q, cache_seqlens: equal, even, skewed or short rows; some prefill, some absent."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    num_rows = draw(st.one_of(st.integers(0, 12), st.integers(0, max_rows)))
    longest = draw(st.sampled_from([1, 70, 1000, 9000, 200_000]))
    shape = draw(st.sampled_from(["equal", "even", "skewed"]))
    if shape == "equal":
        kv_lens = np.full(num_rows, random.integers(0, longest + 1))
    elif shape == "even":
        kv_lens = random.integers(0, longest + 1, num_rows)
    else:
        kv_lens = np.minimum(np.exp(random.normal(5, 2.5, num_rows)), longest)
    q_lens = random.choice(draw(st.sampled_from([[1], [0, 1], [0, 1, 2, 5, 8, 9, 300]])), num_rows)
    cu_seqlens_q = np.append(0, np.cumsum(q_lens)).astype(np.int32)
    return cu_seqlens_q, np.maximum(kv_lens, q_lens * (q_lens > 1)).astype(np.int32)


def units_of(plan: HostPlan) -> dict[tuple[int, int], np.ndarray]:
    """Indices of the pieces of each (row, KV head), in the order of `work`."""
    units: dict[tuple[int, int], list[int]] = {}
    for index, piece in enumerate(plan.work.tolist()):
        units.setdefault((piece[ROW], piece[HEAD]), []).append(index)
    return {unit: np.array(indices) for unit, indices in units.items()}


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=60, deadline=None)
@given(batch=batches(), spec=specs())
def test_every_block_of_every_planned_row_and_head_is_served_once(name, batch, spec):
    cu_seqlens_q, cache_seqlens = batch
    plan = PLANNERS[name](cu_seqlens_q, cache_seqlens, spec)
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    units = units_of(plan)
    wanted = {(row, head) for row in rows.row.tolist() for head in range(spec.kv_heads)}
    assert set(units) == wanted
    places = {row: place for place, row in enumerate(rows.row.tolist())}
    for (row, _), indices in units.items():
        pieces, place = plan.work[indices], places[row]
        begin, kv_len = rows.first_block[place] * spec.block, rows.kv_len[place]
        assert (np.diff(indices) == 1).all(), "pieces of a row and head are not neighbours"
        assert pieces[0, FIRST] == begin
        assert pieces[-1, END] == kv_len
        assert (pieces[1:, FIRST] == pieces[:-1, END]).all()
        assert (pieces[:, FIRST] % spec.block == 0).all()
        assert (pieces[:, FIRST] < pieces[:, END]).all() or len(pieces) == 1
        assert (pieces[:, PARTIAL] == (len(pieces) > 1)).all()
        assert (pieces[:, Q_START] == cu_seqlens_q[row]).all()
        assert (pieces[:, Q_LEN] == rows.q_len[place]).all()
        assert (pieces[:, KV_LEN] == kv_len).all()


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=60, deadline=None)
@given(batch=batches(), spec=specs())
def test_what_is_cut_is_merged_once_and_fits_the_buffers(name, batch, spec):
    plan = PLANNERS[name](*batch, spec)
    cut = sorted((i[0], len(i)) for i in units_of(plan).values() if len(i) > 1)
    assert sorted(map(tuple, plan.merges[plan.merges[:, 1] > 0].tolist())) == cut
    assert not plan.merges[plan.merges[:, 1] == 0].any()
    assert plan.merges.shape == (spec.programs, 2)
    assert len(plan.work) <= spec.capacity(len(batch[1]))
    assert plan.work.dtype == plan.starts.dtype == plan.merges.dtype == np.int32
    assert plan.starts.shape == (spec.programs + 1,)
    assert plan.starts[-1] == len(plan.work)
    assert (np.diff(plan.starts) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(batch=batches(), spec=specs())
def test_an_uneven_share_is_at_most_the_mean_and_a_block_and_a_piece(batch, spec):
    plan = plan_uneven(*batch, spec)
    rows = planned_rows(*batch, spec)
    unit_cost = np.maximum(rows.blocks.astype(np.int64) * 8 + spec.piece_cost, 1)
    total = int(unit_cost.sum()) * spec.kv_heads
    used = min(max(total // (spec.piece_cost + 8 * spec.min_blocks), 1), spec.programs)
    blocks = -(-plan.work[:, END] // spec.block) - plan.work[:, FIRST] // spec.block
    costs = np.append(0, np.cumsum(blocks.astype(np.int64) * 8 + spec.piece_cost))
    loads = np.diff(costs[plan.starts])
    assert (loads <= total / used + 8 + spec.piece_cost).all()
    partials = np.diff(np.append(0, np.cumsum(plan.work[:, PARTIAL]))[plan.starts])
    assert (partials <= 2).all()


@pytest.mark.parametrize("name", ["fa3"])
@settings(max_examples=40, deadline=None)
@given(batch=batches(), spec=specs())
def test_a_queue_holds_the_longest_pieces_first(name, batch, spec):
    plan = PLANNERS[name](*batch, spec)
    assert plan.queued
    assert (plan.starts == len(plan.work)).all()
    lengths = [plan.work[i[0], END] - plan.work[i[0], FIRST] for i in units_of(plan).values()]
    parts = -(-np.array(lengths) // spec.block)
    assert (np.diff(parts) <= 0).all()


def test_fa3_counts_are_those_of_the_published_example():
    # 32 requests of 4096 tokens in blocks of 176 on 78 multiprocessors: 3 parts, two waves.
    spec = PlanSpec(kv_heads=1, programs=78, block=176)
    blocks = np.full(32, 24, dtype=np.int32)
    assert fa3_counts(blocks, spec, split_cap(1, 78, 24)).tolist() == [3] * 32
    plan = plan_fa3(np.arange(33, dtype=np.int32), np.full(32, 4096, dtype=np.int32), spec)
    assert len(plan.work) == 96


def test_fa3_caps_are_those_of_its_heuristic():
    assert [split_cap(heads, 132) for heads in (1, 8, 105, 106)] == [109, 15, 5, 1]
    assert split_cap(1, 132, 4) == 1


def test_fa3_cuts_no_batch_of_more_rows_than_it_plans():
    spec = PlanSpec(kv_heads=1, programs=132)
    blocks = np.ones(993, dtype=np.int32)
    blocks[0] = 1000
    assert fa3_counts(blocks[:992], spec, 109)[0] == 59
    assert (fa3_counts(blocks, spec, 109) == 1).all()
