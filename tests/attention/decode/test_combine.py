"""The combine kernel alone: partial results written by hand, and no work tiles to attend to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention.decode.decode import decode
from attention.planner.split_plan import SplitPlan, SplitPlanSpec
from tests.support.attention.attention_oracle import OracleCase, make_case

NAN = float("nan")
PROGRAMS, GROUP, HEADS, DIM = 4, 3, 2, 80


class Merge:
    """Rows of two tokens whose partials are random; programs have no work tiles to compute.

    units: (row, KV head, number of partials) of what is to be merged, one a program.
    """

    def __init__(
        self, units: list[tuple[int, int, int]], device: str, *, q_len: int = 2, sinks: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.case: OracleCase = make_case(
            [(2, 2)] * 3,
            kv_heads=HEADS,
            group=GROUP,
            head_dim=DIM,
            dtype=torch.float32,  # the interpreter cuts bfloat16 off where a GPU rounds
            sinks=sinks,
            device=device,
        )
        self.units, self.q_len = units, q_len
        spec = SplitPlanSpec(kv_heads=HEADS, programs=PROGRAMS, max_q_len=2)
        self.plan = SplitPlan.allocate(
            spec, max_rows=70, group=GROUP, head_dim=DIM, queued=False, device=torch.device(device)
        )
        self.plan.work.fill_(2**31 - 1)
        self.plan.partial_out.fill_(NAN)
        self.plan.partial_lse.fill_(NAN)
        self.firsts: list[int] = []
        first = 1  # partial 0 belongs to no unit
        for program, (row, head, work_tiles) in enumerate(units):
            self.firsts.append(first)
            self.plan.merges[program] = torch.tensor([first, work_tiles])
            self.plan.work[first : first + work_tiles] = torch.tensor(
                [row, head, 0, 0, 2 * row, q_len, 0, 1], dtype=torch.int32
            )
            for unit in (self.out(program), self.lse(program)):
                unit.copy_(torch.randn(unit.shape) * 3)
            first += work_tiles

    def out(self, unit: int) -> Tensor:
        """[partials, q_len * GROUP, DIM] of a unit."""
        first, work_tiles = self.firsts[unit], self.units[unit][2]
        return self.plan.partial_out[first : first + work_tiles, : self.q_len * GROUP]

    def lse(self, unit: int) -> Tensor:
        first, work_tiles = self.firsts[unit], self.units[unit][2]
        return self.plan.partial_lse[first : first + work_tiles, : self.q_len * GROUP]

    def run(self) -> tuple[Tensor, Tensor]:
        """out [3, 2, HEADS, GROUP, DIM], lse [3, 2, HEADS, GROUP]; NaN where nothing was written"""
        case = self.case
        out, lse = case.results()
        decode(case.inputs(out, lse), self.plan)
        return out.view(3, 2, HEADS, GROUP, DIM), lse.view(3, 2, HEADS, GROUP)

    def check(self) -> None:
        out, lse = self.run()
        for unit, (row, head, _) in enumerate(self.units):
            want, want_lse = self.expected(unit)
            tokens = slice(0, self.q_len)
            torch.testing.assert_close(out[row, tokens, head].double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                lse[row, tokens, head].double(), want_lse, rtol=1e-5, atol=1e-5
            )
            out[row, tokens, head] = lse[row, tokens, head] = NAN
        assert out.isnan().all() and lse.isnan().all(), "what is not merged was written"

    def expected(self, unit: int) -> tuple[Tensor, Tensor]:
        """In float64 (out [q_len, GROUP, DIM], lse [q_len, GROUP])."""
        lses = self.lse(unit).double() * math.log(2)
        weights = lses[..., None].exp()
        values = self.out(unit).double().masked_fill(weights == 0, 0) * weights
        total, mixed = weights.sum(0), values.sum(0)
        if self.case.sinks is not None:
            sinks = self.case.sinks.view(HEADS, GROUP)[self.units[unit][1]]
            total = total + sinks.double().exp().repeat(self.q_len)[:, None]
        out = torch.where(total > 0, mixed / total, 0.0)
        return out.view(self.q_len, GROUP, DIM), total.log().view(self.q_len, GROUP)


@pytest.mark.parametrize("work_tiles", [2, 3, 31, 32, 33, 65])
@pytest.mark.parametrize("sinks", [False, True])
def test_any_number_of_partials_is_weighted_by_the_softmax_sums(
    device: str, work_tiles: int, sinks: bool
):
    Merge([(1, 0, work_tiles)], device, sinks=sinks).check()


def test_units_are_merged_apart_and_the_rest_is_untouched(device: str):
    Merge([(0, 1, 2), (2, 0, 5), (2, 1, 3)], device).check()


def test_queries_that_a_row_does_not_have_are_not_written(device: str):
    Merge([(1, 1, 4), (0, 0, 2)], device, q_len=1).check()


@pytest.mark.parametrize("sinks", [False, True])
def test_empty_partials_do_not_count_whatever_their_buffers_hold(device: str, sinks: bool):
    merge = Merge([(0, 0, 35), (1, 1, 2)], device, sinks=sinks)
    for work_tile in (0, 1, 17, 32, 33, 34):
        merge.lse(0)[work_tile] = -torch.inf
        merge.out(0)[work_tile] = NAN
    merge.lse(1)[0, :2] = -torch.inf
    merge.out(1)[0, :2] = NAN
    merge.check()


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_of_empty_partials_is_zero_and_its_lse_that_of_the_sinks_alone(
    device: str, sinks: bool
):
    merge = Merge([(0, 0, 3)], device, sinks=sinks)
    merge.lse(0).fill_(-torch.inf)
    merge.out(0).fill_(NAN)
    out, lse = merge.run()
    assert (out[0, :, 0] == 0).all()
    if merge.case.sinks is None:
        assert (lse[0, :, 0] == -torch.inf).all()
    else:
        torch.testing.assert_close(lse[0, :, 0], merge.case.sinks[:GROUP].expand(2, -1))


@pytest.mark.parametrize("shift", [-20_000.0, 20_000.0])
def test_only_differences_of_softmax_sums_matter_to_the_result(device: str, shift: float):
    merge = Merge([(0, 0, 4)], device)
    merge.lse(0).copy_((merge.lse(0) * 16).round() / 16)  # so that the shift is exact
    before, lse_before = merge.run()
    merge.lse(0).add_(shift)
    after, lse_after = merge.run()
    assert torch.equal(after[0, :, 0], before[0, :, 0])
    shifted = lse_before[0, :, 0] + shift * math.log(2)
    torch.testing.assert_close(lse_after[0, :, 0], shifted, rtol=1e-6, atol=0)


def test_one_partial_may_outweigh_the_others(device: str):
    merge = Merge([(0, 0, 40)], device)
    merge.lse(0)[37] = 300.0
    out, _ = merge.run()
    assert torch.equal(out[0, :, 0].flatten(0, 1), merge.out(0)[37])


def test_merging_twice_gives_the_same_bits(device: str):
    merge = Merge([(0, 0, 40), (1, 1, 7)], device)
    for first, second in zip(merge.run(), merge.run(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
