"""Chooses the batches to run, in exactly one of the processes that share the data directory."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from starlette.types import ASGIApp

from server.batches.background import BatchSlots
from server.batches.run import BatchRun
from server.batches.schema import StoredBatch
from server.batches.store import BatchStore
from server.config import ServerConfig
from server.engine import Engine
from server.http.request_context import OWNER
from server.metrics.metrics import Metrics
from server.process.file_lock import file_lock

log = logging.getLogger("wavefill.batches")

MAX_RUNNING = 8  # batches at a time; their lines take turns
POLL_SECONDS = 0.5
LOCK_SECONDS = 2.0
SWEEP_SECONDS = 60.0
PAUSE_SECONDS = 5.0  # after a run that failed


@dataclass
class BatchRunner:
    """Runs batches as long as this process holds the lock of the directory."""

    store: BatchStore
    app: ASGIApp  # runs lines: server.app.line_app
    client: Engine
    config: ServerConfig
    metrics: Metrics
    poll_seconds: float = POLL_SECONDS

    def __post_init__(self) -> None:
        self._slots = BatchSlots(self.client, self.config.batch_concurrency)
        self._running: dict[str, tuple[bytes, asyncio.Task[None]]] = {}  # id -> owner, task

    async def run(self) -> None:
        """Runs until it is cancelled; results that are being written are completed then."""
        while True:
            try:
                with file_lock(self.store.database.directory / "batches.lock") as held:
                    if held:
                        await self._run_all()
            except Exception:  # the disk, mostly: it may come back
                log.exception("batches are paused for %.0f s", PAUSE_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)
            await asyncio.sleep(min(LOCK_SECONDS, 4 * self.poll_seconds))

    async def _run_all(self) -> None:
        loop = asyncio.get_running_loop()
        swept = -SWEEP_SECONDS
        try:
            while True:
                if loop.time() - swept >= SWEEP_SECONDS:
                    swept = loop.time()
                    await asyncio.to_thread(self.store.files.sweep)
                # Batches that end while the list is read stay here: the list may contain them.
                self._running = {id: run for id, run in self._running.items() if not run[1].done()}
                if len(self._running) < MAX_RUNNING:
                    self._start(await asyncio.to_thread(self.store.open_batches))
                await asyncio.sleep(self.poll_seconds)
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.clear()

    def _start(self, waiting: list[StoredBatch]) -> None:
        """Start batches of the owner with the fewest running first, the oldest of those first."""
        waiting = [stored for stored in waiting if stored.batch.id not in self._running]
        while waiting and len(self._running) < MAX_RUNNING:
            shares = Counter(owner for owner, _ in self._running.values())
            stored = min(waiting, key=lambda stored: shares[stored.owner])
            waiting.remove(stored)
            task = asyncio.create_task(self._one(stored))
            self._running[stored.batch.id] = (stored.owner, task)

    async def _one(self, stored: StoredBatch) -> None:
        run = BatchRun(
            self.store,
            stored,
            self.app,
            self._slots,
            self.metrics,
            max_line_bytes=self.config.max_body_bytes,
            poll_seconds=self.poll_seconds,
            # Each line belongs to the owner of the batch, and so does what it stores.
            scope={OWNER: stored.owner},
        )
        try:
            await run.run()
        except Exception:
            log.exception("batch %s failed and is resumed soon", stored.batch.id)
            await asyncio.sleep(PAUSE_SECONDS)
