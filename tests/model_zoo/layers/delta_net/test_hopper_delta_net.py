"""The Hopper kernels of the gated delta net against float64: interpreted, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.delta_net.chunk_plan import plan_chunks
from model_zoo.layers.delta_net.inputs import Snapshots
from model_zoo.layers.delta_net.prompts import delta_net_prompts
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from model_zoo.layers.delta_net.tiles import PromptTiles
from tests.support.delta_net.cases import DeltaNetCase, delta_net_case, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory", "hopper_kernels")
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16]
DIGIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # a last digit, of the largest mantissa


def prompts(case: DeltaNetCase) -> Tensor:
    out = torch.full_like(case.z, float("nan"), memory_format=torch.contiguous_format)
    plan = plan_chunks(case.rows.cu_seqlens, case.rows.cache_seqlens, len(case.qkv))
    tiles = PromptTiles(local_hopper=True, scan_hopper=True)
    delta_net_prompts(*case.arguments, plan, out, tiles)
    return out


def error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean squared difference, over that of what was expected."""
    difference = found.cpu().double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def of_prompts(lens: list[int], before: list[int], **fields: object) -> DeltaNetCase:
    sizes: dict = {"heads": (1, 4), "dims": (128, 128), "dtype": torch.float16}
    return delta_net_case(lens, before, **{**sizes, **fields})


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_of_any_length_are_right(device: str, dtype: torch.dtype):
    case = of_prompts([9, 1, 130, 64], [0, 5, 3, 64], dtype=dtype, padding=3, device=device)
    exact = case.double()
    expected, found = gated_delta_net_reference(*exact.arguments), prompts(case)
    mine = [*range(9), *range(10, 204)]
    assert found[9].isnan().all() and found[204:].isnan().all()
    assert error(found[mine], expected[mine]) < 2 * DIGIT[dtype]
    slots = case.rows.slots[[0, 2, 3]].long().cpu()
    assert torch.equal(case.state.conv.cpu().double()[slots], exact.state.conv[slots])
    assert error(case.state.state.cpu()[slots], exact.state.state[slots]) < 2 * DIGIT[dtype]


def test_numbers_of_other_rows_do_not_matter(device: str):
    """A tile has tokens of the next row, which may be NaN."""
    case = of_prompts([70, 20], [0, 0], device=device)
    clean = prompts(case.copy())
    case.qkv[70:] = float("nan")
    assert torch.equal(prompts(case)[:70], clean[:70])


@pytest.mark.parametrize(("before", "border"), [(0, 64), (63, 128), (62, 192)])
def test_a_state_within_a_row_is_kept_and_changes_no_bit(device: str, before: int, border: int):
    plain = of_prompts([130, 12], [before, 60], slots=[2, 1], free_slots=3, device=device)
    snapshots = Snapshots(int32([border, 64], device), int32([4, 3], device)[:, None])
    case = replace(plain.copy(), rows=replace(plain.rows, snapshots=snapshots))
    tokens = border - before
    one = replace(plain.rows, cu_seqlens=int32([0, tokens], device),
                  cache_seqlens=int32([border], device), slots=int32([2], device))  # fmt: skip
    parts = (t[:tokens] for t in (plain.qkv, plain.z, plain.b, plain.a))
    cut = DeltaNetCase(*parts, plain.weights, plain.copy().state, one)
    assert torch.equal(prompts(case), prompts(plain))
    prompts(cut)
    assert torch.equal(case.state.state[4], cut.state.state[2])
    assert torch.equal(case.state.conv[4], cut.state.conv[2])
    assert torch.equal(case.state.state[:3], plain.state.state[:3])
    assert torch.equal(case.state.conv[:3], plain.state.conv[:3])


@pytest.mark.parametrize("border", [64, 128])
def test_inputs_from_before_the_row_are_kept_with_its_state(device: str, border: int):
    """Snapshots after 3, 2, 1 and 0 tokens of rows; that of the last is none."""
    before = [border - 3, border - 2, border - 1, border]
    case = of_prompts([12, 9, 70, 20], before, slots=[3, 2, 1, 0], free_slots=4, device=device)
    snapshots = Snapshots(int32([border] * 4, device), int32([4, 5, 6, 7], device)[:, None])
    case = replace(case, rows=replace(case.rows, snapshots=snapshots))
    exact = case.double()
    gated_delta_net_reference(*exact.arguments)
    prompts(case)
    assert torch.equal(case.state.conv.cpu().double(), exact.state.conv)
    digit = DIGIT[case.qkv.dtype]
    assert error(case.state.state.cpu(), exact.state.state) < 2 * digit


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 32), (16, 48)])
def test_true_shapes_on_a_gpu(heads: tuple[int, int]):
    case = of_prompts(
        [700, 1, 64, 9, 1200], [0, 5, 64, 100, 77], heads=heads, dtype=torch.bfloat16, padding=4,
        device="cuda",
    )  # fmt: skip
    again, exact = case.copy(), case.double()
    expected, found = gated_delta_net_reference(*exact.arguments), prompts(case)
    mine = [*range(700), *range(701, 1974)]
    assert error(found[mine], expected[mine]) < 2 * DIGIT[torch.bfloat16]
    assert torch.equal(prompts(again)[mine], found[mine])
    assert torch.equal(again.state.state, case.state.state)
