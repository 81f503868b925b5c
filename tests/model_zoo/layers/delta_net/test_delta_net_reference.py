"""The gated delta net's definition: against transformers, and against itself in other forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net
from model_zoo.layers.delta_net.inputs import (
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)
from model_zoo.layers.delta_net.reference import (
    chunked_delta_rule,
    gated_delta_net_reference,
    recurrent_delta_rule,
)
from tests.support.delta_net.cases import DeltaNetCase, delta_net_case, int32
from tests.support.examples import examples

NEAR = {"rtol": 1e-9, "atol": 1e-9}  # float64


def run(case: DeltaNetCase, rule=None) -> torch.Tensor:
    return gated_delta_net_reference(*case.arguments, delta_rule=rule)


def assert_same_pools(found: DeltaNetCase, expected: DeltaNetCase) -> None:
    torch.testing.assert_close(found.state.state, expected.state.state, **NEAR)
    torch.testing.assert_close(found.state.conv, expected.state.conv, rtol=0, atol=0)


def test_prompt_and_answer_are_those_of_transformers():
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=48, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=24, linear_conv_kernel_dim=4, num_hidden_layers=4, rms_norm_eps=1e-6,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    layer.norm.weight.data.normal_(1, 0.1)
    layer.A_log.data.uniform_(-3, 2)
    layer.dt_bias.data.normal_()
    weights = DeltaNetWeights(
        layer.conv1d.weight.detach().squeeze(1), layer.A_log.detach(), layer.dt_bias.detach(),
        layer.norm.weight.detach(), 1e-6,
    )  # fmt: skip
    conv_dim = layer.conv1d.weight.shape[0]
    state = DeltaNetState(torch.randn(3, 4, conv_dim), torch.randn(3, 6, 24, 16))
    cache, x = DynamicCache(config=config), torch.randn(1, 75, 48)
    begin = 0
    for end in (70, 71, 72, 73, 74, 75):  # the cache of transformers takes one token at a time
        part = x[:, begin:end]
        with torch.no_grad():
            expected = layer(part, cache)[0]
            projections = [
                linear(part[0])
                for linear in (
                    layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a,
                )
            ]  # fmt: skip
            rows = DeltaNetRows(
                int32([0, end - begin], "cpu"), int32([end], "cpu"), int32([1], "cpu"), end - begin
            )
            found = layer.out_proj(gated_delta_net(*projections, weights, state, rows))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        begin = end


@examples(60)
@given(
    lens=st.lists(st.sampled_from([0, 1, 2, 3, 8, 9, 63, 64, 65, 130]), min_size=1, max_size=4),
    data=st.data(),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    conv_size=st.integers(2, 4),
    padding=st.integers(0, 3),
)
def test_chunks_compute_what_one_token_after_the_other_does(
    lens: list[int], data: st.DataObject, heads: tuple[int, int], conv_size: int, padding: int
):
    before = [data.draw(st.sampled_from([0, 1, 2, 50])) for _ in lens]
    case = delta_net_case(
        lens, before, heads=heads, dims=(8, 16), conv_size=conv_size, padding=padding
    ).double()
    by_token, by_chunk = case.copy(), case.copy()
    expected = run(by_token, recurrent_delta_rule)
    torch.testing.assert_close(run(by_chunk, chunked_delta_rule), expected, **NEAR)
    assert_same_pools(by_chunk, by_token)
    assert not expected[sum(lens) :].any()


@pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 100])
def test_a_prompt_that_is_cut_continues_as_if_it_were_not(cut: int):
    whole = delta_net_case([110], [5]).double()
    parts = whole.copy()
    expected = run(whole)
    found = torch.cat([run(parts.part(0, cut)), run(parts.part(cut, 110))])
    torch.testing.assert_close(found, expected, **NEAR)
    assert_same_pools(parts, whole)


def test_rows_do_not_depend_on_each_other_nor_on_a_new_slots_content():
    together = delta_net_case([4, 0, 70, 1], [0, 9, 4, 30]).double()
    alone, begin = together.copy(), 0
    together.state.state[together.rows.slots[0]] = float("nan")
    together.state.conv[together.rows.slots[0]] = float("nan")
    found = run(together)
    for row, n in enumerate((4, 0, 70, 1)):
        rows = DeltaNetRows(
            int32([0, n], "cpu"), alone.rows.cache_seqlens[row, None],
            alone.rows.slots[row, None], n,
        )  # fmt: skip
        tensors = (t[begin : begin + n] for t in (alone.qkv, alone.z, alone.b, alone.a))
        expected = gated_delta_net_reference(*tensors, alone.weights, alone.state, rows)
        torch.testing.assert_close(found[begin : begin + n], expected, **NEAR)
        begin += n
    assert_same_pools(together, alone)


def test_a_row_without_a_slot_changes_no_state():
    case = delta_net_case([5, 80], slots=[-1, -1]).double()
    with_slots = delta_net_case([5, 80], slots=[1, 0]).double()
    before = case.copy()
    torch.testing.assert_close(run(case), run(with_slots), rtol=0, atol=0)
    assert_same_pools(case, before)


def test_a_snapshot_is_the_state_of_the_sequence_cut_there():
    table = torch.full((1, 129), -1, dtype=torch.int32)
    table[0, 0], table[0, 128] = 5, 3
    whole = delta_net_case(
        [300], [100], slots=[0], free_slots=6, snapshots=Snapshots(int32([128], "cpu"), table)
    ).double()
    plain = whole.copy()
    found = run(whole)
    begin = 0
    for end, slot in ((28, 5), (156, 3), (300, 0)):  # at 128, 256 and 400 of the sequence
        cut = plain.part(begin, end)
        cut = DeltaNetCase(*cut.arguments[:-1], DeltaNetRows(
            cut.rows.cu_seqlens, cut.rows.cache_seqlens, cut.rows.slots, end - begin))  # fmt: skip
        torch.testing.assert_close(found[begin:end], run(cut), **NEAR)
        torch.testing.assert_close(whole.state.state[slot], plain.state.state[0], **NEAR)
        torch.testing.assert_close(whole.state.conv[slot], plain.state.conv[0], **NEAR)
        begin = end
    others = [1, 2, 4, 6]
    assert torch.equal(whole.state.state[others], plain.state.state[others])


def test_inputs_of_16_bits_are_computed_in_float32():
    case = delta_net_case([1, 90], [7, 0], dtype=torch.bfloat16, state_dtype=torch.float32)
    exact = case.double()
    found, expected = run(case), run(exact)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(case.state.state.double(), exact.state.state, rtol=1e-4, atol=1e-5)
