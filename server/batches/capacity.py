"""How much of the engine batches may use: what interactive requests leave, up to a limit."""

from __future__ import annotations

import asyncio

from runtime.ipc.client import EngineClient

LOOK_SECONDS = 0.05  # between two looks at an engine without room
LOST_SECONDS = 0.2


class BatchSlots:
    """Sequences of batches that may be in the engine at a time.  Who waits longest is next."""

    def __init__(self, client: EngineClient, limit: int) -> None:
        """limit: sequences; at most half of those that fit into a step are used in any case."""
        self._client = client
        self._limit = limit
        self._turn = asyncio.Lock()
        self.used = 0

    def _most(self) -> int:
        """0 while there is no engine."""
        ready = self._client.ready
        return 0 if ready is None else max(1, min(self._limit, ready.max_num_seqs // 2))

    def _room(self) -> int:
        """For how many sequences there is room now."""
        ready, stats = self._client.ready, self._client.stats
        if ready is None or stats.waiting:
            return 0
        idle = ready.max_num_seqs - max(stats.running, self._client.pending + self.used)
        return min(self._most() - self.used, idle)

    async def take(self, wanted: int | None) -> int:
        """Wait for room for `wanted` sequences, None for all there is; what to give back."""
        async with self._turn:
            while True:
                most = self._most()
                weight = most if wanted is None else min(wanted, most)
                # One that needs more than is left by others would wait for ever for all of it.
                if most and (self._room() >= weight or (not self.used and self._room() > 0)):
                    self.used += weight
                    return weight
                await asyncio.sleep(LOOK_SECONDS)

    def give(self, weight: int) -> None:
        self.used -= weight

    async def lost(self) -> None:
        """Returns when the engine that is there now is gone; waits for one first."""
        while (epoch := self._epoch()) is None:
            await asyncio.sleep(LOST_SECONDS)
        while self._epoch() == epoch:
            await asyncio.sleep(LOST_SECONDS)

    def _epoch(self) -> int | None:
        ready = self._client.ready
        return None if ready is None else ready.epoch
