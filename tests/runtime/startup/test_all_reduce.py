"""How ranks come to add their products: what is tried, what is said, and what remains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_zoo.layers.all_reduce.partial_sum import PartialSum
from model_zoo.layers.all_reduce.symmetric_buffers import OF_EMBEDDINGS, Shape
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.parallel.communicator import Alone, ProcessGroupCommunicator
from runtime.config import EngineConfig
from runtime.ranks.group import Ranks
from runtime.startup.all_reduce import choose_all_reduce, sum_bytes

TOKENS, HIDDEN = 12, 64


class OneRank:
    """Of a process group that has no other."""

    def size(self) -> int:
        return 1


class OwnMemory:
    """Memory that no other rank reads.  Fails where `fails` says."""

    max_bytes = 8 * HIDDEN * 4

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def problem(self) -> str:
        return "GPU 0 cannot write into the memory of GPU 1" if self.fails == "problem" else ""

    def allocate(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.fails == "allocate":
            raise RuntimeError("out of memory\nsee the log")
        return torch.full(shape, -0.0, dtype=dtype, device=device)

    def mapped(self, memory: Tensor) -> Sequence[Tensor]:
        if self.fails == "mapped":
            raise RuntimeError("no fabric handle")
        return [memory]


class Bare(nn.Module):
    """A model without layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


class Summing(ProcessGroupCommunicator):
    """The sums of one rank, with an error, if it is asked for."""

    def __init__(self, *, error: float = 0.0, in_order: bool = False) -> None:
        group: Any = OneRank()
        super().__init__(group, in_order=in_order)
        self._error = error

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + self._error


def choose(
    communicator: Any,
    memory: OwnMemory | None,
    norm: nn.Module | None = None,
    hidden: int = HIDDEN,
    **requested: Any,
) -> str:
    spec: Any = SimpleNamespace(
        ranks=Ranks(0, 1, communicator, None, memory),
        requested=EngineConfig(model="m", **requested),
        config=SimpleNamespace(hidden_size=hidden, model_type="tiny"),
        device=torch.device("cpu"),
        on_gpu=False,
        dtype="float32",
    )
    model: Any = Bare(norm or RMSNorm(hidden, 1e-6, torch.float32))
    return choose_all_reduce(spec, model, TOKENS)


def test_a_model_on_one_device_has_nothing_to_add():
    assert choose(Alone(), None) == choose(Summing(), None) == ""


def test_norms_add_what_the_buffers_hold():
    communicator = Summing()
    said = choose(communicator, OwnMemory())
    assert said == "in the norms up to 8 tokens, by NCCL above"
    assert isinstance(communicator.for_norm(torch.zeros(8, HIDDEN)), PartialSum)
    for rows in (0, 9):
        assert isinstance(communicator.for_norm(torch.zeros(rows, HIDDEN)), Tensor)
    assert communicator.fused is not None and not communicator.fused.buffers.limit.any()


def test_sums_take_both_buffers_by_turns_and_those_of_the_library_begin_anew():
    communicator = Summing()
    choose(communicator, OwnMemory())
    sums = communicator.fused
    assert sums is not None

    def turns(count: int) -> list[int]:
        found = [communicator.for_norm(torch.zeros(2, HIDDEN)) for _ in range(count)]
        return [each.rank_sum.turn for each in found if isinstance(each, PartialSum)]

    assert turns(3) == [0, 1, 0]
    begun = communicator.for_norm(torch.zeros(2, HIDDEN), of_embeddings=True)
    assert isinstance(begun, PartialSum) and begun.rank_sum.turn == OF_EMBEDDINGS
    assert turns(3) == [0, 1, 0]
    communicator.is_silent = True
    ProcessGroupCommunicator.all_reduce(communicator, torch.zeros(1))
    assert turns(2) == [0, 1]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("problem", "rank 0: GPU 0 cannot write into the memory of GPU 1"),
        ("allocate", "rank 0: out of memory"),
        ("mapped", "rank 0: no fabric handle"),
    ],
)
def test_without_a_rendezvous_nccl_adds_and_the_log_says_why(
    fails: str, reason: str, caplog: pytest.LogCaptureFixture
):
    communicator = Summing()
    with caplog.at_level(logging.WARNING):
        assert choose(communicator, OwnMemory(fails)) == f"NCCL ({reason})"
    assert communicator.fused is None
    [record] = caplog.records
    assert record.getMessage().endswith(f"computed by NCCL, which takes longer: {reason}")


def test_sums_that_differ_leave_nccl_and_the_log_says_what_differs(
    caplog: pytest.LogCaptureFixture,
):
    communicator = Summing(error=1.0)
    with caplog.at_level(logging.WARNING):
        said = choose(communicator, OwnMemory())
    assert "64 of 64 values of the sum are wrong" in said and communicator.fused is None
    assert len(caplog.records) == 1


def test_nothing_is_tried_where_it_is_not_wanted_or_no_kernel_fits(
    caplog: pytest.LogCaptureFixture,
):
    memory = OwnMemory("problem")  # would be found, and warned of
    off = choose(Summing(), memory, disable_custom_all_reduce=True)
    assert off == "NCCL (--disable-custom-all-reduce)"
    assert choose(Summing(in_order=True), memory) == "NCCL (--deterministic)"
    of_gpt2 = choose(Summing(), memory, LayerNorm(HIDDEN, 1e-5, torch.float32))
    assert of_gpt2 == choose(Summing(), memory, hidden=66) == "NCCL (no kernel adds up tiny)"
    assert not caplog.records


def test_a_plan_counts_the_buffers_of_every_rank():
    def counted(ranks: int, **requested: Any) -> int:
        config: Any = SimpleNamespace(hidden_size=4096, shard=SimpleNamespace(size=ranks))
        engine = EngineConfig(model="m", **requested)
        return sum_bytes(engine, config, torch.bfloat16, 2048)

    assert counted(2) == 3 * 2048 * 4096 * 2
    assert counted(4) == 3 * counted(2)
    # 128 MiB are the rows of nine other ranks.
    assert counted(10) == 3 * 9 * (2**27 // (9 * 8192)) * 8192
    assert counted(1) == counted(2, disable_custom_all_reduce=True) == 0
    assert counted(2, deterministic=True) == 0
