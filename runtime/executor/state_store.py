"""StateStore: snapshots of recurrent states in host memory, and the copies before a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from attention.state_pool import StatePool, zeros
from runtime.config import ConfigError
from runtime.executor.pinned_memory import pinned
from runtime.memory_plan import size
from runtime.scheduler.batch import Batch
from runtime.startup.device import free_bytes

LANES = 2  # states that are on their way between host and device at a time


class StateStore:
    """All snapshots are allocated at once.

    On a CPU the memory of each is taken when it is first written.  For a GPU it is pinned, and
    copies are made by a stream of their own, to and from contiguous states on the device (`LANES`
    of them), so that a step waits for a copy of the device alone: a snapshot leaves while later
    steps run, and one that is loaded comes while the step before runs.
    """

    def __init__(self, count: int, pool: StatePool) -> None:
        """Take the memory for `count` snapshots of states such as this pool's.

        Raises ConfigError if the host has too little.
        """
        shapes = [(count, states.shape[0], *states.shape[2:]) for states in pool.tensors]
        dtypes = [states.dtype for states in pool.tensors]
        self._snapshots: tuple[Tensor, ...] = ()
        self._transfers: _Transfers | None = None
        if not count:
            return
        if pool.conv.device.type != "cuda":
            cpu = torch.device("cpu")
            self._snapshots = tuple(map(zeros, shapes, dtypes, [cpu, cpu]))
            return
        needed = count * sum(states[:, 0].nbytes for states in pool.tensors)
        available = free_bytes(torch.device("cpu"))
        if needed > available:
            raise ConfigError(
                f"--snapshot-bytes: {count} snapshots of states take {size(needed)}, and the "
                f"host has {size(available)} left: set a smaller number, or --no-prefix-cache"
            )
        self._snapshots = tuple(
            pinned(shape, dtype, what="snapshots of states (--snapshot-bytes)")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        self._transfers = _Transfers(pool)

    def copy(self, batch: Batch, kv: KVPool) -> None:
        """Copy pages and states as a batch says, before its step.

        The order of the current stream makes it right: pages, states to snapshots, snapshots to
        states, states to states.
        """
        pool = kv.states
        assert pool is not None
        for page, target in batch.page_copies:
            for pages in (kv.k, kv.v):
                pages[:, target].copy_(pages[:, page], non_blocking=True)
        if batch.state_saves or batch.state_loads:
            self._copy_snapshots(batch, pool)
        pool.copy(batch.state_copies)

    def _copy_snapshots(self, batch: Batch, pool: StatePool) -> None:
        for state, index in batch.state_saves:
            target = self._at(index)
            if self._transfers is None:
                _copy(target, pool.of(state))
            else:
                self._transfers.save(pool.of(state), target)
        for index, state in batch.state_loads:
            source = self._at(index)
            if self._transfers is None:
                _copy(pool.of(state), source)
            else:
                self._transfers.load(source, pool.of(state))

    def _at(self, index: int) -> tuple[Tensor, ...]:
        return tuple(snapshots[index] for snapshots in self._snapshots)


@dataclass(slots=True)
class _Lane:
    """One contiguous state on the device."""

    tensors: tuple[Tensor, ...]
    used: torch.cuda.Event  # the last use is over


class _Transfers:
    """Copies between host and device by a stream of their own.

    A snapshot that is loaded has been written by an earlier copy of the same stream, if at all.
    """

    def __init__(self, pool: StatePool) -> None:
        device = pool.conv.device
        self._stream = torch.cuda.Stream(device)
        self._lanes: list[_Lane] = []
        for _ in range(LANES):
            tensors = tuple(
                torch.empty(states.shape, dtype=states.dtype, device=device)
                for states in pool.of(0)
            )
            self._lanes.append(_Lane(tensors, torch.cuda.Event()))
        self._next = 0

    def _lane(self) -> _Lane:
        lane = self._lanes[self._next]
        self._next = (self._next + 1) % len(self._lanes)
        return lane

    def save(self, state: tuple[Tensor, ...], host: tuple[Tensor, ...]) -> None:
        """The current stream may overwrite the state afterwards."""
        lane, current = self._lane(), torch.cuda.current_stream()
        current.wait_event(lane.used)
        _copy(lane.tensors, state)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _copy(host, lane.tensors)
            lane.used.record()

    def load(self, host: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> None:
        """The current stream may read the state afterwards."""
        lane, current = self._lane(), torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(lane.used)
            _copy(lane.tensors, host)
        current.wait_stream(self._stream)
        _copy(state, lane.tensors)
        lane.used.record(current)


def _copy(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
