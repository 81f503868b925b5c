"""Responses in an SQLite file that all API processes share.

The file stays within Limits: the responses that nobody has used for longest go first.  Every call
here may wait for the disk: server.apis.responses.store keeps them off the event loop.
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
# of
#            their own, so that neither is found where the other is looked for
# chats      what a list of chat completions is chosen by
# items      which response an item belongs to, for item_reference
# events     the frames of background streams, until their response goes
# total      one row: how many responses there are, and their bytes
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
MAX_CHAIN = 4096  # responses of one conversation
MAX_CHAIN_BYTES = 32 << 20
GONE_AT_ONCE = 64  # rows that one round of eviction takes


class Limits(NamedTuple):
    """What the store holds at most."""

    bytes: int = 256 << 20  # of JSON; the file is somewhat larger
    responses: int = 100_000
    seconds: float = 30 * 86400.0  # since the last use


class Stored(NamedTuple):
    """One response, its JSON as it was written."""

    id: str
    previous: str | None
    status: str
    streamed: bool
    input: bytes
    response: bytes


class NewResponseRow(NamedTuple):
    """What is to be kept, as the columns of the table."""

    id: str
    owner: bytes
    input: bytes
    response: bytes
    previous: str | None = None
    status: str = "completed"
    worker: int | None = None
    streamed: bool = False


class ChainBroken(Exception):
    """A response that the conversation needs is not there; its id is the argument."""


class ChainTooLong(Exception):
    """The conversation exceeds MAX_CHAIN or MAX_CHAIN_BYTES."""


class NotFinished(Exception):
    """The response is still being made, or has failed; its status is the argument."""


class ResponsesDatabase:
    """One connection.  Raises sqlite3.Error where the file cannot be read or written."""

    def __init__(self, path: str, limits: Limits) -> None:
        if path != ":memory:":
            # Conversations are nobody else's business.
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
        """Keep a response; False if it alone is larger than the store should hold.

        worker   the process that is still making it, if it runs in the background
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
        return self.put(row, lambda: self._name_items(row.id, [*items, *response["output"]]))

    def put(self, row: NewResponseRow, also: Callable[[], None]) -> bool:
        """Keep a row, and do what belongs to it; False if it is larger than one should be."""
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

    def _name_items(self, id: str, items: Iterable[JsonItem]) -> None:
        self.connection.executemany(
            "INSERT OR IGNORE INTO items VALUES (?, ?)", [(item["id"], id) for item in items]
        )

    def _evict(self) -> None:
        """Delete what is too old, and as much of the oldest as it takes to keep the limits."""
        self.connection.execute(
            "DELETE FROM responses WHERE used < ? AND worker IS NULL",
            (time.time() - self._limits.seconds,),
        )
        while True:
            count, size = self.connection.execute("SELECT * FROM total").fetchone()
            if count <= self._limits.responses and size <= self._limits.bytes:
                return
            oldest = self.connection.execute(
                "SELECT id, bytes FROM responses WHERE worker IS NULL ORDER BY used LIMIT ?",
                (GONE_AT_ONCE,),
            ).fetchall()
            if not oldest:
                return
            for id, freed in oldest:
                if count <= self._limits.responses and size <= self._limits.bytes:
                    break
                self.connection.execute("DELETE FROM responses WHERE id = ?", (id,))
                count, size = count - 1, size - freed

    def update(self, response: JsonItem, frames: list[tuple[int, bytes]]) -> bool:
        """Write how far a background response has come, and its new events.

        Returns whether it is still wanted: False once it was cancelled or deleted.
        """
        made = orjson.dumps(response)
        id, status = response["id"], response["status"]
        size = len(made) + sum(len(frame) for _, frame in frames)
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
                (status, made, size - row[1], time.time(), id),
            )
            self.connection.executemany(
                "INSERT INTO events VALUES (?, ?, ?)", [(id, *frame) for frame in frames]
            )
            if status not in RUNNING:
                self._name_items(id, response["output"])
                self._evict()
        return not row[0]

    def get(self, owner: bytes, id: str) -> Stored | None:
        """A response of this owner."""
        with self.connection:
            row = self.connection.execute(
                "UPDATE responses SET used = ? WHERE id = ? AND owner = ? "
                "RETURNING id, previous, status, streamed, input, response",
                (time.time(), id, owner),
            ).fetchall()
        return Stored(*row[0]) if row else None

    def delete(self, owner: bytes, id: str) -> bool:
        """Whether there was such a response."""
        with self.connection:
            found = self.connection.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)
            )
            return found.rowcount > 0

    def cancel(self, id: str) -> None:
        """Ask whoever makes the response to stop."""
        with self.connection:
            self.connection.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (id,))

    def wanted(self, id: str) -> bool:
        """False once a response was cancelled or deleted."""
        row = self.connection.execute(
            "SELECT cancelled FROM responses WHERE id = ?", (id,)
        ).fetchone()
        return row is not None and not row[0]

    def status(self, id: str) -> str | None:
        """How far a response has come; None if it is gone."""
        row = self.connection.execute("SELECT status FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def history(self, owner: bytes, id: str) -> list[JsonItem]:
        """All items of a response and of those that came before it, the oldest first.

        Raises ChainBroken, ChainTooLong, NotFinished.
        """
        chain: list[Stored] = []
        wanted: str | None = id
        size = 0
        while wanted is not None:
            found = self.get(owner, wanted)
            if found is None:
                raise ChainBroken(wanted)
            if found.status not in ("completed", "incomplete"):
                raise NotFinished(found.status)
            chain.append(found)
            size += len(found.input) + len(found.response)
            if len(chain) > MAX_CHAIN or size > MAX_CHAIN_BYTES:
                raise ChainTooLong
            wanted = found.previous
        items: list[JsonItem] = []
        for stored in reversed(chain):
            items += [*orjson.loads(stored.input), *orjson.loads(stored.response)["output"]]
        return items

    def items(self, owner: bytes, ids: set[str]) -> dict[str, JsonItem]:
        """Those of the items that are in any of the owner's responses.

        Raises ChainTooLong if they are in more than MAX_CHAIN_BYTES of them.
        """
        found: dict[str, JsonItem] = {}
        size = 0
        for id in ids:
            if id in found:
                continue
            row = self.connection.execute(
                "SELECT r.input, r.response FROM items i JOIN responses r ON r.id = i.response "
                "WHERE i.id = ? AND r.owner = ? LIMIT 1",
                (id, owner),
            ).fetchone()
            if row is None:
                continue
            size += len(row[0]) + len(row[1])
            if size > MAX_CHAIN_BYTES:
                raise ChainTooLong
            items = [*orjson.loads(row[0]), *orjson.loads(row[1])["output"]]
            found |= {item["id"]: item for item in items if item["id"] in ids}
        return found

    def events(self, id: str, after: int, most: int) -> tuple[list[tuple[int, bytes]], str | None]:
        """Up to `most` frames with numbers above `after`, and the status: None if it is gone.

        The status is read first: when it is a final one, the frames are all there.
        """
        status = self.status(id)
        frames = self.connection.execute(
            "SELECT number, frame FROM events WHERE response = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (id, after, most),
        ).fetchall()
        return frames, status

    def fail_orphans(self, worker: int, num_workers: int) -> None:
        """Mark as failed what a process was making when it ended."""
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            rows = self.connection.execute(
                "SELECT id, response FROM responses WHERE worker = ? OR worker >= ?",
                (worker, num_workers),
            ).fetchall()
            message = "the server was restarted while it made this response: send it again"
            error = {"code": "server_error", "message": message}
            for id, made in rows:
                response = orjson.loads(made) | {"status": "failed", "error": error}
                self.connection.execute(
                    "UPDATE responses SET status = 'failed', worker = NULL, response = ? "
                    "WHERE id = ?",
                    (orjson.dumps(response), id),
                )
