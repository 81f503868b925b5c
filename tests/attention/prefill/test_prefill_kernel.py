"""The prefill kernel against the float64 oracle, over poisoned and shuffled pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.prefill.merge_tiles import TOGETHER
from attention.prefill.prefill import prefill, prefill_config
from tests.support.attention.attention_oracle import check, make_case
from tests.support.attention.host_tiles import load
from tests.support.attention.prefill_kernel_runner import host_plan, run

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "rows",
    [
        [(5, 5), (40, 100), (2, 33)],
        [(1, 1), (1, 31), (1, 32), (1, 33)],
        [(0, 7), (17, 17), (0, 0), (16, 32), (1, 0)],
        [(31, 64), (32, 64), (33, 65)],
    ],
    ids=["prefixes", "one query", "empty rows", "page boundaries"],
)
def test_rows_of_all_lengths_equal_the_oracle(rows: list[tuple[int, int]], device: str) -> None:
    case = make_case(rows, head_dim=32, device=device)
    out, lse, _ = run(case)
    check(case, out, lse)


@pytest.mark.parametrize("group", [1, 3, 5, 8, 64])
def test_groups_of_any_size_share_a_tile(group: int, device: str) -> None:
    case = make_case([(9, 40), (3, 3)], group=group, kv_heads=1, head_dim=16, device=device)
    out, lse, _ = run(case)
    check(case, out, lse)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims_that_are_no_power_of_two_are_padded(head_dim: int, device: str) -> None:
    case = make_case([(20, 50)], head_dim=head_dim, kv_heads=1, device=device)
    out, lse, _ = run(case)
    check(case, out, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_pages_smaller_and_larger_than_a_block(page: int, dtype: torch.dtype, device: str) -> None:
    case = make_case([(20, 150), (40, 41)], page=page, dtype=dtype, head_dim=16, device=device)
    out, lse, _ = run(case)
    check(case, out, lse)


@pytest.mark.parametrize("window", [1, 15, 32, 33, 70, 1000])
def test_window_hides_keys_and_freed_pages_before_it(window: int, device: str) -> None:
    rows = [(40, 140), (3, 100), (1, 64)]
    case = make_case(rows, window=window, head_dim=16, device=device)
    table = case.page_table.clone()
    for row, (q_len, kv_len) in enumerate(rows):  # the pages before the window were given back
        table[row, : max(kv_len - q_len + 1 - window, 0) // 16] = -1
    out, lse, _ = run(replace(case, page_table=table))
    check(case, out, lse)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "features",
    [
        {"softcap": 20.0},
        {"sinks": True},
        {"kv_dtype": FP8},
        {"softcap": 5.0, "sinks": True, "window": 40, "kv_dtype": FP8},
        {"q_factor": 200.0},
        {"q_factor": 0.0, "sinks": True},
        {"layout": "NHD", "strided_q": True},
        {"layout": "joint", "shared_pages": 2},
        {"layout": "mixed"},
    ],
    ids=lambda features: "+".join(features),
)
def test_features_hold_in_whole_and_in_cut_tiles(
    features: dict[str, Any], split: bool, device: str
) -> None:
    case = make_case([(20, 120), (3, 70), (1, 0)], head_dim=16, device=device, **features)
    out, lse, tiles = run(case, programs=30 if split else 1)
    assert bool(tiles.counts[1]) == split
    check(case, out, lse)


def test_tiles_cut_into_more_splits_than_are_read_at_once_equal_the_oracle(device: str) -> None:
    case = make_case([(9, 700), (4, 300)], head_dim=16, sinks=True, device=device)
    out, lse, tiles = run(case, programs=40)
    splits = tiles.merges[: int(tiles.counts[1]), 1]
    assert len(splits) > 1 and int(splits.max()) > TOGETHER and int(splits.max()) % TOGETHER
    check(case, out, lse)


def test_decode_rows_in_between_are_left_alone(device: str) -> None:
    case = make_case([(1, 40), (20, 60), (1, 1), (2, 2)], head_dim=16, device=device)
    out, lse, _ = run(case, min_q_len=2)
    check(case, out, lse, served=lambda q_len: q_len >= 2)


@pytest.mark.parametrize("options", [{}, {"programs": 40}], ids=["whole", "cut"])
def test_a_repeated_run_gives_the_same_bits(options: dict[str, Any], device: str) -> None:
    case = make_case([(30, 200), (17, 30)], head_dim=16, device=device)
    first, second = run(case, **options), run(case, **options)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_plan_is_reused_by_a_step_of_fewer_and_shorter_rows(device: str) -> None:
    long = make_case([(60, 100), (33, 90), (20, 20)], head_dim=16, device=device)
    _, _, tiles = run(long)
    short = make_case([(5, 6), (1, 1)], head_dim=16, device=device)
    for case in (short, long):
        load(tiles, host_plan(case, tiles.spec))
        out, lse = case.results()
        prefill(case.inputs(out, lse), tiles)
        check(case, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_large_steps_at_the_shipped_tile_sizes(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    config = prefill_config(head_dim, dtype)
    rows = [(1000, 1000), (257, 3000), (1, 500), (700, 701), (0, 5), (129, 129)]
    for options in ({}, {"window": 1500, "softcap": 30.0, "sinks": True}):
        case = make_case(
            rows,
            group=4,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device="cuda",
            **options,
        )
        for programs in (132, 1000):
            sizes: dict[str, Any] = {"block_m": config.block_m, "block_n": config.block_n}
            out, lse, tiles = run(case, programs=programs, min_blocks=4, **sizes)
            assert bool(tiles.counts[1]) == (programs == 1000)
            check(case, out, lse)
