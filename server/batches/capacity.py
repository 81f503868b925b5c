"""How many sequences batches may run: what interactive requests leave free, up to a limit."""

from __future__ import annotations

import asyncio

from runtime.ipc.client import EngineClient

POLL_SECONDS = 0.05  # between two checks of an engine without room
EPOCH_POLL_SECONDS = 0.2


class BatchSlots:
    """Limits the sequences of batches in the engine at a time.  First come, first served."""

    def __init__(self, client: EngineClient, limit: int) -> None:
        """limit: sequences; never more than half of --max-num-seqs are used."""
        self._client = client
        self._limit = limit
        self._order = asyncio.Lock()
        self.used = 0

    def _max_used(self) -> int:
        """The limit now; 0 while there is no engine."""
        ready = self._client.ready
        return 0 if ready is None else max(1, min(self._limit, ready.max_num_seqs // 2))

    def _room(self) -> int:
        """How many more sequences could run now."""
        ready, stats = self._client.ready, self._client.stats
        if ready is None or stats.waiting:
            return 0
        idle = ready.max_num_seqs - max(stats.running, self._client.pending + self.used)
        return min(self._max_used() - self.used, idle)

    async def acquire(self, wanted: int | None) -> int:
        """Wait for `wanted` slots, None for all; returns the number to release."""
        async with self._order:
            while True:
                limit = self._max_used()
                count = limit if wanted is None else min(wanted, limit)
                # A request for more than is ever free would wait for ever: it runs alone instead.
                if limit and (self._room() >= count or (not self.used and self._room() > 0)):
                    self.used += count
                    return count
                await asyncio.sleep(POLL_SECONDS)

    def release(self, count: int) -> None:
        self.used -= count

    async def engine_lost(self) -> None:
        """Returns when the current engine has ended; waits for one first."""
        while (epoch := self._epoch()) is None:
            await asyncio.sleep(EPOCH_POLL_SECONDS)
        while self._epoch() == epoch:
            await asyncio.sleep(EPOCH_POLL_SECONDS)

    def _epoch(self) -> int | None:
        ready = self._client.ready
        return None if ready is None else ready.epoch
