"""The decode kernel with every planner against dense attention in float64."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from attention.decode.decode import decode
from tests.support.attention.attention_oracle import FP8, check, make_case
from tests.support.attention.decode_kernel_runner import (
    PLANNERS,
    decoded,
    make_plan,
    most,
    poison,
    run,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EDGES = [(1, n) for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)]
MIXED = [(1, 40), (3, 50), (0, 30), (1, 0), (8, 8), (2, 33), (1, 1), (9, 20)]


@pytest.mark.parametrize(
    ("planner", "dtype"),
    [*((name, BF16) for name in PLANNERS), ("stream-k", FP16), ("stream-k", FP32)],
)
def test_rows_of_every_length_equal_dense_attention(device: str, planner: str, dtype: torch.dtype):
    case = make_case(EDGES, dtype=dtype, group=4, kv_heads=1, device=device)
    check(case, *decoded(case, planner, programs=11))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_head_dim(device: str, head_dim: int, dtype: torch.dtype):
    case = make_case(
        [(2, 40), (1, 1), (1, 0)], head_dim=head_dim, dtype=dtype, kv_heads=1, device=device
    )
    check(case, *decoded(case, max_q_len=2))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
def test_every_group(device: str, group: int):
    max_q_len = 2 if group in (3, 8, 32) else 1
    case = make_case([(1, 40), (2, 35)], group=group, kv_heads=1, device=device)
    check(case, *decoded(case, max_q_len=max_q_len, programs=2), served=most(max_q_len))


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_every_page_and_block(device: str, page: int, block: int):
    rows = [(1, page - 1), (1, page), (1, page + 1), (4, 2 * page + 3)]
    case = make_case(rows, page=page, kv_heads=1, device=device, seed=block)
    check(case, *decoded(case, max_q_len=4, block=block))


@pytest.mark.parametrize("max_q_len", range(1, 9))
def test_rows_of_few_queries_are_served_and_others_left_untouched(device: str, max_q_len: int):
    rows = [*MIXED, *((n, n + 20) for n in (4, 5, 6, 7))]
    case = make_case(rows, kv_heads=1, group=2, device=device)
    check(case, *decoded(case, max_q_len=max_q_len), served=most(max_q_len))


@pytest.mark.parametrize(
    "window", [1, 33, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 16, 127, 4096))]
)
@pytest.mark.parametrize("planner", ["thin", "stream-k"])
def test_a_window_hides_what_is_before_it(device: str, window: int, planner: str):
    rows = [(1, 70), (5, 150), (1, 1), (4, 4), (1, 0)]
    case = make_case(rows, window=window, group=1, device=device)
    check(case, *decoded(case, planner, max_q_len=5))


def test_pages_before_the_window_are_never_read(device: str):
    """A model that frees them leaves junk in the table."""
    case = make_case([(1, 100), (3, 90)], window=20, device=device)
    case.spoil_before_window()
    check(case, *decoded(case, max_q_len=3))


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 21},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "fp8": {"kv_dtype": FP8},
    "float16": {"dtype": FP16},
    "joint": {"layout": "joint", "strided_q": True},
    "mixed": {"layout": "mixed"},
    "shared": {"shared_pages": 2},
}


PAIRS = [pair for pair in combinations(FEATURES, 2) if pair != ("joint", "mixed")]


@pytest.mark.parametrize(
    "names",
    [*((name,) for name in FEATURES), *(pytest.param(p, marks=pytest.mark.slow) for p in PAIRS)],
    ids="+".join,
)
def test_features_alone_and_in_pairs(device: str, names: tuple[str, ...]):
    arguments: dict[str, Any] = {}
    for name in names:
        arguments |= FEATURES[name]
    case = make_case([(1, 50), (3, 45), (1, 0), (1, 64)], device=device, **arguments)
    check(case, *decoded(case, max_q_len=3))


@pytest.mark.parametrize("planner", ["whole", "thin", "stream-k"])
def test_a_sink_counts_once_however_many_pieces_a_row_has(device: str, planner: str):
    case = make_case([(1, 100), (2, 60), (1, 0)], sinks=True, device=device)
    assert case.sinks is not None
    case.sinks.add_(3)  # most of the weight
    check(case, *decoded(case, planner, max_q_len=2))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_cut_changes_no_result_by_more_than_rounding(device: str, planner: str):
    """In float32, where weights are not rounded: bfloat16's depend on a piece's maximum."""
    case = make_case([(1, 130), (2, 77), (1, 0)], kv_heads=1, dtype=FP32, device=device)
    whole, whole_lse = decoded(case, "whole", max_q_len=2)
    out, lse = decoded(case, planner, max_q_len=2)
    torch.testing.assert_close(out, whole, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_same_plan_twice_gives_the_same_bits(device: str, planner: str):
    case = make_case([(1, 130), (2, 77), (1, 5)], kv_heads=1, device=device)
    plan, _ = make_plan(case, planner, max_q_len=2)
    first = run(case, plan)
    poison(plan)
    for found, before in zip(run(case, plan), first, strict=True):
        assert torch.equal(found, before)
    assert plan.queue.item() == 0


@pytest.mark.parametrize("planner", ["fa3", "thin", "stream-k"])
def test_only_the_partial_results_of_cut_rows_are_written(device: str, planner: str):
    rows = [(1, 100), (2, 20), (3, 90), (1, 16), (1, 0)]
    case = make_case(rows, group=3, window=20, kv_heads=1, device=device)
    plan, host = make_plan(case, planner, max_q_len=3, programs=9)
    run(case, plan)
    partial = torch.zeros(plan.partial_lse.shape, dtype=torch.bool)
    for piece, (*_, q_len, _, is_partial) in enumerate(host.work.tolist()):
        partial[piece, : q_len * case.group * is_partial] = True
    assert partial.any() and not partial.all()
    assert torch.equal(~plan.partial_lse.isnan().cpu(), partial)
    assert torch.equal(~plan.partial_out.isnan().all(-1).cpu(), partial)
    assert torch.equal(~plan.partial_out.isnan().any(-1).cpu(), partial)


def test_a_plan_of_no_rows_writes_nothing(device: str):
    case = make_case([(5, 9), (0, 4)], device=device)
    plan, _ = make_plan(case)
    out, lse = run(case, plan)
    assert out.isnan().all() and lse.isnan().all() and plan.partial_lse.isnan().all()


def test_results_need_no_lse_and_may_be_views(device: str):
    case = make_case([(1, 40), (2, 20)], strided_q=True, device=device)
    plan, _ = make_plan(case, max_q_len=2)
    wide = torch.full((3, 7, 80), float("nan"), dtype=BF16, device=device)
    out = wide[:, 1:5, 8:72]
    decode(case.inputs(out), plan)
    check(case, out)
    out.fill_(float("nan"))
    assert wide.isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("planner", ["whole", "stream-k"])
class TestExtremeLogits:
    ROWS = ((1, 70), (2, 40), (1, 1))

    def test_logits_of_a_thousand(self, device: str, planner: str, dtype: torch.dtype):
        case = make_case(self.ROWS, dtype=dtype, q_factor=30, scale=1.0, device=device)
        check(case, *decoded(case, planner, max_q_len=2))

    def test_equal_logits_average_the_values(self, device: str, planner: str, dtype: torch.dtype):
        case = make_case(self.ROWS, dtype=dtype, q_factor=0, device=device)
        out, lse = decoded(case, planner, max_q_len=2)
        check(case, out, lse)
        expected = torch.tensor([70.0, 39, 40, 1], device=device).log()
        torch.testing.assert_close(lse, expected[:, None].expand(lse.shape))

    def test_one_key_outweighs_all(self, device: str, planner: str, dtype: torch.dtype):
        case = make_case(self.ROWS, dtype=dtype, device=device)
        page = case.page_table[0, 1]
        case.k[page, :, 3] = 100 * case.q[0].view(2, 2, -1)[:, 0].sign()
        case.keys[0][19] = case.k[page, :, 3]
        out, lse = decoded(case, planner, max_q_len=2)
        check(case, out, lse)
        torch.testing.assert_close(out[0, ::2], case.values[0][19])

    def test_logits_of_minus_ten_thousand(self, device: str, planner: str, dtype: torch.dtype):
        case = make_case(self.ROWS, dtype=dtype, device=device)
        case.q.fill_(-64.0)
        for row, (_, kv_len) in enumerate(case.rows):
            case.keys[row].fill_(20.0)
            for position in range(kv_len):
                page = case.page_table[row, position // 16]
                case.k[page, :, position % 16] = 20.0
        out, lse = decoded(case, planner, max_q_len=2)
        check(case, out, lse)
        assert (lse < -10_000).all()


@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 448.0])
def test_any_scale_of_fp8_heads(device: str, scale: float):
    """Zero, a denormal, and one that reaches bfloat16's common range of activations."""
    case = make_case([(1, 40), (2, 21)], kv_dtype=FP8, device=device)
    assert case.k_scale is not None and case.v_scale is not None
    case.k_scale[0] = min(scale, 1.0)
    case.v_scale[0] = scale
    check(case, *decoded(case, max_q_len=2))


