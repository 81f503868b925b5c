"""Tile plans: every query row of a prefill row sees every KV position it should, exactly once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from attention.planner import prefill_tiles as columns
from attention.planner.prefill_tiles import TileSpec
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.split_plan import Int32Array
from tests.support.attention.host_tiles import plan_tiles

SPECS = {
    "group 4": TileSpec(kv_heads=2, group=4, programs=40),
    "group 7, window": TileSpec(kv_heads=1, group=7, programs=12, window=700),
    "group 64, small tiles": TileSpec(kv_heads=8, group=64, programs=132, block_m=64, block_n=16),
    "one KV head": TileSpec(kv_heads=1, group=8, programs=132, min_q_len=1),
}


def batch(rng: np.random.Generator, rows: int, longest: int) -> tuple[Int32Array, Int32Array]:
    """cu_seqlens_q, cache_seqlens of rows with and without a prefix, some of no or one token."""
    q_len = rng.integers(0, longest, rows) * rng.integers(0, 2, rows) + rng.integers(0, 3, rows)
    prefix = rng.integers(0, 4 * longest, rows) * rng.integers(0, 2, rows)
    cu_seqlens_q = np.append(0, np.cumsum(q_len)).astype(np.int32)
    return cu_seqlens_q, (q_len + prefix).astype(np.int32)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows, longest", [(1, 30), (3, 200), (40, 60), (5, 1000)])
def test_every_query_is_in_one_tile_that_visits_all_it_sees_once(
    name: str, rows: int, longest: int
) -> None:
    spec, rng = SPECS[name], np.random.default_rng(rows * longest)
    for _ in range(20):
        cu_seqlens_q, cache_seqlens = batch(rng, rows, longest)
        plan = plan_tiles(cu_seqlens_q, cache_seqlens, spec)
        visits: dict[tuple[int, int], list[tuple[int, int]]] = {}
        cut: dict[tuple[int, int], bool] = {}
        for item in plan.items:
            key = int(item[columns.ROW]), int(item[columns.TILE])
            visits.setdefault(key, []).append((int(item[columns.FIRST]), int(item[columns.END])))
            cut[key] = bool(item[columns.PARTIAL])
        q_lens = np.diff(cu_seqlens_q)
        expected = {
            (row, tile)
            for row, q_len in enumerate(q_lens)
            if q_len >= spec.min_q_len
            for tile in range(-(-int(q_len) * spec.group // spec.block_m))
        }
        assert set(visits) == expected
        for (row, tile), splits in visits.items():
            splits.sort()
            assert cut[row, tile] == (len(splits) > 1)
            assert all(end == first for (_, end), (first, _) in pairwise(splits))
            first_query = tile * spec.block_m // spec.group
            last_query = min(((tile + 1) * spec.block_m - 1) // spec.group, int(q_lens[row]) - 1)
            position = int(cache_seqlens[row] - q_lens[row])
            assert splits[-1][1] == position + last_query + 1
            seen = position + first_query + 1 - spec.window if spec.window else 0
            assert max(seen, 0) // spec.block_n * spec.block_n == splits[0][0]
            assert all(first % spec.block_n == 0 for first, _ in splits)


@pytest.mark.parametrize("name", SPECS)
def test_capacity_holds_any_step_of_its_tokens_and_rows(name: str) -> None:
    spec, rng = SPECS[name], np.random.default_rng(1)
    for _ in range(200):
        cu_seqlens_q, cache_seqlens = batch(rng, int(rng.integers(1, 30)), 100)
        plan = plan_tiles(cu_seqlens_q, cache_seqlens, spec)
        tokens, rows = int(cu_seqlens_q[-1]), len(cache_seqlens)
        assert len(plan.items) <= spec.capacity(tokens, rows)
        if len(plan.merges):
            assert len(plan.items) <= spec.split_items


def test_tiles_come_longest_first() -> None:
    spec = TileSpec(kv_heads=8, group=4, programs=132)
    plan = plan_tiles(
        np.array([0, 300, 301, 900], np.int32), np.array([300, 5000, 1800], np.int32), spec
    )
    blocks = -(-plan.items[:, columns.END] // spec.block_n)
    assert len(plan.merges) == 0 and (np.diff(blocks) <= 0).all()
    assert plan.items[0, columns.ROW] == 2 and 1 not in plan.items[:, columns.ROW]


def test_few_tiles_on_a_long_prefix_are_cut_so_that_all_work_tiles_run_at_once() -> None:
    spec = TileSpec(kv_heads=1, group=8, programs=132)
    plan = plan_tiles(np.array([0, 32], np.int32), np.array([65536], np.int32), spec)  # two tiles
    lengths = plan.items[:, columns.END] - plan.items[:, columns.FIRST]
    assert 120 <= len(plan.items) <= 132
    assert lengths.max() <= 1.1 * 2 * 65536 / 132 + spec.block_n
    assert (plan.items[:, columns.PARTIAL] == 1).all()
    starts, counts = plan.merges.T
    assert (starts + counts == np.append(starts[1:], len(plan.items))).all()


def test_a_short_step_is_not_cut_into_work_tiles_of_less_than_four_blocks() -> None:
    spec = TileSpec(kv_heads=1, group=8, programs=132)
    plan = plan_tiles(np.array([0, 64], np.int32), np.array([512], np.int32), spec)
    lengths = plan.items[:, columns.END] - plan.items[:, columns.FIRST]
    assert len(plan.merges) == 4 and lengths.min() > 3 * spec.block_n


@pytest.mark.parametrize(
    ("name", "max_rows"),
    [
        *((name, 3) for name in SPECS),
        *((name, 60) for name in SPECS if "64" not in name),
        pytest.param("group 64, small tiles", 60, marks=pytest.mark.slow),
    ],
)
def test_plan_on_the_device_is_the_one_in_numpy(name: str, max_rows: int, device: str) -> None:
    spec, rng = SPECS[name], np.random.default_rng(max_rows)
    longest, steps = (300, 60) if device == "cuda" else (30, 6)
    max_tokens = max_rows * (longest + 2)
    tiler = DeviceTiler(
        spec, max_tokens=max_tokens, max_rows=max_rows, head_dim=16, device=torch.device(device)
    )
    cut = 0
    for step in range(steps):
        few = step % 3 == 0  # tokens, on long prefixes
        rows = int(rng.integers(0, 4 if few else max_rows + 1))
        cu_seqlens_q, cache_seqlens = batch(rng, rows, int(rng.choice([3, longest])))
        if few:
            cache_seqlens += rng.integers(0, 1 << 17, len(cache_seqlens)).astype(np.int32)
        want = plan_tiles(cu_seqlens_q, cache_seqlens, spec)
        tiles = tiler.plan(*(torch.from_numpy(x).to(device) for x in (cu_seqlens_q, cache_seqlens)))
        num_items, num_merges, tokens = (int(count) for count in tiles.counts)
        assert (num_items, num_merges) == (len(want.items), len(want.merges))
        assert tokens == want.tokens
        assert (tiles.items[:num_items].cpu().numpy() == want.items).all()
        assert (tiles.merges[:num_merges].cpu().numpy() == want.merges).all()
        assert int(tiles.queue) == 0
        cut += num_merges > 0
    assert cut > 0


def test_tokens_are_those_that_rows_with_tiles_see() -> None:
    cu_seqlens_q, cache_seqlens = np.array([0, 300, 301, 901]), np.array([300, 5000, 1800])
    whole = TileSpec(kv_heads=8, group=4, programs=132)
    assert plan_tiles(cu_seqlens_q, cache_seqlens, whole).tokens == 300 + 1800
    windowed = TileSpec(kv_heads=8, group=4, programs=132, window=101)
    assert plan_tiles(cu_seqlens_q, cache_seqlens, windowed).tokens == 300 + 700


def test_a_step_of_too_many_rows_is_refused(device: str) -> None:
    tiler = DeviceTiler(
        SPECS["group 4"], max_tokens=9, max_rows=2, head_dim=16, device=torch.device(device)
    )
    lens = torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="3 rows is over the tile planner's max_rows=2"):
        tiler.plan(lens, lens[:3])
