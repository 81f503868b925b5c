"""The prompt kernels of the gated delta net against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_zoo.layers.delta_net import chunk_plan
from model_zoo.layers.delta_net.chunk_plan import plan_chunks
from model_zoo.layers.delta_net.inputs import CHUNK, MAX_DECODE_TOKENS, DeltaNetRows, Snapshots
from model_zoo.layers.delta_net.prompts import delta_net_prompts
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from tests.support.delta_net.cases import DeltaNetCase, delta_net_case, int32
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16, FP32]
DIGIT = {FP32: 1e-5, FP16: 2**-10, BF16: 2**-7}  # a last digit, of the largest mantissa


def run(case: DeltaNetCase) -> Tensor:
    out = torch.full_like(case.z, float("nan"), memory_format=torch.contiguous_format)
    plan = plan_chunks(case.rows.cu_seqlens, case.rows.cache_seqlens, len(case.qkv))
    delta_net_prompts(*case.arguments, plan, out)
    return out


def error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean squared difference, over that of what was expected."""
    difference = found.cpu().double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def assert_right(case: DeltaNetCase) -> None:
    """Output and state differ from the definition by some roundings of the type, the convolution's
    inputs by none."""
    exact = case.double()
    expected, found = gated_delta_net_reference(*exact.arguments), run(case)
    digit = DIGIT[case.qkv.dtype]
    assert found.isfinite().all()
    assert error(found, expected) < 2 * digit
    assert float((found.cpu().double() - expected).abs().max()) < 16 * digit * expected.abs().max()
    assert torch.equal(case.state.conv.cpu().double(), exact.state.conv)
    assert error(case.state.state, exact.state.state) < 2 * digit


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length(device: str, dtype: torch.dtype):
    case = delta_net_case([9, 130, 64], [0, 3, 64], heads=(2, 4), dtype=dtype, device=device)
    assert_right(case)


@examples(40)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([9, 63, 64, 65, 100, 129]), st.sampled_from([0, 1, 2, 63, 64, 100])
        ),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    dims=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    conv_size=st.integers(2, 4),
)
def test_rows_of_any_shape(
    rows: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], conv_size: int
):
    lens, before = [n for n, _ in rows], [m for _, m in rows]
    assert_right(delta_net_case(lens, before, heads=heads, dims=dims, conv_size=conv_size))


@pytest.mark.parametrize("alike", [0.9, 1.0])
def test_keys_may_be_alike(device: str, alike: float):
    """As those of one token again and again, where powers of A grow."""
    assert_right(delta_net_case([130], [0], alike=alike, device=device))


def test_a_state_may_have_16_bits(device: str):
    dtype = FP16 if device == "cpu" else BF16
    case = delta_net_case([80, 20], [5, 0], state_dtype=dtype, device=device)
    exact = case.double()
    gated_delta_net_reference(*exact.arguments)
    run(case)
    torch.testing.assert_close(
        case.state.state.cpu().double(), exact.state.state, rtol=DIGIT[dtype], atol=1e-4
    )


def test_a_new_sequence_does_not_read_its_slot(device: str):
    case = delta_net_case([70, 20], [0, 0], device=device)
    clean = case.copy()
    case.state.state[:] = float("nan")
    case.state.conv[:] = float("nan")
    torch.testing.assert_close(run(case), run(clean), rtol=0, atol=0)
    slots = case.rows.slots.long()
    assert torch.equal(case.state.state[slots], clean.state.state[slots])
    assert torch.equal(case.state.conv[slots], clean.state.conv[slots])


def test_other_rows_and_padding_are_left_alone(device: str):
    case = delta_net_case(
        [1, 70, 0, MAX_DECODE_TOKENS, 20], [4, 1, 0, 7, 2], padding=5, slots=[2, 0, -1, 1, -1],
        device=device,
    )  # fmt: skip
    before, exact = case.copy(), case.double()
    out = run(case)
    expected = gated_delta_net_reference(*exact.arguments)
    mine = torch.cat([torch.arange(1, 71), torch.arange(79, 99)])
    others = [index for index in range(len(out)) if index not in mine]
    assert out[others].isnan().all()
    torch.testing.assert_close(out[mine].cpu().double(), expected[mine], rtol=1e-3, atol=1e-4)
    unused = [1, 2, 3, 4, 5, 6]
    assert torch.equal(case.state.state[unused], before.state.state[unused])
    assert torch.equal(case.state.conv[unused], before.state.conv[unused])


@pytest.mark.parametrize("conv_size", [2, 3, 4])
def test_inputs_from_before_the_row_are_kept_with_its_state(device: str, conv_size: int):
    """Snapshots after 3, 2, 1 and 0 tokens of rows; that of the last is none."""
    snapshots = Snapshots(int32([64] * 4, device), int32([4, 5, 6, 7], device)[:, None])
    assert_right(
        delta_net_case(
            [12, 9, 70, 20], [61, 62, 63, 64], conv_size=conv_size, slots=[3, 2, 1, 0],
            free_slots=4, snapshots=snapshots, device=device,
        )
    )  # fmt: skip


def with_snapshots(case: DeltaNetCase, first: list[int], slots: list[int]) -> DeltaNetCase:
    """A copy of the case, with one snapshot a row."""
    device = case.qkv.device
    snapshots = Snapshots(int32(first, device), int32(slots, device)[:, None])
    return replace(case.copy(), rows=replace(case.rows, snapshots=snapshots))


