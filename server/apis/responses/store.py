"""The database off the event loop: one thread that does one thing after the other."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.apis.responses.database import Limits, ResponsesDatabase
from server.errors import Unavailable

T = TypeVar("T")

IN_MEMORY = ":memory:"
OPENING_TRIES = 50
OPENING_SECONDS = 5.0


class StoreUnusable(Exception):
    """The file cannot be used at all; the message names the remedy."""


class ResponseStore:
    """Opened when it is first used.  `path` is a file, or IN_MEMORY for one process alone."""

    def __init__(
        self, path: str = IN_MEMORY, limits: Limits | None = None, worker: int = 0, workers: int = 1
    ) -> None:
        """`worker` is this process's place among `workers` that share the file."""
        self.worker = worker
        self._workers = workers
        self._path = path
        self._limits = limits or Limits()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._database: ResponsesDatabase | None = None

    async def call(self, work: Callable[[ResponsesDatabase], T]) -> T:
        """Run `work` in the store's thread.  Raises Unavailable if the file fails."""

        def run() -> T:
            return work(self._opened())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                f"the store of responses does not work ({error}): try again, or use `store` false",
                code="store_failed",
                retry_after_s=5,
            ) from error

    async def open(self) -> None:
        """Open it now.  Raises StoreUnusable."""
        try:
            await self.call(lambda database: None)
        except Unavailable as error:
            cause = error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else cause
            raise StoreUnusable(
                f"--response-store {self._path}: {reason}: choose a file that this user "
                "may write and that SQLite can read"
            ) from None

    def _patiently(self) -> ResponsesDatabase:
        """Processes that start together get in each other's way while the file is made."""
        for _ in range(OPENING_TRIES):
            try:
                return ResponsesDatabase(self._path, self._limits)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                time.sleep(OPENING_SECONDS / OPENING_TRIES)
        return ResponsesDatabase(self._path, self._limits)

    def _opened(self) -> ResponsesDatabase:
        if self._database is None:
            database = self._patiently()
            weakref.finalize(self, database.connection.close)
            database.fail_orphans(self.worker, self._workers)
            self._database = database
        return self._database
