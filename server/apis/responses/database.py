"""Responses in an SQLite file that all API processes share.

The file stays within Limits: the least recently used responses are deleted first.  Every call here
may wait for the disk: server.apis.responses.store keeps them off the event loop.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import orjson

from server.apis.responses.items import JsonItem

# responses  one row each: owner, status, input and response as JSON; chat completions have owners
#            of their own, so that no response is found as a chat completion or the other way round
# chats      the columns by which lists of chat completions are filtered
# items      which response an item belongs to, for item_reference
# events     the frames of background streams, until their response is deleted
# total      one row: the number of responses, and their bytes
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY, owner BLOB NOT NULL, previous TEXT, status TEXT NOT NULL, worker INTEGER,
  cancelled INTEGER NOT NULL DEFAULT 0, streamed INTEGER NOT NULL, used REAL NOT NULL,
  bytes INTEGER NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE TABLE IF NOT EXISTS items (
  id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON items (response);
CREATE TABLE IF NOT EXISTS events (
  response TEXT NOT NULL, number INTEGER NOT NULL, frame BLOB NOT NULL,
  PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chats (
  id TEXT PRIMARY KEY, owner BLOB NOT NULL, made REAL NOT NULL, model TEXT NOT NULL,
  metadata TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON chats (owner, made, id);
CREATE TRIGGER IF NOT EXISTS chat_removed AFTER DELETE ON responses BEGIN
  DELETE FROM chats WHERE id = old.id;
END;
CREATE TABLE IF NOT EXISTS total (responses INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
  UPDATE total SET responses = responses + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS grown AFTER UPDATE OF bytes ON responses BEGIN
  UPDATE total SET bytes = bytes + new.bytes - old.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
  UPDATE total SET responses = responses - 1, bytes = bytes - old.bytes;
  DELETE FROM items WHERE response = old.id;
  DELETE FROM events WHERE response = old.id;
END;
"""

RUNNING = ("queued", "in_progress")
BUSY_SECONDS = 5.0


class Limits(NamedTuple):
    """What the store may hold."""

    bytes: int = 256 << 20  # of JSON; the file is somewhat larger
    responses: int = 100_000
    seconds: float = 30 * 86400.0  # since the last use


class Stored(NamedTuple):
    """One response, its JSON as it was written."""

    previous: str | None
    status: str
    streamed: bool
    input: bytes
    response: bytes


class NewResponseRow(NamedTuple):
    """Columns of a response to store."""

    id: str
    owner: bytes
    input: bytes
    response: bytes
    previous: str | None = None
    status: str = "completed"
    worker: int | None = None
    streamed: bool = False


