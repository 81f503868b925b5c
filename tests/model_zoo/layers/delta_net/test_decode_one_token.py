"""The kernel of steps with a state for a multiprocessor at most, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.decode import one_token
from model_zoo.layers.delta_net.decode.kernel import delta_net_decode
from model_zoo.layers.delta_net.decode.one_token import decode_one_token, serves
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net
from model_zoo.layers.delta_net.inputs import DeltaNetState, Snapshots
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
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
    return decoded(case, decode_one_token)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_continue_their_states(device: str, dtype: torch.dtype):
    case = delta_net_case([1] * 3, [3, 1, 100], heads=(2, 6), dtype=dtype, device=device)
    assert_decoded_right(case, run)


@examples(40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 2, 3, 60])), min_size=1, max_size=3
    ),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    dim=st.sampled_from([16, 32, 64]),
    conv_size=st.integers(2, 4),
    padding=st.integers(0, 3),
)
def test_rows_of_any_shape(
    rows: list[tuple[int, int]], heads: tuple[int, int], dim: int, conv_size: int, padding: int
):
    lens, before = [n for n, _ in rows], [m for _, m in rows]
    case = delta_net_case(
        lens, before, heads=heads, dims=(dim, dim), conv_size=conv_size, padding=padding
    )
    assert_decoded_right(case, run)


def test_a_state_of_16_bits_is_rounded_once_a_step(device: str):
    dtype = FP16 if device == "cpu" else BF16
    case = delta_net_case([1, 1], [5, 0], state_dtype=dtype, device=device)
    assert_decoded_right(case, run)


def test_a_new_sequence_does_not_read_its_slot(device: str):
    case = delta_net_case([1, 1], [0, 2], device=device)
    clean = case.copy()
    slot = int(case.rows.slots[0])
    case.state.state[slot] = float("nan")
    case.state.conv[slot] = float("nan")
    assert torch.equal(run(case), run(clean))
    assert torch.equal(case.state.state[slot], clean.state.state[slot])
    assert torch.equal(case.state.conv[slot, 0], clean.state.conv[slot, 0])
    assert case.state.conv[slot, 1:].isnan().all(), "an input of no token"


def test_padding_gets_zeros_and_changes_nothing(device: str):
    """Rows without tokens, rows without a slot, tokens of no row."""
    case = delta_net_case(
        [1, 1, 0, 0], [4, 9, 0, 7], padding=5, slots=[2, -1, -1, 1], device=device
    )
    before = case.copy()
    out = run(case)
    assert not out[2:].any() and out[:2].isfinite().all() and out[1].any()
    unused = [0, 1, 3, 4, 5]
    assert torch.equal(case.state.state[unused], before.state.state[unused])
    assert torch.equal(case.state.conv[unused], before.state.conv[unused])
    assert_decoded_right(before, run)


def test_a_row_without_a_slot_reads_and_writes_no_memory_of_the_pool(device: str):
    """Slot -1 would be a place before the first one."""
    case = delta_net_case([1, 1], [4, 9], slots=[0, -1], device=device)
    whole = case.state
    whole.conv[0], whole.state[0] = float("nan"), float("nan")
    pool = DeltaNetState(whole.conv[1:], whole.state[1:])
    assert run(replace(case, state=pool)).isfinite().all()
    assert whole.conv[0].isnan().all() and whole.state[0].isnan().all()


def test_a_query_and_a_key_may_be_zero(device: str):
    case = delta_net_case([1, 1], [4, 0], device=device)
    case.weights.conv.zero_()
    assert_decoded_right(case, run)


def test_inputs_lie_at_strides_of_their_own(device: str):
    case = delta_net_case([1, 1, 1], [4, 0, 9], heads=(1, 3), device=device)
    weights = replace(case.weights, conv=case.weights.conv.T.contiguous().T)
    assert_decoded_right(replace(case, b=case.b.contiguous(), weights=weights), run)


def test_no_row_of_a_step_has_a_token(device: str):
    case = delta_net_case([0, 0], [3, 0], padding=2, device=device)
    before = case.copy()
    assert not run(case).any()
    assert torch.equal(case.state.state, before.state.state)


@pytest.mark.parametrize("first", [0, 5])
def test_kernels_hand_a_sequence_to_each_other(device: str, first: int):
    """As where other rows come and go: each input has its place among the last ones."""
    tokens = 9  # twice around the places of inputs
    whole = delta_net_case([tokens], [first], heads=(1, 3), device=device)
    parts = whole.copy()
    expected = gated_delta_net_reference(*whole.double().arguments)
    kernels = [decode_one_token, delta_net_decode, decode_one_token]
    found = [decoded(parts.part(t, t + 1), kernels[t % 3]) for t in range(tokens)]
    torch.testing.assert_close(torch.cat(found).cpu().double(), expected, rtol=2e-5, atol=2e-5)


def test_nan_of_a_decay_reaches_the_outputs(device: str):
    case = delta_net_case([1, 1], [9, 3], heads=(1, 2), device=device)
    case.weights.dt_bias[1] = float("nan")
    out = run(case).unflatten(1, (2, -1))
    assert out[:, 1].isnan().all() and not out[:, 0].isnan().any()


def test_a_row_of_nan_changes_no_other(device: str):
    case = delta_net_case([1, 1, 1], [9, 3, 0], slots=[2, 0, 1], device=device)
    clean = case.copy()
    case.qkv[1] = float("nan")
    found, expected = run(case), run(clean)
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(case.state.state[[2, 1]], clean.state.state[[2, 1]])


def with_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(one_token, "multiprocessors", lambda device: count)


def test_it_serves_as_many_states_as_there_are_multiprocessors(monkeypatch: pytest.MonkeyPatch):
    case = delta_net_case([1, 1], [9, 3], heads=(2, 4))
    with_processors(monkeypatch, 8)
    assert serves(case.state, case.rows)
    with_processors(monkeypatch, 7)
    assert not serves(case.state, case.rows)


def test_it_serves_what_it_can_compute(monkeypatch: pytest.MonkeyPatch):
    """Neither drafts, nor snapshots, nor the bits that a prompt's tokens would have."""
    with_processors(monkeypatch, 1000)
    case = delta_net_case([1, 1], [9, 3])
    snapshots = Snapshots(int32([10, 4], "cpu"), int32([2, 3], "cpu")[:, None])
    assert serves(case.state, case.rows)
    assert not serves(case.state, replace(case.rows, max_tokens=2))
    assert not serves(case.state, replace(case.rows, snapshots=snapshots))
    assert not serves(case.state, replace(case.rows, token_by_token=True))
    assert not serves(delta_net_case([1], dims=(16, 32)).state, case.rows)


