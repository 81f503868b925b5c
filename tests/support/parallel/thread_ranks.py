"""Ranks that share a model, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from model_zoo.config import ModelConfig, read_config
from model_zoo.model import Model
from model_zoo.parallel.sharded_config import sharded_config
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow

SECONDS = 120.0  # that a rank waits for the others
CPU = torch.device("cpu")
Result = TypeVar("Result")


class Exchange:
    """Where ranks put their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors = Barrier(size), [torch.empty(0)] * size


class ThreadCommunicator:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self.rank = exchange, rank
        self.size = len(exchange.tensors)

    def _all(self, x: Tensor) -> list[Tensor]:
        exchange = self._exchange
        exchange.tensors[self.rank] = x
        exchange.barrier.wait(SECONDS)
        found = list(exchange.tensors)
        exchange.barrier.wait(SECONDS)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), 1)

    def for_norm(self, part: Tensor, *, of_embeddings: bool = False) -> Tensor:
        return self.all_reduce(part)

    def rank_sum(self, rows: int) -> None:
        return None


def on_ranks(size: int, work: Callable[[int, ThreadCommunicator], Result]) -> list[Result]:
    """work(rank, communicator) on each rank; raises the error of the rank that failed first."""
    exchange = Exchange(size)

    def run(rank: int) -> Result:
        try:
            return work(rank, ThreadCommunicator(exchange, rank))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def load_rank(
    directory: Path,
    rank: int,
    size: int,
    communicator: ThreadCommunicator,
    *,
    expert_parallel: bool = False,
) -> tuple[ModelConfig, Model]:
    """What one rank has of a model, in float32."""
    whole = read_config(directory)
    config = sharded_config(whole, rank, size, expert_parallel=expert_parallel)
    model = load_model(
        config, directory, dtype=torch.float32, device=CPU, communicator=communicator
    )
    return config, model


def logits_of_ranks(
    directory: Path,
    size: int,
    tokens: Tensor,
    cuts: list[int],
    *,
    expert_parallel: bool = False,
) -> list[Tensor]:
    """The logits of a model that is divided, as each rank has them; `cuts` as in PagedRow."""

    def work(rank: int, communicator: ThreadCommunicator) -> Tensor:
        config, model = load_rank(
            directory, rank, size, communicator, expert_parallel=expert_parallel
        )
        return PagedRow(model, config, torch.float32).feed_in_steps(tokens, cuts)

    return on_ranks(size, work)