@pytest.mark.parametrize(
    ("before", "border"),
    [pytest.param(0, 64, marks=pytest.mark.slow), (63, 128), (62, 192)],
)
def test_a_state_within_a_row_is_kept_and_changes_no_bit(device: str, before: int, border: int):
    """The snapshot has the bits of a row that ends there, as the last one does itself."""
    plain = delta_net_case([130, 12], [before, 60], slots=[2, 1], free_slots=3, device=device)
    case = with_snapshots(plain, [border, CHUNK], [4, 3])
    tokens = border - before
    cut = DeltaNetCase(
        *(t[:tokens] for t in (plain.qkv, plain.z, plain.b, plain.a)),
        plain.weights,
        plain.copy().state,
        DeltaNetRows(
            int32([0, tokens], device), int32([border], device), int32([2], device), tokens
        ),
    )
    assert_right(case.copy())
    assert torch.equal(run(case), run(plain))
    run(cut)
    assert torch.equal(case.state.state[4], cut.state.state[2])
    assert torch.equal(case.state.conv[4], cut.state.conv[2])
    assert torch.equal(case.state.state[:3], plain.state.state[:3])
    assert torch.equal(case.state.conv[:3], plain.state.conv[:3])


@pytest.mark.parametrize("first", [-1, 64, 256])
def test_positions_that_a_row_does_not_reach_keep_nothing(device: str, first: int):
    """Where it starts is one of them."""
    plain = delta_net_case([70], [64], free_slots=2, slots=[1], device=device)
    case = with_snapshots(plain, [first], [0])
    assert torch.equal(run(case), run(plain))
    assert torch.equal(case.state.state, plain.state.state)
    assert torch.equal(case.state.conv, plain.state.conv)


@pytest.mark.parametrize("cut", [CHUNK - 10, 2 * CHUNK - 10])
def test_a_prompt_that_is_cut_where_a_chunk_ends_has_the_same_bits(device: str, cut: int):
    whole = delta_net_case([150], [10], device=device)
    parts = whole.copy()
    expected = run(whole)
    found = torch.cat([run(parts.part(0, cut)), run(parts.part(cut, 150))])
    assert torch.equal(found, expected)
    assert torch.equal(parts.state.state, whole.state.state)
    assert torch.equal(parts.state.conv, whole.state.conv)


@pytest.mark.parametrize("cut", [11, 100])
def test_a_prompt_that_is_cut_elsewhere_is_right(device: str, cut: int):
    case = delta_net_case([150], [10], device=device)
    exact = case.double()
    expected = gated_delta_net_reference(*exact.arguments)
    found = torch.cat([run(case.part(0, cut)), run(case.part(cut, 150))])
    assert error(found, expected) < DIGIT[FP32]
    assert error(case.state.state, exact.state.state) < DIGIT[FP32]


@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    starts=st.lists(st.integers(0, 300), min_size=40, max_size=40),
    padding=st.integers(0, 100),
)
@examples(40)
def test_a_plan_has_every_token_of_a_prompt_once(lens: list[int], starts: list[int], padding: int):
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int()
    cache_seqlens = cu_seqlens.diff() + torch.tensor(starts[: len(lens)]).int()
    plan = plan_chunks(cu_seqlens, cache_seqlens, sum(lens) + padding)
    num_rows, num_chunks = plan.counts.tolist()
    prompts = [row for row, n in enumerate(lens) if n > MAX_DECODE_TOKENS]
    assert plan.rows[:num_rows].tolist() == prompts and num_chunks <= len(plan.chunks)
    seen = []
    for row, first, last in plan.chunks[:num_chunks].tolist():
        begin, end = cu_seqlens[row : row + 2].tolist()
        assert begin <= first < last <= end and last - first <= CHUNK
        assert last == end or (starts[row] + last - begin) % CHUNK == 0
        seen += range(first, last)
    expected = [range(cu_seqlens[row], cu_seqlens[row + 1]) for row in prompts]
    assert seen == [token for tokens in expected for token in tokens]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 32), (16, 48)])
def test_true_shapes_on_a_gpu(heads: tuple[int, int]):
    case = delta_net_case(
        [700, 1, 64, 9, 1200], [0, 5, 64, 100, 77], heads=heads, dims=(128, 128), dtype=BF16,
        padding=4, device="cuda",
    )  # fmt: skip
    exact = case.double()
    expected, found = gated_delta_net_reference(*exact.arguments), run(case)
    mine = [*range(700), *range(701, 1974)]
    assert error(found[mine], expected[mine]) < 2 * DIGIT[BF16]


def test_steps_of_up_to_256_rows_have_one_kernel_for_their_plan(monkeypatch: pytest.MonkeyPatch):
    """Each further one would be compiled while a server starts, or later."""
    constants: list[dict[str, int]] = []

    class Launches:
        def __getitem__(self, grid: object):
            return lambda *arguments, **found: constants.append(found)

    monkeypatch.setattr(chunk_plan, "_plan_chunks", Launches())
    for rows in (1, 17, 256):
        plan_chunks(int32(range(rows + 1), "cpu"), int32([9] * rows, "cpu"), 300)
    assert constants[0] == constants[1] == constants[2] and constants[0]["BLOCK"] == 256
