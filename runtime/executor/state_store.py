"""StateStore: snapshots of recurrent states in host memory, and the copies before a step."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from runtime.scheduler.batch import Batch


class StateStore:
    """Each snapshot is allocated when it is first written, pinned where there is a GPU.

    All copies are queued on the current stream, so that their order alone makes them right.
    """

    def __init__(self) -> None:
        self._snapshots: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(self, batch: Batch, kv: KVPool) -> None:
        """Copy pages and states as a batch says, before its step."""
        pool = kv.states
        assert pool is not None
        for page, target in batch.page_copies:
            for pages in (kv.k, kv.v):
                pages[:, target].copy_(pages[:, page], non_blocking=True)
        for state, index in batch.state_saves:
            if index not in self._snapshots:
                self._snapshots[index] = _host_like(pool.conv), _host_like(pool.matrix)
            for host, states in zip(self._snapshots[index], (pool.conv, pool.matrix), strict=True):
                host.copy_(states[:, state], non_blocking=True)
        for index, state in batch.state_loads:
            for host, states in zip(self._snapshots[index], (pool.conv, pool.matrix), strict=True):
                states[:, state].copy_(host, non_blocking=True)
        pool.copy(batch.state_copies)


def _host_like(states: Tensor) -> Tensor:
    """Host memory for one state of all layers."""
    shape = states.shape[0], *states.shape[2:]
    return torch.empty(shape, dtype=states.dtype, pin_memory=states.device.type == "cuda")
