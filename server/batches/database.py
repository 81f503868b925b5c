"""The SQLite file of a data directory, shared by all API processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import ParamSpec, TypeVar

from server.errors import RequestError, Unavailable

log = logging.getLogger("wavefill.batches")
P = ParamSpec("P")
T = TypeVar("T")

NAME = "wavefill.sqlite3"
VERSION = 1
BUSY_SECONDS = 20.0
RETRY_SECONDS = 60  # until the disk may have room again
SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    state TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE INDEX files_of_owner ON files (owner, number);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_id TEXT NOT NULL,
    output_id TEXT NOT NULL,
    error_id TEXT NOT NULL,
    keep_seconds INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX batches_of_status ON batches (status, number);
CREATE TABLE failures (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""


# A condition on batches: they have not ended.
IS_OPEN = "status IN ('validating', 'in_progress', 'cancelling', 'finalizing')"


class DataError(Exception):
    """The data directory cannot be used; the message says why."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of what reads or writes the disk.  Raises Unavailable if that fails."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        log.error("--data-dir cannot be used: %s", reason)
        raise Unavailable(
            "files and batches cannot be read or written ({}): try again later; the operator has "
            "to make room in --data-dir, or to repair its disk",
            reason,
            code="store_failed",
            retry_after_s=RETRY_SECONDS,
        ) from error


class BatchDatabase:
    """One connection, used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Opens the directory, which is made if there is none.  Raises DataError."""
        self.directory = directory
        self._lock = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / "files").mkdir(mode=0o700, exist_ok=True)
            # SQLite gives its other files the mode of this one.
            os.close(os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(
                directory / NAME,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"--data-dir {directory}: {reason}: choose a directory that the server may write to"
            ) from None

    def _prepare(self) -> None:
        with self.transaction() as connection:
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise DataError(
                    f"--data-dir {self.directory}: written by another version of this server "
                    f"(form {version}, this one reads {VERSION}): choose another directory"
                )

    @contextlib.contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """A write transaction around the block; other processes wait."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self.commit()
            except BaseException:
                self._connection.rollback()  # unlike ROLLBACK no error if SQLite has done so itself
                raise

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """For statements that only read; does not wait for other processes."""
        with self._lock:
            yield self._connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def number_of(connection: sqlite3.Connection, table: str, owner: bytes, after: str) -> int:
    """The number of `after`, where a page begins.  Raises RequestError if it is not in the list."""
    row = connection.execute(
        f"SELECT number FROM {table} WHERE owner = ? AND id = ?", (owner.hex(), after)
    ).fetchone()
    if row is None:
        raise RequestError(
            "{after} is {!r}, which is not in this list: use the `last_id` of a page", after[:64]
        )
    return row[0]