class ResponsesDatabase:
    """One connection.  Raises sqlite3.Error where the file cannot be read or written."""

    def __init__(self, path: str, limits: Limits) -> None:
        if path != ":memory:":
            # No other user may read conversations.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._limits = limits
        self.connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
        self.connection.isolation_level = None  # transactions are ours to begin
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON"):
            self.connection.execute(f"PRAGMA {pragma}").close()
        self.connection.execute("PRAGMA journal_size_limit=8388608").close()
        self.connection.executescript(SCHEMA).close()

    def add(
        self,
        owner: bytes,
        response: JsonItem,
        items: list[JsonItem],
        *,
        worker: int | None = None,
        streamed: bool = False,
    ) -> bool:
        """Store a response; False if it is too large.

        worker: the process that generates it, if it runs in the background
        """
        row = NewResponseRow(
            response["id"],
            owner,
            orjson.dumps(items),
            orjson.dumps(response),
            response["previous_response_id"],
            response["status"],
            worker,
            streamed,
        )
        return self.put(row, lambda: self._index_items(row.id, [*items, *response["output"]]))

    def put(self, row: NewResponseRow, also: Callable[[], None]) -> bool:
        """Insert a row and call `also`, in one transaction; False if the row is too large."""
        size = len(row.input) + len(row.response)
        if size > self._limits.bytes // 4:
            return False
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute(
                "INSERT INTO responses (id, owner, input, response, previous, status, worker, "
                "streamed, used, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, time.time(), size),
            )
            also()
            self._evict()
        return True

    def _index_items(self, id: str, items: Iterable[JsonItem]) -> None:
        self.connection.executemany(
            "INSERT OR IGNORE INTO items VALUES (?, ?)", [(item["id"], id) for item in items]
        )

    def _evict(self) -> None:
        """Delete what is too old, and the least recently used until the limits hold."""
        self.connection.execute(
            "DELETE FROM responses WHERE used < ? AND worker IS NULL",
            (time.time() - self._limits.seconds,),
        )
        while True:
            count, size = self.connection.execute("SELECT * FROM total").fetchone()
            if count <= self._limits.responses and size <= self._limits.bytes:
                return
            evicted = self.connection.execute(
                "DELETE FROM responses WHERE id = "
                "(SELECT id FROM responses WHERE worker IS NULL ORDER BY used LIMIT 1)"
            )
            if not evicted.rowcount:
                return

    def update(self, response: JsonItem, frames: list[tuple[int, bytes]]) -> bool:
        """Write the state of a background response and its new events.

        Returns False once the response was cancelled or deleted.
        """
        response_json = orjson.dumps(response)
        id, status = response["id"], response["status"]
        size = len(response_json) + sum(len(frame) for _, frame in frames)
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            row = self.connection.execute(
                "SELECT cancelled, length(response) FROM responses WHERE id = ?", (id,)
            ).fetchone()
            if row is None:
                return False
            self.connection.execute(
                "UPDATE responses SET status = ?1, response = ?2, bytes = bytes + ?3, used = ?4, "
                "worker = CASE WHEN ?1 IN ('queued', 'in_progress') THEN worker END WHERE id = ?5",
                (status, response_json, size - row[1], time.time(), id),
            )
            self.connection.executemany(
                "INSERT INTO events VALUES (?, ?, ?)", [(id, *frame) for frame in frames]
            )
            if status not in RUNNING:
                self._index_items(id, response["output"])
                self._evict()
        return not row[0]

    def get(self, owner: bytes, id: str) -> Stored | None:
        """A response of this owner."""
        with self.connection:
            rows = self.connection.execute(
                "UPDATE responses SET used = ? WHERE id = ? AND owner = ? "
                "RETURNING previous, status, streamed, input, response",
                (time.time(), id, owner),
            ).fetchall()
        return Stored(*rows[0]) if rows else None

    def delete(self, owner: bytes, id: str) -> bool:
        """Whether there was such a response."""
        with self.connection:
            found = self.connection.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)
            )
            return found.rowcount > 0

    def cancel(self, id: str) -> None:
        """Ask the process that generates the response to stop."""
        with self.connection:
            self.connection.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (id,))

    def is_active(self, id: str) -> bool:
        """False once a response was cancelled or deleted."""
        query = "SELECT id FROM responses WHERE id = ? AND NOT cancelled"
        return self.connection.execute(query, (id,)).fetchone() is not None

    def status(self, id: str) -> str | None:
        """The status of a response; None if it was deleted."""
        row = self.connection.execute("SELECT status FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def events(self, id: str, after: int, limit: int) -> tuple[list[tuple[int, bytes]], str | None]:
        """Up to `limit` frames with numbers above `after`, and the status: None if it was deleted.

        The status is read first: when it is a final one, the frames are all there.
        """
        status = self.status(id)
        frames = self.connection.execute(
            "SELECT number, frame FROM events WHERE response = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (id, after, limit),
        ).fetchall()
        return frames, status

    def fail_orphans(self, worker: int, num_workers: int) -> None:
        """Mark as failed what a process was generating when it ended."""
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            rows = self.connection.execute(
                "SELECT id, response FROM responses WHERE worker = ? OR worker >= ?",
                (worker, num_workers),
            ).fetchall()
            message = "the server was restarted while it made this response: send it again"
            error = {"code": "server_error", "message": message}
            for id, stored in rows:
                response = orjson.loads(stored) | {"status": "failed", "error": error}
                self.connection.execute(
                    "UPDATE responses SET status = 'failed', worker = NULL, response = ? "
                    "WHERE id = ?",
                    (orjson.dumps(response), id),
                )
