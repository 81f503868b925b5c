"""Merging of split rows: parts written by hand, whose last one a program adds, and many programs.

A program runs an empty work tile, which is one more part of a row and KV head whose other parts are
said to have arrived.  Programs of an interpreter run one after the other, in any order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from attention.common.hopper import tma_desc
from attention.common.kernel_inputs import KernelInputs
from attention.decode.decode import decode
from attention.decode.decode_hopper import decode_hopper
from attention.planner.split_plan import SplitPlan, SplitPlanSpec
from tests.support.attention.attention_oracle import OracleCase, check, make_case
from tests.support.attention.decode_kernel_runner import make_plan, most, poison
from tests.support.interpreter.gluon_interpreter import interpreted

NAN = float("nan")
PROGRAMS, GROUP, HEADS, DIM = 4, 3, 2, 80
HOPPER = "attention.decode.decode_hopper"
MODULES = ("attention.common.hopper", *(f"{HOPPER}_{x}" for x in ("load", "tile", "merge")), HOPPER)
Order = Callable[[int], Iterable[int]]
Decode = Callable[[KernelInputs, SplitPlan], None]


@contextmanager
def interpreted_hopper(order: Order = range) -> Iterator[Decode]:
    with interpreted("_decode_hopper", *MODULES, order=order):
        sys.modules[HOPPER].tma_desc = tma_desc  # pyright: ignore[reportAttributeAccessIssue]
        yield sys.modules[HOPPER].decode_hopper


@contextmanager
def interpreted_decode(order: Order = range) -> Iterator[Decode]:
    from triton.runtime.interpreter import interpreter_builder

    run_program = interpreter_builder.set_grid_idx
    with pytest.MonkeyPatch.context() as patch:

        def decode_in_order(inputs: KernelInputs, plan: SplitPlan) -> None:
            programs = list(order(plan.spec.programs))
            patch.setattr(
                interpreter_builder,
                "set_grid_idx",
                lambda x, y, z: run_program(programs[x], y, z),
            )
            decode(inputs, plan)

        yield decode_in_order


INTERPRETED = {"decode": interpreted_decode, "decode_hopper": interpreted_hopper}


class Merge:
    """Rows of two tokens whose parts are random but for an empty one, which a program adds.

    units: (row, KV head, number of random parts) of what is to be merged.
    """

    def __init__(
        self,
        units: list[tuple[int, int, int]],
        kernel: tuple[Decode, str],
        *,
        q_len: int = 2,
        sinks: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.decode, device = kernel
        self.case: OracleCase = make_case(
            [(2, 2)] * 3,
            kv_heads=HEADS,
            group=GROUP,
            head_dim=DIM,
            # The interpreter cuts bfloat16 off where a GPU rounds.
            dtype=torch.bfloat16 if self.decode is decode_hopper else torch.float32,
            sinks=sinks,
            device=device,
        )
        self.units, self.q_len = units, q_len
        spec = SplitPlanSpec(kv_heads=HEADS, programs=PROGRAMS, max_q_len=2)
        self.plan = SplitPlan.allocate(
            spec, max_rows=70, group=GROUP, head_dim=DIM, queued=False, device=torch.device(device)
        )
        self.plan.work.fill_(2**31 - 1)
        self.plan.merges.fill_(2**31 - 1)
        self.plan.partial_out.fill_(NAN)
        self.plan.partial_lse.fill_(NAN)
        self.firsts: list[int] = []
        first = 1  # part 0 belongs to no unit
        for merge, (row, head, parts) in enumerate(units):
            self.firsts.append(first)
            self.plan.merges[merge] = torch.tensor([first, parts + 1])
            for unit in (self.out(merge), self.lse(merge)):
                unit.copy_(torch.randn(unit.shape) * 3)
            first += parts
            self.plan.work[first] = torch.tensor([row, head, 0, 0, 2 * row, q_len, 0, merge + 1])
            first += 1

    def out(self, unit: int) -> Tensor:
        """[parts, q_len * GROUP, DIM] of a unit."""
        first, parts = self.firsts[unit], self.units[unit][2]
        return self.plan.partial_out[first : first + parts, : self.q_len * GROUP]

    def lse(self, unit: int) -> Tensor:
        first, parts = self.firsts[unit], self.units[unit][2]
        return self.plan.partial_lse[first : first + parts, : self.q_len * GROUP]

    def run(self) -> tuple[Tensor, Tensor]:
        """out [3, 2, HEADS, GROUP, DIM], lse [3, 2, HEADS, GROUP]; NaN where nothing was written"""
        out, lse = self.case.results()
        for merge, (_, _, parts) in enumerate(self.units):
            empty = self.firsts[merge] + parts
            self.plan.starts.fill_(empty + 1)
            self.plan.starts[0] = empty
            self.plan.arrived[merge] = parts
            self.decode(self.case.inputs(out, lse), self.plan)
        assert not self.plan.arrived.any(), "the next launch would merge too soon"
        return out.view(3, 2, HEADS, GROUP, DIM), lse.view(3, 2, HEADS, GROUP)

    def check(self) -> None:
        out, lse = self.run()
        rounding = 1e-2 if out.dtype == torch.bfloat16 else 1e-5
        for unit, (row, head, _) in enumerate(self.units):
            want, want_lse = self.expected(unit)
            tokens = slice(0, self.q_len)
            torch.testing.assert_close(
                out[row, tokens, head].double(), want, rtol=rounding, atol=rounding
            )
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


@pytest.fixture(params=["decode", "decode_hopper"])
def kernel(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[Decode, str]]:
    """A decode kernel and where it runs."""
    if device == "cpu":
        with INTERPRETED[request.param]() as run:
            yield run, device
    elif request.param == "decode_hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is made for compute capability 9.0")
    else:
        yield {"decode": decode, "decode_hopper": decode_hopper}[request.param], device


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8, 33, 65])
@pytest.mark.parametrize("sinks", [False, True])
def test_any_number_of_parts_is_weighted_by_the_softmax_sums(
    kernel: tuple[Decode, str], parts: int, sinks: bool
):
    Merge([(1, 0, parts)], kernel, sinks=sinks).check()


def test_units_are_merged_apart_and_the_rest_is_untouched(kernel: tuple[Decode, str]):
    Merge([(0, 1, 2), (2, 0, 5), (2, 1, 3)], kernel).check()


def test_queries_that_a_row_does_not_have_are_not_written(kernel: tuple[Decode, str]):
    Merge([(1, 1, 4), (0, 0, 2)], kernel, q_len=1).check()


@pytest.mark.parametrize("sinks", [False, True])
def test_empty_parts_do_not_count_whatever_their_buffers_hold(
    kernel: tuple[Decode, str], sinks: bool
):
    merge = Merge([(0, 0, 35), (1, 1, 2)], kernel, sinks=sinks)
    for part in (0, 1, 17, 32, 33, 34):
        merge.lse(0)[part] = -torch.inf
        merge.out(0)[part] = NAN
    merge.lse(1)[0, :2] = -torch.inf
    merge.out(1)[0, :2] = NAN
    merge.check()


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_of_empty_parts_is_zero_and_its_lse_that_of_the_sinks_alone(
    kernel: tuple[Decode, str], sinks: bool
):
    merge = Merge([(0, 0, 3)], kernel, sinks=sinks)
    merge.lse(0).fill_(-torch.inf)
    merge.out(0).fill_(NAN)
    out, lse = merge.run()
    assert (out[0, :, 0] == 0).all()
    if merge.case.sinks is None:
        assert (lse[0, :, 0] == -torch.inf).all()
    else:
        torch.testing.assert_close(lse[0, :, 0], merge.case.sinks[:GROUP].expand(2, -1))


@pytest.mark.parametrize("shift", [-20_000.0, 20_000.0])
def test_only_differences_of_softmax_sums_matter_to_the_result(
    kernel: tuple[Decode, str], shift: float
):
    merge = Merge([(0, 0, 4)], kernel)
    merge.lse(0).copy_((merge.lse(0) * 16).round() / 16)  # so that the shift is exact
    before, lse_before = merge.run()
    merge.lse(0).add_(shift)
    after, lse_after = merge.run()
    assert torch.equal(after[0, :, 0], before[0, :, 0])
    shifted = lse_before[0, :, 0] + shift * math.log(2)
    torch.testing.assert_close(lse_after[0, :, 0], shifted, rtol=1e-6, atol=0)


def test_one_part_may_outweigh_the_others(kernel: tuple[Decode, str]):
    merge = Merge([(0, 0, 40)], kernel)
    merge.lse(0)[37] = 300.0
    out, _ = merge.run()
    assert torch.equal(out[0, :, 0].flatten(0, 1), merge.out(0)[37].to(out.dtype))


def test_merging_twice_gives_the_same_bits(kernel: tuple[Decode, str]):
    merge = Merge([(0, 0, 40), (1, 1, 7)], kernel)
    for first, second in zip(merge.run(), merge.run(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_merged_before_all_parts_have_arrived(kernel: tuple[Decode, str]):
    merge = Merge([(1, 0, 3)], kernel)
    out, lse = merge.case.results()
    merge.plan.starts.fill_(merge.firsts[0] + 4)
    merge.plan.starts[0] = merge.firsts[0] + 3
    for arrived in range(3):
        assert int(merge.plan.arrived[0]) == arrived
        merge.decode(merge.case.inputs(out, lse), merge.plan)
        assert out.isnan().all() and lse.isnan().all()
    merge.decode(merge.case.inputs(out, lse), merge.plan)
    assert not out.view(3, 2, HEADS, -1)[1, :, 0].isnan().any() and not merge.plan.arrived.any()


def shuffled(programs: int) -> list[int]:
    return torch.randperm(programs).tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the programs as it likes")
@pytest.mark.parametrize(
    ("name", "planner"),
    [("decode", "stream-k"), ("decode", "thin"), ("decode", "fa3"), ("decode_hopper", "stream-k")],
)
def test_bits_do_not_depend_on_which_program_comes_last(name: str, planner: str, device: str):
    """In float32, where an output shows the order of additions; counters and queue end at zero."""
    torch.manual_seed(0)
    rows = [(1, 700), (3, 300), (1, 0), (2, 150), (1, 64)]
    case = make_case(rows, kv_heads=2, group=4, head_dim=64, dtype=torch.float32, sinks=True)
    plan, host = make_plan(case, planner, max_q_len=3, programs=32, block=64)
    assert len(host.merges) >= 4 and host.merges[:, 1].max() >= 4
    orders: list[Order] = [range, lambda n: reversed(range(n)), shuffled, shuffled]
    results = []
    for order in orders:
        poison(plan)
        out, lse = case.results()
        with INTERPRETED[name](order) as run:
            run(case.inputs(out, lse), plan)
        results.append((out, lse))
        assert not plan.arrived.any() and int(plan.queue) == 0
    check(case, *results[0], served=most(3))
    for found in results[1:]:
        assert torch.equal(found[0], results[0][0]) and torch.equal(found[1], results[0][1])