def test_a_plan_for_other_shapes_is_refused(device: str):
    case = make_case([(1, 40)], group=2, device=device)
    other = make_case([(1, 40)], group=4, device=device)
    with pytest.raises(AssertionError, match="other shapes"):
        run(case, make_plan(other)[0])


@pytest.mark.parametrize(
    ("group", "max_q_len", "head_dim", "most"),
    [(64, 3, 64, 128), (16, 8, 192, 64), (1, 65, 256, 64)],
)
def test_more_queries_than_a_tile_holds_are_refused(
    device: str, group: int, max_q_len: int, head_dim: int, most: int
):
    case = make_case([(1, 20)], group=group, kv_heads=1, head_dim=head_dim, device=device)
    with pytest.raises(ValueError, match=f"serves {most} of head_dim {head_dim}: plan with a sm"):
        decoded(case, max_q_len=max_q_len)


@pytest.mark.parametrize(
    ("max_q_len", "head_dim"), [(8, 128), pytest.param(4, 256, marks=pytest.mark.slow)]
)
def test_as_many_queries_as_a_tile_holds_are_served(device: str, max_q_len: int, head_dim: int):
    case = make_case([(max_q_len, 40)], group=16, kv_heads=1, head_dim=head_dim, device=device)
    check(case, *decoded(case, max_q_len=max_q_len))
