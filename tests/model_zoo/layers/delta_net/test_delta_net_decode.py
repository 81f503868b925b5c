"""The decode kernel of the gated delta net against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_zoo.layers.delta_net.decode.kernel import delta_net_decode
from model_zoo.layers.delta_net.inputs import CHUNK, MAX_DECODE_TOKENS, DeltaNetRows, Snapshots
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from model_zoo.layers.gemm.implementations import workspace
from tests.support.delta_net.cases import DeltaNetCase, delta_net_case, int32
from tests.support.delta_net.decoding import (
    assert_decoded_right,
    assert_overlapped_as_alone,
    decoded,
)
from tests.support.examples import examples

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16, FP32]


def run(case: DeltaNetCase) -> Tensor:
    out = decoded(case, delta_net_decode)
    assert not workspace(out.device)[1].any(), "counts are left behind"
    return out


def assert_right(case: DeltaNetCase) -> None:
    assert_decoded_right(case, run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_token_continue_their_states(device: str, dtype: torch.dtype):
    before = [3, 1, 100]
    assert_right(delta_net_case([1] * 3, before, heads=(2, 6), dtype=dtype, device=device))


@examples(40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, MAX_DECODE_TOKENS), st.sampled_from([0, 1, 2, 60])), min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    dims=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    conv_size=st.integers(2, 4),
    padding=st.integers(0, 3),
)  # fmt: skip
def test_rows_of_few_tokens_of_any_shape(
    rows: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], conv_size: int,
    padding: int,
):  # fmt: skip
    lens, before = [n for n, _ in rows], [m for _, m in rows]
    case = delta_net_case(
        lens, before, heads=heads, dims=dims, conv_size=conv_size, padding=padding
    )
    assert_right(case)


def test_a_state_of_16_bits_is_rounded_once_a_step(device: str):
    dtype = FP16 if device == "cpu" else BF16
    assert_right(delta_net_case([1, 4, 1], [5, 9, 0], state_dtype=dtype, device=device))


def test_a_new_sequence_does_not_read_its_slot(device: str):
    case = delta_net_case([2, 1], [0, 0], device=device)
    clean = case.copy()
    case.state.state[:] = float("nan")
    case.state.conv[:] = float("nan")
    torch.testing.assert_close(run(case), run(clean), rtol=0, atol=0)
    slots = case.rows.slots.long()
    assert torch.equal(case.state.state[slots], clean.state.state[slots])
    found, expected = case.state.conv[slots], clean.state.conv[slots]
    assert torch.equal(found[0, :2], expected[0, :2]) and torch.equal(found[1, 0], expected[1, 0])
    assert found[0, 2].isnan().all(), "an input of no token"


def test_padding_gets_zeros_and_changes_nothing(device: str):
    """Rows without tokens, rows without a slot, tokens of no row."""
    case = delta_net_case(
        [1, 2, 0, 0, 3], [4, 9, 0, 7, 2], padding=5, slots=[2, -1, -1, 1, 0], device=device
    )
    before = case.copy()
    out = run(case)
    assert not out[6:].any() and out[:6].isfinite().all()
    unused = [1, 3, 4, 5, 6]
    assert torch.equal(case.state.state[unused], before.state.state[unused])
    assert torch.equal(case.state.conv[unused], before.state.conv[unused])
    assert_right(before)


def test_rows_of_prompts_are_left_alone(device: str):
    case = delta_net_case([1, MAX_DECODE_TOKENS + 1, 2], [4, 0, 2], device=device)
    before = case.copy()
    out = run(case)
    prompt = slice(1, MAX_DECODE_TOKENS + 2)
    assert out[prompt].isnan().all() and not out[0].isnan().any()
    slot = case.rows.slots[1].long()
    assert torch.equal(case.state.state[slot], before.state.state[slot])
    assert torch.equal(case.state.conv[slot], before.state.conv[slot])


@pytest.mark.parametrize("before", [CHUNK - 1, 2 * CHUNK - 3, CHUNK - 5, CHUNK])
def test_states_at_borders_are_kept(device: str, before: int):
    snapshots = Snapshots(
        int32([(before // CHUNK + 1) * CHUNK, CHUNK], device), int32([4, 0], device)[:, None]
    )
    case = delta_net_case(
        [4, 1], [before, CHUNK - 1], heads=(1, 3), slots=[2, 1], free_slots=3,
        snapshots=snapshots, device=device,
    )  # fmt: skip
    assert_right(case)


@pytest.mark.parametrize("border", [CHUNK - 2, CHUNK - 1])
def test_a_state_from_before_the_row_is_not_kept(device: str, border: int):
    snapshots = Snapshots(int32([border], device), int32([0], device)[:, None])
    case = delta_net_case([3], [CHUNK - 1], slots=[1], snapshots=snapshots, device=device)
    before = case.copy()
    run(case)
    assert torch.equal(case.state.state[0], before.state.state[0])
    assert torch.equal(case.state.conv[0], before.state.conv[0])


def test_inputs_need_no_room_for_the_tokens_of_prompts(device: str):
    """Beside a long row each row has places for so many tokens as these rows may have."""
    case = delta_net_case([1, 40, MAX_DECODE_TOKENS, 2], [4, 0, 2, 60], device=device)
    expected, out = gated_delta_net_reference(*case.double().arguments), run(case)
    mine = [0, *range(41, 51)]
    torch.testing.assert_close(out[mine].cpu().double(), expected[mine], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("resident", [0, 1, 1000])
def test_inputs_may_be_computed_any_number_of_rows_ahead(
    device: str, resident: int, monkeypatch: pytest.MonkeyPatch
):
    """Programs of states wait for those of inputs, which run beside them: all at once with 0."""
    rows = 5 if device == "cpu" else 300
    case = delta_net_case([1, 2, 0, 1, 3] * (rows // 5), [4] * rows, heads=(2, 4), device=device)
    again = case.copy()
    expected = run(case)
    monkeypatch.setattr("model_zoo.layers.delta_net.decode.kernel.RESIDENT", resident)
    assert torch.equal(run(again), expected)
    assert torch.equal(again.state.state, case.state.state)
    assert torch.equal(again.state.conv, case.state.conv)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, 3])
def test_calls_in_a_graph_are_those_that_start_after_each_other(
    resident: int, monkeypatch: pytest.MonkeyPatch
):
    """Two layers in turns, which overlap in a graph."""
    monkeypatch.setattr("model_zoo.layers.delta_net.decode.kernel.RESIDENT", resident)
    layers = [
        delta_net_case([1] * 150, [9] * 150, heads=(16, 48), dims=(128, 128), dtype=BF16, seed=seed,
                       device="cuda")
        for seed in range(2)
    ]  # fmt: skip
    assert_overlapped_as_alone(layers, delta_net_decode)
    assert not workspace(layers[0].qkv.device)[1].any(), "counts are left behind"


def test_nan_of_a_decay_reaches_the_outputs(device: str):
    case = delta_net_case([1, 2], [9, 3], heads=(1, 2), device=device)
    case.weights.dt_bias[1] = float("nan")
    out = run(case).unflatten(1, (2, -1))
    assert out[:, 1].isnan().all() and not out[:, 0].isnan().any()


def test_states_after_each_token_are_kept(device: str):
    """As a row needs them of whose drafts some are refused."""
    table = int32([3, 4, 5, 0, -1, -1], device).view(2, 3)
    case = delta_net_case(
        [3, 1], [0, 20], heads=(1, 3), slots=[2, 1], free_slots=4,
        snapshots=Snapshots(int32([1, 21], device), table), device=device,
    )  # fmt: skip
    plain = delta_net_case([3, 1], [0, 20], heads=(1, 3), slots=[2, 1], free_slots=4, device=device)
    assert_right(case)
    first = plain.copy()
    two = (t[:2] for t in (first.qkv, first.z, first.b, first.a))
    rows = DeltaNetRows(int32([0, 2], device), int32([2], device), int32([2], device), 2)
    run(DeltaNetCase(*two, first.weights, first.state, rows))
    torch.testing.assert_close(case.state.state[4], first.state.state[2], rtol=0, atol=0)
    assert torch.equal(case.state.conv[4, :2], first.state.conv[2, :2])  # of two positions
    assert torch.equal(case.state.state[5], case.state.state[2])


def test_the_tokens_of_a_row_may_come_one_by_one(device: str):
    whole = delta_net_case([6], [2], device=device)
    parts = whole.copy()
    expected = run(whole)
    found = torch.cat([run(parts.part(t, t + 1)) for t in range(6)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.state.state, whole.state.state, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.state.conv, whole.state.conv)


@pytest.mark.parametrize("cuts", [[0, 1, 5, 21], [0, 13, 21], [0, 20, 21]])
def test_rows_of_any_length_may_be_cut_anywhere_if_they_go_token_by_token(
    device: str, cuts: list[int]
):
    """To the bit: a decoded token is one of a prompt, also after a preemption."""
    case = delta_net_case([21], [0], heads=(1, 2), device=device)
    whole = replace(case, rows=replace(case.rows, token_by_token=True))
    parts = whole.copy()
    expected = run(whole)
    assert not expected.isnan().any()
    found = torch.cat([run(parts.part(first, last)) for first, last in pairwise(cuts)])
    assert torch.equal(found, expected)
    assert torch.equal(parts.state.state, whole.state.state)
    assert torch.equal(parts.state.conv, whole.state.conv)


@pytest.mark.parametrize(("before", "border"), [(0, 10), (5, 16)])
def test_a_state_within_a_long_row_that_goes_token_by_token_is_kept(
    device: str, before: int, border: int
):
    """With the bits of a row that ends there; the row's own do not change."""
    case = delta_net_case([11], [before], slots=[1], device=device)
    plain = replace(case, rows=replace(case.rows, token_by_token=True))
    snapshots = Snapshots(int32([border], device), int32([0], device)[:, None])
    kept, cut = plain.copy(), plain.copy()
    kept = replace(kept, rows=replace(kept.rows, snapshots=snapshots))
    assert torch.equal(run(kept), run(plain))
    run(cut.part(0, border - before))
    assert torch.equal(kept.state.state[1], plain.state.state[1])
    assert torch.equal(kept.state.state[0], cut.state.state[1])
    assert torch.equal(kept.state.conv[0], cut.state.conv[1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 32), (16, 48)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_true_shapes_on_a_gpu(heads: tuple[int, int], tokens: int):
    lens = [tokens, 0, 1, tokens, 1] * 12
    case = delta_net_case(
        lens, [7, 3, 0, 500, 1] * 12, heads=heads, dims=(128, 128), dtype=BF16, padding=4,
        device="cuda",
    )  # fmt: skip
    assert_right(case)
