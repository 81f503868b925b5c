"""The check of the fused all-reduce at start: what it finds, and that its waits end."""

from __future__ import annotations

import pytest
import torch

from model_zoo.layers.all_reduce import self_check as checking
from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.self_check import Exchange, self_check
from model_zoo.layers.all_reduce.symmetric_buffers import (
    SymmetricBuffers,
    buffer_shape,
    buffers_in,
    first_problem,
)

FP32 = torch.float32
ROWS, SIZE = 9, 64


def buffers_of(world: int, device: str) -> list[SymmetricBuffers]:
    """Those of all ranks, of which the first alone runs."""
    shape = buffer_shape(ROWS, SIZE, world)
    memories = [torch.full(shape, -0.0, dtype=FP32, device=device) for _ in range(world)]
    return [buffers_in(memories, rank) for rank in range(world)]


def alone(text: str) -> list[str]:
    return [text]


def with_a_silent_rank(text: str) -> list[str]:
    return [text, ""]


def test_right_sums_pass(device: str):
    [buffers], summed = buffers_of(1, device), []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        summed.append(len(x))
        return x

    assert self_check(buffers, all_reduce, alone) == ""
    assert sorted(set(summed)) == [1, 8, ROWS] and len(summed) == 3 * checking.CALLS


@pytest.mark.parametrize("plus_one", [False, True])
def test_the_norm_is_that_of_the_model(device: str, plus_one: bool):
    [buffers] = buffers_of(1, device)
    assert self_check(buffers, lambda x: x, alone, plus_one=plus_one) == ""


def test_another_sum_of_the_library_is_found(device: str):
    """All calls are compared, as other ranks wait in the sums of each."""
    [buffers], summed = buffers_of(1, device), []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        summed.append(len(x))
        x[0, 3] += 1 if len(x) == 8 else 0
        return x

    problem = self_check(buffers, all_reduce, alone)
    assert problem == "rank 0: of 8 rows 1 of 512 values of the sum are wrong"
    assert len(summed) == 3 * checking.CALLS


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(device: str):
    buffers, _other = buffers_of(2, device)
    problem = self_check(buffers, lambda x: x, with_a_silent_rank, limit=100)
    assert problem == "rank 0: the part of another rank has not come"


def test_results_that_differ_between_ranks_are_found(device: str):
    def exchange(text: str) -> list[str]:
        return [text, "another digest" if text else ""]

    [buffers] = buffers_of(1, device)
    assert "ranks' results" in self_check(buffers, lambda x: x, exchange)


def exchange_with(problem: str) -> Exchange:
    """The other rank has found this."""
    return lambda text: [text, problem]


def test_what_another_rank_finds_is_the_verdict_of_all(device: str):
    [buffers] = buffers_of(1, device)
    assert self_check(buffers, lambda x: x, exchange_with("no memory")) == "rank 1: no memory"


def test_an_error_of_the_compiler_is_a_verdict(device: str, monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object, **options: object) -> None:
        raise ValueError("cannot be compiled\nfor reasons")

    monkeypatch.setattr(checking, "all_reduce_add_rms_norm", broken)
    [buffers] = buffers_of(1, device)
    problem = self_check(buffers, lambda x: x, alone)
    assert problem == "rank 0: ValueError: cannot be compiled"


def test_the_first_problem_has_the_number_of_its_rank():
    assert first_problem(["", "x", "y"]) == "rank 1: x"
    assert first_problem(["", ""]) == ""


def test_a_wait_that_has_given_up_is_known_until_the_next_limit(device: str):
    buffers, _other = buffers_of(2, device)
    part, weight = torch.ones(3, SIZE, device=device), torch.ones(SIZE, device=device)
    buffers.limit_waits(20)
    for call in range(2):
        all_reduce_add_rms_norm(buffers, call, part, part.clone(), weight, 1e-6)
    assert buffers.gave_up
    buffers.limit_waits(20)
    assert not buffers.gave_up
    buffers.rows_of(0, 1, 0)[:3].copy_(part)  # of the other rank
    all_reduce_add_rms_norm(buffers, 0, part, residual := part.clone(), weight, 1e-6)
    assert not buffers.gave_up and (residual == 3).all()


def test_what_came_before_the_check_is_forgotten(device: str):
    """A rank that has compiled its kernel waits for none, and what others send comes later."""
    [buffers] = buffers_of(1, device)
    ranks = buffers_of(2, device)
    ranks[0].rows_of(0, 1, 0)[:1].fill_(1.0)
    assert self_check(buffers, lambda x: x, alone) == ""
    problem = self_check(ranks[0], lambda x: x, with_a_silent_rank, limit=100)
    assert problem == "rank 0: the part of another rank has not come"
