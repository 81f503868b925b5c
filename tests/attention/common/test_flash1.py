"""flash1 against the float64 oracle: every kind of row by one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.common import flash1 as module
from attention.common.flash1 import flash1
from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case

# Rows that decode, prompts with and without a prefix, an empty row, a row without KV.
ROWS = [(1, 70), (1, 1), (5, 5), (0, 9), (3, 40), (1, 0), (0, 0), (2, 17)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Short rows span several tiles; the GPU is quick enough for long ones."""
    if device == "cpu":
        monkeypatch.setattr(module, "TILE", 1024)


def run(case: OracleCase) -> None:
    out, lse = case.results()
    flash1(case.inputs(out, lse), case.cu_seqlens_q, case.cache_seqlens, window=case.window)
    check(case, out, lse)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page", "kv_heads", "group"),
    [
        (torch.bfloat16, 128, 16, 2, 4),
        (torch.float16, 64, 32, 1, 3),
        (torch.float32, 80, 64, 3, 1),
        (torch.float32, 256, 16, 1, 2),
        (torch.bfloat16, 192, 128, 1, 1),
        (torch.float16, 96, 16, 1, 7),
    ],
)
def test_every_row_equals_dense_attention(
    device: str, dtype: torch.dtype, head_dim: int, page: int, kv_heads: int, group: int
):
    case = make_case(
        ROWS, dtype=dtype, head_dim=head_dim, page=page, kv_heads=kv_heads, group=group,
        strided_q=True, device=device,
    )  # fmt: skip
    run(case)


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_windows_softcap_and_sinks_together(device: str, window: int, softcap: float):
    run(make_case(ROWS, window=window, softcap=softcap, sinks=window != 7, device=device))


def test_without_keys_a_sink_alone_is_the_sum(device: str):
    run(make_case([(1, 0), (1, 3)], sinks=True, device=device))


@pytest.mark.parametrize("layout", ["HND", "NHD", "joint"])
def test_fp8_pages_are_multiplied_with_their_heads_scales(device: str, layout: str):
    run(make_case(ROWS, kv_dtype=FP8, layout=layout, device=device))


def test_large_logits_do_not_overflow(device: str):
    run(make_case(ROWS, dtype=torch.float32, q_factor=1000.0, device=device))


def test_rows_may_share_pages(device: str):
    run(make_case([(1, 40), (3, 50), (1, 33)], shared_pages=2, device=device))


def test_tokens_that_belong_to_no_row_are_left_alone(device: str):
    """A captured graph is launched for its largest batch."""
    case = make_case([(1, 20), (2, 9)], device=device)
    out, lse = case.results()
    q = torch.cat([case.q, case.q])
    padded_out, padded_lse = torch.cat([out, out]), torch.cat([lse, lse])
    inputs = replace(case, q=q).inputs(padded_out, padded_lse)
    flash1(inputs, case.cu_seqlens_q, case.cache_seqlens)
    check(case, padded_out[:3], padded_lse[:3])
    assert padded_out[3:].isnan().all() and padded_lse[3:].isnan().all()


@pytest.mark.gpu
def test_long_rows_equal_dense_attention(device: str):
    run(make_case([(1, 5000), (130, 700), (1, 257), (65, 4000)], device=device))


@pytest.mark.gpu
def test_a_captured_graph_replays_rows_of_other_lengths(device: str):
    """Nothing in the launch depends on a position or a length."""
    big = make_case([(1, 300), (7, 90), (0, 0), (1, 12)], device=device)
    out, lse = big.results()
    arguments = big.inputs(out, lse), big.cu_seqlens_q, big.cache_seqlens
    flash1(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash1(*arguments)
    for seed, rows in enumerate(
        [[(2, 9), (1, 1), (1, 300), (4, 4)], [(1, 0), (0, 5), (1, 40)] * 1]
    ):
        rows = [*rows, *[(0, 0)] * (4 - len(rows))]
        case = make_case(rows, device=device, seed=seed)
        count, pages, width = len(case.q), len(case.k), case.page_table.shape[1]
        big.q[:count], big.k[:pages], big.v[:pages] = case.q, case.k, case.v
        big.page_table[:, :width] = case.page_table
        big.cu_seqlens_q.copy_(case.cu_seqlens_q)
        big.cache_seqlens.copy_(case.cache_seqlens)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        check(case, out[:count], lse[:count])
        assert out[count:].isnan().all()
