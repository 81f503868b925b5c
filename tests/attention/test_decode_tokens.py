"""Rows of several new tokens run in the decode kernel as far as they fit into a tile of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from attention.backend import Backend, BackendChoice, Capacity, Shape
from attention.dispatch import build
from attention.planned_kernel import decode_kernel, most_decode_tokens
from attention.planner.split_plan import Q_LEN, ROW
from attention.triton_backend import TritonBackend, TritonPlan
from tests.support.attention.attention_oracle import OracleCase, check, make_case
from tests.support.attention.backend_step import attended, meta_of, pool_of, shape_of

DRAFTED = [(4, 70), (1, 33), (8, 8), (0, 9), (2, 17), (5, 130), (1, 1), (3, 64)]
WITH_PROMPTS = [*DRAFTED, (20, 20), (7, 40), (33, 97), (9, 50)]


def shape(group: int, head_dim: int) -> Shape:
    return Shape(
        heads=8 * group, kv_heads=8, head_dim=head_dim, page_size=16, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
    )  # fmt: skip


def back_end(
    case: OracleCase, row_tokens: int, planner: str = "stream-k", windows: tuple[int, ...] = (0,)
) -> TritonBackend:
    backend = build(
        BackendChoice("flash2", "decode", "prefill", planner),
        shape_of(case),
        Capacity(rows=16, tokens=128, row_tokens=row_tokens),
        case.q.device,
        windows=windows,
    )
    assert isinstance(backend, TritonBackend)
    return backend


def rows_of_kernels(case: OracleCase, backend: Backend) -> tuple[set[int], set[int]]:
    """(rows that the decode kernel serves, rows of the prefill kernel) in a planned step."""
    plan = backend.plan(meta_of(case), pool_of(case)).plan
    assert isinstance(plan, TritonPlan)
    decode: set[int] = set()
    prefill: set[int] = set()
    if plan.decode:
        split = plan.decode[0]
        work = split.work[: int(split.starts[-1])]
        assert (work[:, Q_LEN] <= split.spec.max_q_len).all()
        decode = set(work[:, ROW].tolist())
    if plan.prefill:
        tiles = plan.prefill[0]
        prefill = set(tiles.items[: int(tiles.counts[0]), ROW].tolist())
    return decode, prefill


@pytest.mark.parametrize("name", ["decode", "decode_hopper"])
@pytest.mark.parametrize(
    ("group", "head_dim", "row_tokens", "most"),
    [
        # Without drafts: what fills the smallest tile, of 16 rows.
        *((1, 128, 1, 16), (3, 128, 1, 5), (4, 128, 1, 4), (8, 128, 1, 2), (16, 128, 1, 1)),
        *((4, 128, 4, 4), (4, 128, 5, 8), (4, 128, 8, 8), (8, 128, 4, 4), (8, 128, 8, 8)),
        (5, 128, 2, 3),
        (7, 64, 8, 9),
        (12, 128, 1, 1),
    ],
)
def test_decode_rows_decide_the_tile_and_it_decides_which_rows_join_them(
    name: str, group: int, head_dim: int, row_tokens: int, most: int
) -> None:
    assert most_decode_tokens(name, shape(group, head_dim), row_tokens) == most


@pytest.mark.parametrize("name", ["decode", "decode_hopper"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_no_tile_is_larger_than_the_kernel_serves(name: str, head_dim: int) -> None:
    for group in (1, 4, 6, 8, 16, 24, 32):
        tokens = [most_decode_tokens(name, shape(group, head_dim), k) for k in range(1, 17)]
        assert all(a <= b for a, b in pairwise(tokens)) and tokens[0] >= 1
        for most in tokens:
            assert decode_kernel(name, shape(group, head_dim), most).block_m == group * most
            elements = group * most * (1 << (head_dim - 1).bit_length())
            assert elements <= (64 if name == "decode_hopper" else 128) * 128


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [DRAFTED, WITH_PROMPTS])
def test_rows_of_one_to_eight_tokens_decode_beside_prompts(group: int, rows, device: str) -> None:
    case = make_case(rows, group=group, kv_heads=1, dtype=torch.float32, device=device)
    backend = back_end(case, row_tokens=8)
    decode, prefill = rows_of_kernels(case, backend)
    most = backend.max_decode_tokens
    assert most >= 8
    assert decode == {row for row, (q_len, _) in enumerate(rows) if 1 <= q_len <= most}
    assert prefill == {row for row, (q_len, _) in enumerate(rows) if q_len > most}
    check(case, *attended(case, backend))


@pytest.mark.parametrize("planner", ["stream-k", "greedy", "fa3"])
def test_every_planner_splits_them(planner: str, device: str) -> None:
    case = make_case(WITH_PROMPTS, group=4, dtype=torch.float32, device=device)
    check(case, *attended(case, back_end(case, 8, planner)))


@pytest.mark.parametrize("features", [{"window": 9, "softcap": 3.0}, {"sinks": True}], ids=str)
def test_features_reach_rows_of_several_tokens(features, device: str) -> None:
    case = make_case(WITH_PROMPTS, group=4, device=device, **features)
    windows = (0, 9) if "window" in features else (0,)
    check(case, *attended(case, back_end(case, 8, windows=windows)))


def test_tokens_of_a_row_see_what_they_would_see_one_after_the_other(device: str) -> None:
    """A draft sees the tokens before it and none after it."""
    case = make_case([(4, 60), (4, 33)], group=4, dtype=torch.float32, device=device)
    together, _ = attended(case, back_end(case, 4))
    case.k[...] = torch.where(case.k.isnan(), 0, case.k)  # neighbours of what is taken away below
    case.v[...] = torch.where(case.v.isnan(), 0, case.v)
    last = torch.tensor([3, 7], device=device)
    for pool in (case.k, case.v):  # the newest token of each row, which the others must not see
        slots = case.slot_mapping[last]
        pool[slots // 16, :, slots % 16] = 1e4
    changed, _ = attended(case, back_end(case, 4), write=False)
    first = [0, 1, 2, 4, 5, 6]
    assert torch.equal(together[first], changed[first])
    assert not torch.equal(together[last], changed[last])


def test_steps_of_one_token_a_row_have_a_kernel_of_their_own(device: str) -> None:
    """Compiled for one token, and so without a mask: it is not the one of rows with more."""
    case = make_case([(1, 70), (1, 20)], group=4, device=device)
    backend = back_end(case, row_tokens=8)
    plan = backend.plan(meta_of(case), pool_of(case)).plan
    assert isinstance(plan, TritonPlan)
    assert plan.decode[0].spec.max_q_len == 1 and plan.kernel.block_m == 4


def test_plans_share_the_memory_of_partial_results(device: str) -> None:
    case = make_case([(1, 70)], group=4, device=device)
    backend = back_end(case, 8, windows=(0, 9))
    plans = [
        planner._plan for planners in backend._planners.values() for planner in planners.values()
    ]
    assert len(plans) == 4
    assert len({plan.partial_out.data_ptr() for plan in plans}) == 1
    assert len({plan.work.data_ptr() for plan in plans}) == 4