@pytest.mark.parametrize("processors", [3, 4])
def test_a_layer_decodes_with_the_kernel_that_serves(
    processors: int, monkeypatch: pytest.MonkeyPatch
):
    """Both are right; which one has run shows in the bits."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    with_processors(monkeypatch, processors)
    case = delta_net_case([1, 1], [9, 3], heads=(1, 2), dims=(32, 32))
    kernel, other = decode_one_token, delta_net_decode
    if processors == 3:
        kernel, other = other, kernel
    expected, wrong = decoded(case.copy(), kernel), decoded(case.copy(), other)
    found = gated_delta_net(*case.arguments)
    assert torch.equal(found, expected) and not torch.equal(found, wrong)


@pytest.mark.gpu
def test_calls_in_a_graph_are_those_that_start_after_each_other():
    """Two layers in turns, which overlap in a graph."""
    layers = [
        delta_net_case([1, 1], [9, 4], heads=(16, 48), dims=(128, 128), dtype=BF16, seed=seed,
                       device="cuda")
        for seed in range(2)
    ]  # fmt: skip
    assert_overlapped_as_alone(layers, decode_one_token)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 32), (16, 48), (8, 24)])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_true_shapes_on_a_gpu(heads: tuple[int, int], state_dtype: torch.dtype):
    case = delta_net_case(
        [1, 0, 1], [7, 3, 0], heads=heads, dims=(128, 128), dtype=BF16, state_dtype=state_dtype,
        padding=1, device="cuda",
    )  # fmt: skip
    assert_decoded_right(case, run)
