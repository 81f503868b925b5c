"""Split planners: every block served once, loads within their bounds, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.planner.queued_plans import (
    fa3_counts,
    greedy_counts,
    largest_part,
    plan_fa3,
    price,
    split_cap,
)
from attention.planner.split_plan import (
    END,
    FIRST,
    HEAD,
    KV_LEN,
    PARTIAL,
    Q_LEN,
    Q_START,
    SplitPlanSpec,
    planned_rows,
)
from attention.planner.stream_k import interleaved_heads, plan_stream_k
from tests.support.attention.plan_cases import PLANNERS, batches, specs, units_of
from tests.support.examples import examples


@pytest.mark.parametrize("name", PLANNERS)
@examples(60)
@given(batch=batches(), spec=specs())
def test_every_block_of_every_planned_row_and_head_is_served_once(name, batch, spec):
    cu_seqlens_q, cache_seqlens = batch
    plan = PLANNERS[name](cu_seqlens_q, cache_seqlens, spec)
    rows = planned_rows(cu_seqlens_q, cache_seqlens, spec)
    units = units_of(plan)
    expected = {(row, head) for row in rows.row.tolist() for head in range(spec.kv_heads)}
    assert set(units) == expected
    places = {row: place for place, row in enumerate(rows.row.tolist())}
    for (row, _), indices in units.items():
        work_tiles, place = plan.work[indices], places[row]
        begin, kv_len = rows.first_block[place] * spec.block, rows.kv_len[place]
        assert (np.diff(indices) == 1).all(), "tiles of a row and head are not neighbours"
        assert work_tiles[0, FIRST] == begin
        assert work_tiles[-1, END] == kv_len
        assert (work_tiles[1:, FIRST] == work_tiles[:-1, END]).all()
        assert (work_tiles[:, FIRST] % spec.block == 0).all()
        assert (work_tiles[:, FIRST] < work_tiles[:, END]).all() or len(work_tiles) == 1
        assert (work_tiles[:, PARTIAL] == (len(work_tiles) > 1)).all()
        assert (work_tiles[:, Q_START] == cu_seqlens_q[row]).all()
        assert (work_tiles[:, Q_LEN] == rows.q_len[place]).all()
        assert (work_tiles[:, KV_LEN] == kv_len).all()


@pytest.mark.parametrize("name", PLANNERS)
@examples(60)
@given(batch=batches(), spec=specs())
def test_what_is_cut_is_merged_once_and_fits_the_buffers(name, batch, spec):
    plan = PLANNERS[name](*batch, spec)
    cut = sorted((i[0], len(i)) for i in units_of(plan).values() if len(i) > 1)
    assert sorted(map(tuple, plan.merges[plan.merges[:, 1] > 0].tolist())) == cut
    assert not plan.merges[len(cut) :].any(), "entries are not one after the other"
    assert plan.merges.shape == (spec.programs, 2)
    assert len(plan.work) <= spec.capacity(len(batch[1]))
    assert plan.work.dtype == plan.starts.dtype == plan.merges.dtype == np.int32
    assert plan.starts.shape == (spec.programs + 1,)
    assert plan.starts[-1] == len(plan.work)
    assert (np.diff(plan.starts) >= 0).all()


@examples(60)
@given(batch=batches(), spec=specs())
def test_a_stream_k_share_is_at_most_the_mean_and_a_block_and_a_work_tile(batch, spec):
    plan = plan_stream_k(*batch, spec)
    rows = planned_rows(*batch, spec)
    unit_cost = np.maximum(rows.blocks.astype(np.int64) * 8 + spec.work_tile_cost, 1)
    interleaved = interleaved_heads(spec)  # so many plans, each of its own heads and programs
    total = int(unit_cost.sum()) * spec.kv_heads // interleaved
    used = min(max(total // (8 * spec.min_blocks), 1), spec.programs // interleaved)
    blocks = -(-plan.work[:, END] // spec.block) - plan.work[:, FIRST] // spec.block
    costs = np.append(0, np.cumsum(blocks.astype(np.int64) * 8 + spec.work_tile_cost))
    loads = np.diff(costs[plan.starts])
    assert (loads <= total / used + 8 + spec.work_tile_cost).all()
    partials = np.diff(np.append(0, np.cumsum(plan.work[:, PARTIAL]))[plan.starts])
    assert (partials <= 2).all()


@examples(60)
@given(batch=batches(), spec=specs())
def test_neighbouring_heads_are_read_alike_by_programs_that_run_at_once(batch, spec):
    plan = plan_stream_k(*batch, spec)
    interleaved = interleaved_heads(spec)
    work = plan.work.reshape(interleaved, -1, 8)
    heads = work[:, :, HEAD]
    assert (heads[0] % interleaved == 0).all()
    assert (heads == heads[0] + np.arange(interleaved)[:, None]).all()
    assert (np.delete(work, HEAD, axis=2) == np.delete(work[0], HEAD, axis=1)).all()
    loads = np.diff(plan.starts).reshape(interleaved, -1)
    assert (loads == loads[0]).all()


def test_as_many_heads_are_interleaved_as_divide_heads_and_programs():
    heads = [1, 2, 5, 8, 12, 16]
    assert [interleaved_heads(SplitPlanSpec(n, 132)) for n in heads] == [1, 2, 1, 4, 12, 4]
    assert [interleaved_heads(SplitPlanSpec(n, 264)) for n in heads] == [1, 2, 1, 8, 12, 8]
    assert [interleaved_heads(SplitPlanSpec(n, 78)) for n in heads] == [1, 2, 1, 2, 6, 2]


@pytest.mark.parametrize("name", ["fa3", "greedy"])
@examples(40)
@given(batch=batches(), spec=specs())
def test_a_queue_holds_the_longest_work_tiles_first(name, batch, spec):
    plan = PLANNERS[name](*batch, spec)
    assert plan.queued
    assert (plan.starts == len(plan.work)).all()
    lengths = [plan.work[i[0], END] - plan.work[i[0], FIRST] for i in units_of(plan).values()]
    parts = -(-np.array(lengths) // spec.block)
    assert (np.diff(parts) <= 0).all()


def test_fa3_counts_are_those_of_the_published_example():
    # 32 requests of 4096 tokens in blocks of 176 on 78 multiprocessors: 3 parts, two waves.
    spec = SplitPlanSpec(kv_heads=1, programs=78, block=176)
    blocks = np.full(32, 24, dtype=np.int32)
    assert fa3_counts(blocks, spec, split_cap(1, 78, 24)).tolist() == [3] * 32
    plan = plan_fa3(np.arange(33, dtype=np.int32), np.full(32, 4096, dtype=np.int32), spec)
    assert len(plan.work) == 96


def test_fa3_caps_are_those_of_its_heuristic():
    assert [split_cap(heads, 132) for heads in (1, 8, 105, 106)] == [109, 15, 5, 1]
    assert split_cap(1, 132, 4) == 1


def test_fa3_cuts_no_batch_of_more_rows_than_it_plans():
    spec = SplitPlanSpec(kv_heads=1, programs=132)
    blocks = np.ones(993, dtype=np.int32)
    blocks[0] = 1000
    assert fa3_counts(blocks[:992], spec, 109)[0] == 59
    assert (fa3_counts(blocks, spec, 109) == 1).all()


@examples(60)
@given(batch=batches(), spec=specs())
def test_greedy_is_never_dearer_than_fa3_by_its_own_price(batch, spec):
    blocks = planned_rows(*batch, spec).blocks
    cap = split_cap(spec.kv_heads, spec.programs)
    counts = greedy_counts(blocks, spec, cap)
    assert price(blocks, counts, spec) <= price(blocks, fa3_counts(blocks, spec, cap), spec)


def one_split_at_a_time(blocks: np.ndarray, counts: np.ndarray, spec: SplitPlanSpec) -> np.ndarray:
    """The published strategy: take a part from where the others stay shortest, until one wave."""
    counts = counts.copy()
    while counts.sum() * spec.kv_heads > spec.programs and (counts > 1).any():
        without = np.where(counts > 1, -(-blocks // np.maximum(counts - 1, 1)), 1 << 30)
        counts[np.argmin(without)] -= 1
    return counts


@examples(100)
@given(
    blocks=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    kv_heads=st.sampled_from([1, 2, 8]),
    programs=st.sampled_from([78, 132]),
)
def test_one_wave_is_what_taking_one_part_at_a_time_ends_with(blocks, kv_heads, programs):
    spec = SplitPlanSpec(kv_heads=kv_heads, programs=programs)
    rows = np.array(blocks, dtype=np.int32)
    fa3 = fa3_counts(rows, spec, 1 << 20)
    if fa3.sum() * kv_heads <= programs or len(rows) * kv_heads > programs:
        return
    loop = one_split_at_a_time(rows, fa3, spec)
    largest = largest_part(rows, spec, 1)
    assert largest == max((-(-rows // loop)).max(), 1)
    assert np.maximum(-(-rows // largest), 1).sum() * kv_heads <= programs


def test_greedy_counts_are_those_of_the_published_examples():
    spec = SplitPlanSpec(kv_heads=1, programs=78, block=176)
    assert greedy_counts(np.full(32, 24, dtype=np.int32), spec, 21).tolist() == [2] * 32
    for num_rows in range(20, 24):  # 36,864 tokens: two waves of a quarter each, or fewer blocks
        blocks = np.full(num_rows, 210, dtype=np.int32)
        fa3 = fa3_counts(blocks, spec, 67)
        assert fa3.tolist() == [4] * num_rows
        assert largest_part(blocks, spec, 1) == 70
        assert price(blocks, greedy_counts(blocks, spec, 67), spec) <= 0.7 * price(
            blocks, fa3, spec
        )


def test_greedy_takes_a_second_wave_where_one_is_half_empty():
    # 50 rows on 78 programs: whole, one wave of 100 blocks; in three parts, two waves of 34.
    spec = SplitPlanSpec(kv_heads=1, programs=78)
    assert greedy_counts(np.full(50, 100, dtype=np.int32), spec, 67).tolist() == [3] * 50
