"""The Hopper prefill kernel against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.planner.prefill_tiles import TilePlan
from attention.prefill.prefill_hopper import hopper_config, prefill_hopper
from tests.support.attention.attention_oracle import OracleCase, check, make_case
from tests.support.attention.host_tiles import load
from tests.support.attention.prefill_kernel_runner import host_plan
from tests.support.attention.prefill_kernel_runner import run as run_prefill


def name(change: Any) -> str:
    return "+".join(f"{key} {value}" for key, value in change.items())


def run(case: OracleCase, **options: Any) -> tuple[Tensor, Tensor, TilePlan]:
    block_n = hopper_config(case.q.shape[-1], case.k.dtype).block_n
    return run_prefill(case, prefill_hopper, **{"block_m": 128, "block_n": block_n, **options})


FP8 = torch.float8_e4m3fn
ROWS = [(5, 5), (200, 700), (2, 33), (0, 7), (1, 1), (128, 256), (1, 0), (33, 129), (300, 300)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        {"page": 16, "group": 4, "head_dim": 128},
        {"page": 64, "group": 8, "head_dim": 128, "kv_heads": 1},
        {"page": 128, "group": 1, "head_dim": 64},
        {"page": 32, "group": 64, "head_dim": 96, "kv_heads": 1, "dtype": torch.float16},
        {"page": 16, "group": 7, "head_dim": 80, "strided_q": True},
        {"page": 16, "group": 3, "head_dim": 128, "layout": "NHD"},
        {"page": 16, "group": 4, "head_dim": 256},
        {"page": 128, "group": 2, "head_dim": 256, "dtype": torch.float16},
        {"page": 32, "group": 1, "head_dim": 192, "layout": "joint"},
        {"page": 64, "group": 7, "head_dim": 136, "strided_q": True, "layout": "NHD"},
        {"page": 16, "group": 4, "head_dim": 128, "kv_dtype": FP8},
        {"page": 64, "group": 8, "head_dim": 64, "kv_dtype": FP8, "layout": "joint"},
        {"page": 128, "group": 3, "head_dim": 80, "kv_dtype": FP8, "dtype": torch.float16},
        {"page": 32, "group": 6, "head_dim": 256, "kv_dtype": FP8, "layout": "mixed"},
        {"page": 128, "group": 1, "head_dim": 192, "kv_dtype": FP8},
    ],
    ids=name,
)
@pytest.mark.parametrize("programs", [5, 1000], ids=["whole", "cut"])
def test_rows_of_all_lengths_equal_the_oracle(shape: dict[str, Any], programs: int) -> None:
    case = make_case(ROWS, device="cuda", **shape)
    out, lse, tiles = run(case, programs=programs)
    assert bool(tiles.counts[1]) == (programs == 1000)
    check(case, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features",
    [
        {"softcap": 5.0, "sinks": True, "window": 40},
        {"window": 300},
        {"window": 1, "sinks": True},
        {"q_factor": 200.0, "layout": "joint", "shared_pages": 2},
        {"head_dim": 256, "softcap": 5.0, "sinks": True, "window": 40},
        {"head_dim": 256, "window": 300},
        {"head_dim": 256, "q_factor": 200.0, "group": 3},
        {"head_dim": 128, "kv_dtype": FP8, "softcap": 5.0, "sinks": True, "window": 40},
        {"head_dim": 256, "kv_dtype": FP8, "window": 300},
        {"head_dim": 128, "kv_dtype": FP8, "q_factor": 1e30, "scale": 1e-31},
        {"head_dim": 128, "kv_dtype": FP8, "q_factor": 1e-30, "scale": 1e29},
    ],
    ids=name,
)
@pytest.mark.parametrize("programs", [5, 132], ids=["whole", "cut"])
def test_features_hold_in_whole_and_in_cut_tiles(features: dict[str, Any], programs: int) -> None:
    case = make_case(ROWS, device="cuda", **features)
    window, table = case.window, case.page_table.clone()
    for row, (q_len, kv_len) in enumerate(case.rows):  # the pages before the window were given back
        table[row, : max(kv_len - q_len + 1 - window, 0) // 16 if window else 0] = -1
    out, lse, _ = run(replace(case, page_table=table), programs=programs)
    check(case, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 256}, {"head_dim": 128, "kv_dtype": FP8}], ids=name
)
def test_many_tiles_a_program_and_long_rows_equal_the_oracle(shape: dict[str, Any]) -> None:
    rows = [(900, 2100), (700, 700), (64, 5000), (1500, 1500)]
    case = make_case(rows, device="cuda", group=4, **shape)
    out, lse, _ = run(case, programs=4)
    check(case, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 256}, {"head_dim": 128, "kv_dtype": FP8}], ids=name
)
def test_a_captured_graph_replays_rows_of_other_lengths(shape: dict[str, Any]) -> None:
    """Nothing in the launch depends on a length, and the same plan gives the same bits."""
    case = make_case([(300, 400), (20, 20), (70, 300)], device="cuda", **shape)
    out, lse, tiles = run(case)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_hopper(case.inputs(out, lse), tiles)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(first, out)
    other = make_case([(20, 90), (100, 100), (3, 200)], device="cuda", seed=1, **shape)
    count, pages, width = len(other.q), len(other.k), other.page_table.shape[1]
    case.q[:count], case.k[:pages], case.v[:pages] = other.q, other.k, other.v
    case.page_table[:, :width] = other.page_table
    for scale, new in ((case.k_scale, other.k_scale), (case.v_scale, other.v_scale)):
        if scale is not None and new is not None:
            scale.copy_(new)
    load(tiles, host_plan(other, tiles.spec))
    out.fill_(float("nan"))
    graph.replay()
    check(other, out[:count], lse[:count])
    assert out[count:].isnan().all()
