"""The back ends as the model uses them: plan, write, attend, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from attention.backend import UnsupportedAttention
from attention.triton_backend import TritonPlan
from tests.support.attention.attention_oracle import FP8, check, make_case
from tests.support.attention.backend_step import attended, back_end, meta_of, pool_of

DECODING = [(1, 70), (1, 1), (1, 33)]
MIXED = [*DECODING, (5, 5), (3, 40), (1, 21), (2, 17)]  # a chunk of a prompt may be one token
BACKENDS = pytest.mark.parametrize("name", ["flash1", "flash2"])


@BACKENDS
@pytest.mark.parametrize(
    "rows", [DECODING, [(5, 5), (17, 20)], MIXED, [(0, 9), (3, 3), (0, 0), (1, 7)]]
)
def test_every_sort_of_step_equals_dense_attention(name: str, rows, device: str):
    case = make_case(rows, dtype=torch.float32, device=device)
    check(case, *attended(case, back_end(case, name)))


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_the_same_maths_in_it(name: str, dtype, device: str):
    case = make_case(MIXED, dtype=dtype, group=4, strided_q=True, device=device)
    check(case, *attended(case, back_end(case, name)))


@BACKENDS
def test_windows_soft_caps_and_sinks_reach_every_kernel(name: str, device: str):
    case = make_case(MIXED, window=9, softcap=3.0, sinks=True, device=device)
    check(case, *attended(case, back_end(case, name, windows=(0, 9))))


@pytest.mark.parametrize("name", ["mha", "flash1", "flash2", "batch-invariant"])
@pytest.mark.parametrize(
    "window", [20, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 70))]
)
def test_freed_pages_before_a_window_are_never_read(name: str, window: int, device: str):
    """The scheduler frees a page once no query of its sequence sees a position in it."""
    rows = [(1, 100), (1, 600), (1, 20), (3, 90), (40, 140), (9, 600)]
    case = make_case(rows, window=window, dtype=torch.float32, device=device)
    for row, (q_len, kv_len) in enumerate(rows):
        case.page_table[row, : max(kv_len - q_len + 1 - window, 0) // 16] = -1
    backend = back_end(case, name, windows=(window,))
    check(case, *attended(case, backend))


@BACKENDS
def test_fp8_pages_are_read_with_their_scales(name: str, device: str):
    case = make_case(MIXED, kv_dtype=FP8, device=device)
    check(case, *attended(case, back_end(case, name), write=False))


@pytest.mark.parametrize("planner", ["auto", "stream-k", "greedy", "fa3"])
def test_every_split_planner_gives_the_same_attention(planner: str, device: str):
    case = make_case(MIXED, dtype=torch.float32, device=device)
    check(case, *attended(case, back_end(case, "flash2", split_planner=planner)))


def test_a_window_that_was_not_announced_is_refused(device: str):
    case = make_case(DECODING, window=9, device=device)
    with pytest.raises(UnsupportedAttention, match=r"window of 9 .* plans \[0, 4\]"):
        attended(case, back_end(case, "flash2", windows=(0, 4)))


@pytest.mark.parametrize(("limit", "value"), [("rows", 6), ("tokens", 13)])
def test_a_step_over_the_capacity_is_refused(limit: str, value: int, device: str):
    case = make_case(MIXED, device=device)  # 7 rows, 14 tokens
    with pytest.raises(ValueError, match="7 rows and 14 tokens"):
        attended(case, back_end(case, "flash2", **{limit: value}))


@pytest.mark.parametrize(
    ("rows", "decode", "prefill"),
    [
        (DECODING, True, False),
        ([(2, 2), (8, 9), (1, 7)], True, False),  # two heads of eight tokens fill a tile of 16
        ([(9, 9), (20, 31)], False, True),
        ([(2, 2), (9, 9)], True, True),
        (MIXED, True, False),
    ],
)
def test_only_the_kernels_that_a_step_needs_are_planned(rows, decode, prefill, device: str):
    case = make_case(rows, device=device)
    plan = back_end(case, "flash2", windows=(0, 9)).plan(meta_of(case), pool_of(case)).plan
    assert isinstance(plan, TritonPlan)
    assert list(plan.decode) == ([0, 9] if decode else [])
    assert list(plan.prefill) == ([0, 9] if prefill else [])


def test_attend_without_a_plan_is_refused(device: str):
    case = make_case(DECODING, device=device)
    with pytest.raises(AssertionError, match="plan"):
        back_end(case, "flash2").attend(case.q, pool_of(case).layers[0], meta_of(case), scale=1.0)
