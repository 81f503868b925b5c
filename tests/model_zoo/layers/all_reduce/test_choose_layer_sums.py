"""Which sums GEMMs take over: all ranks decide alike, whatever goes wrong on one of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_zoo.layers import row_parallel
from model_zoo.layers.all_reduce import choose_layer_sums as choosing
from model_zoo.layers.all_reduce.choose_layer_sums import (
    OtherRanks,
    choose_layer_sums,
    described,
    fastest_from,
)
from model_zoo.layers.all_reduce.partial_sum import FusedSums
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.row_parallel import NEVER, RowParallelLinear
from model_zoo.parallel.communicator import Alone
from tests.support.parallel.group_of_buffers import group_of
from tests.support.parallel.thread_ranks import ThreadCommunicator, on_ranks

BF16, SIZE = torch.bfloat16, 64
FAULTS = ("raises", "gives up", "wrong", "differs")


class Layer(RowParallelLinear):
    """Whose GEMM adds and sends, as it says."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(
            32, SIZE, bias=False, dtype=BF16, communicator=communicator, parts={"row": SIZE},
            scheme=None, cuts={},
        )  # fmt: skip
        self.weight.fill_(0.5)
        self.precedes(RMSNorm(SIZE, 1e-6, BF16), Linear(SIZE, 16, bias=False, dtype=BF16))
        self.may = True

    def can_add(self, rows: int) -> bool:
        return self.may

    @property
    def can_send(self) -> bool:
        return self.may


@pytest.mark.parametrize(
    ("sent", "chosen"),
    [
        ({4096: 9.0, 2048: 8.0, 1024: 7.0}, 1024),
        ({4096: 9.0, 2048: 10.0, 1024: 7.0}, 4096),  # none below a size with which it is no faster
        ({4096: 10.0, 2048: 8.0}, NEVER),
        ({}, NEVER),
    ],
)
def test_gemms_send_from_the_last_size_on_with_which_they_are_faster(
    sent: dict[int, float], chosen: int
):
    assert fastest_from(sent, sent.__getitem__, lambda rows: 10.0) == chosen


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """choose(fault): what two ranks choose, of which rank 1 has the fault.

    The sum of a layer and its norm is that of the library; GEMMs take less time than norms.
    """
    state = SimpleNamespace(fault="", at_rows=0, timed=set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)

    def run(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        communicator: Any = layer._communicator
        here = communicator.rank == 1 and len(x) >= state.at_rows
        total = (residual.float() + communicator.all_reduce(Linear.forward(layer, x).float())).to(
            BF16
        )
        if here and state.fault == "raises":
            raise RuntimeError("out of memory\nmore of it")
        if state.fault == "wrong" and len(x) >= state.at_rows:
            total = total * 2
        if here and state.fault == "differs":
            total = total + 0.25
        return total, total

    def times(self: Any, x: Tensor, residual: Tensor) -> Any:
        layer = self.layers[0]
        by_gemm = len(x) <= layer.adds_up_to or len(x) >= layer.sends_from
        state.timed.add((len(x), by_gemm))
        return 1.0 if by_gemm else 2.0

    monkeypatch.setattr(choosing, "_run", run)
    monkeypatch.setattr(choosing._Kind, "_captured", times)
    monkeypatch.setattr(choosing, "replayed_us", lambda graphs, calls, replays: graphs)

    def choose(fault: str = "", at_rows: int = 0, *, may: bool = True) -> Any:
        state.fault, state.at_rows = fault, at_rows
        ranks = group_of(2, 2048, SIZE, BF16, "cpu")

        def work(rank: int, communicator: ThreadCommunicator) -> Any:
            buffers, texts = ranks[rank], communicator

            def exchange(text: str) -> list[str]:
                numbers = torch.zeros(1, 200, dtype=torch.int64)
                codes = torch.tensor([*text.encode()], dtype=torch.int64)
                numbers[0, : len(codes)] = codes
                both = texts.gather(numbers).view(2, 200)
                return [bytes(row[row > 0].tolist()).decode() for row in both]

            def most(number: int) -> list[int]:
                return [max(int(text) for text in exchange(str(number)))]

            if fault == "gives up" and rank == 1:
                monkeypatch.setattr(type(buffers), "gave_up", property(lambda self: self.rank == 1))
            model = nn.ModuleList([Layer(communicator)])
            model[0].may = may  # type: ignore[assignment]
            others = OtherRanks(communicator.all_reduce, exchange, most)
            with torch.inference_mode():
                problem = choose_layer_sums(model, FusedSums(buffers), others)
            layer: Any = model[0]
            return problem, layer.adds_up_to, layer.sends_from, described(model)

        one, other = on_ranks(2, work)
        assert one == other
        return one, state.timed

    return choose


def test_gemms_take_over_what_they_do_faster(without_a_gpu: Callable[..., Any]):
    (problem, up_to, sends_from, said), timed = without_a_gpu()
    assert (problem, up_to, sends_from) == ("", 32, 1024)
    assert said == "GEMMs add up to 32 tokens, GEMMs send 1,024 and more"
    assert (2048, True) in timed and (8192, True) not in timed, "of more rows there are no buffers"


def test_what_no_gemm_can_is_not_timed(without_a_gpu: Callable[..., Any]):
    found, timed = without_a_gpu(may=False)
    assert found == ("", 0, NEVER, "") and not timed


@pytest.mark.parametrize("at_rows", [0, 8, 2048])
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_of_one_rank_norms_compute_the_sums_on_all(
    without_a_gpu: Callable[..., Any], fault: str, at_rows: int
):
    (problem, *chosen), _ = without_a_gpu(fault, at_rows)
    assert chosen == [0, NEVER, ""]
    assert problem.startswith(
        {
            "raises": "rank 1: out of memory",
            "gives up": "rank 1: the part of another rank has not come",
            "wrong": "rank 0: of ",
            "differs": "rank ",
        }[fault]
    )


@pytest.mark.parametrize(
    ("dtype", "sends"), [(BF16, True), (torch.float16, True), (torch.float32, False)]
)
def test_only_numbers_of_16_bits_are_sent_by_gemms(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sends: bool
):
    monkeypatch.setattr(row_parallel, "is_hopper", lambda device: True)
    layer = RowParallelLinear(
        256, SIZE, bias=False, dtype=dtype, communicator=Alone(), parts={"row": SIZE}, scheme=None,
        cuts={},
    )  # fmt: skip
    assert layer.can_send == sends
    layer.bias = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
    assert not layer.can_send, "that of rank 0 alone"
