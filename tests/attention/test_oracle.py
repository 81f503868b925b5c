"""The oracle itself: against torch's attention, and that its checks can fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case

ROWS = [(1, 70), (1, 5), (33, 80), (4, 4), (0, 9), (1, 0), (2, 16)]


def sdpa(case: OracleCase, row: int) -> Tensor:
    q_len, kv_len = case.rows[row]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    if case.window:
        mask = mask.triu(kv_len - q_len - case.window + 1)
    q = case.q[case.tokens(row)].double().transpose(0, 1)
    k, v = (x[row].double().transpose(0, 1) for x in (case.keys, case.values))
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True, scale=case.scale
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("window", [0, 1, 7, 1000])
def test_the_oracle_equals_torch_attention(window: int):
    case = make_case(ROWS, window=window, group=3, head_dim=40)
    out, _ = case.oracle()
    for row, (_, kv_len) in enumerate(case.rows):
        if kv_len:
            torch.testing.assert_close(out[case.tokens(row)], sdpa(case, row))


def test_a_sink_is_a_key_with_a_zero_value():
    case = make_case([(3, 20), (1, 0)], sinks=True, group=1, softcap=2.0)
    out, lse = case.oracle()
    assert case.sinks is not None
    scores = torch.einsum("qhd,khd->qhk", case.q[:3].double(), case.keys[0].double()) * case.scale
    scores = 2.0 * torch.tanh(scores / 2.0)
    future = torch.ones(3, 20, dtype=torch.bool).triu(18)
    scores = scores.masked_fill(future[:, None], float("-inf"))
    weights = torch.cat([scores, case.sinks.double().expand(3, -1)[..., None]], -1).softmax(-1)
    expected = torch.einsum("qhk,khd->qhd", weights[..., :-1], case.values[0].double())
    torch.testing.assert_close(out[:3], expected)
    assert (out[3] == 0).all() and torch.equal(lse[3], case.sinks.double())


@pytest.mark.parametrize("layout", ["HND", "NHD", "joint", "mixed"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_the_pool_holds_the_dense_rows_and_poison(layout: str, kv_dtype: torch.dtype):
    case = make_case(ROWS, layout=layout, kv_dtype=kv_dtype, shared_pages=1, first_page=5)
    owned = torch.zeros(case.k.shape[0], 16, dtype=torch.bool)
    for row, (_, kv_len) in enumerate(case.rows):
        for position in range(kv_len):
            page = int(case.page_table[row, position // 16])
            assert page >= 5
            found = case.k[page, :, position % 16].float()
            assert torch.equal(found, case.keys[row][position].float())
            owned[page, position % 16] = True
        assert not set(case.page_table[row, -(-kv_len // 16) :].tolist()) - {2**31 - 1, -1}
    assert case.v.float().isnan().all(-1).all(1).logical_not().equal(owned)
    assert case.page_table[0, 0] == case.page_table[2, 0] != case.page_table[1, 0]


def test_the_same_maths_in_the_dtype_passes_and_a_small_fault_does_not():
    case = make_case(ROWS, sinks=True)
    _, exact_lse = case.oracle()
    rounded = case.in_dtype().bfloat16()
    check(case, rounded, exact_lse.float())
    wrong = rounded.clone()
    wrong[0, 1, 3] += 0.02
    with pytest.raises(AssertionError, match=r"row 0 .*out\[0, 1, 3\].*1 of 256 values"):
        check(case, wrong, exact_lse.float())
    with pytest.raises(AssertionError, match=r"row 0 .*lse"):
        check(case, rounded, exact_lse.float() + 2e-3)


def test_rows_that_are_not_served_must_be_untouched():
    case = make_case([(1, 3), (5, 9)])
    out, lse = case.results()
    exact, exact_lse = case.oracle()
    out[:1], lse[:1] = exact[:1], exact_lse[:1]
    check(case, out, lse, served=lambda q_len: q_len == 1)
    with pytest.raises(AssertionError, match=r"row 1 .*NaN"):
        check(case, out, lse)
    with pytest.raises(AssertionError, match=r"row 0 .*not served"):
        check(case, out, lse, served=lambda q_len: q_len > 1)
